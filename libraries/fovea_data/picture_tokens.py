"""Counts the tokens of pictures by a formula of the model family, or else by asking the server."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fovea import vision
from fovea.runtime.model_files import read_added_tokens, read_image_processor, read_json
from fovea.wire.errors import FailedPrecondition
from fovea_rollout.late_sdk import tinker
from fovea_rollout.messages import Picture

Formula = Callable[[int, int], int]
"""Returns the tokens of a picture by its width and height in pixels."""


class PictureTokens:
    """A counter of the tokens of pictures in a model's prompts. It counts once per picture size.

    Args:
        formula: Formula of the model family; None if it has none.
        ask: Asks a server for the tokens of a picture.
    """

    def __init__(self, formula: Formula | None, ask: Callable[[Picture], int] | None = None) -> None:
        self._formula, self._ask = formula, ask
        self._known: dict[tuple[int, int], int] = {}

    def of(self, picture: Picture) -> int:
        """Returns the number of tokens of a picture.

        Raises:
            InvalidInput: The picture cannot be read.
            FailedPrecondition: There is neither a formula nor a server.
        """
        size = picture.size
        if size not in self._known:
            if self._formula is not None:
                self._known[size] = self._formula(*size)
            elif self._ask is not None:
                self._known[size] = self._ask(picture)
            else:
                raise FailedPrecondition(
                    "this model family has no formula for the tokens of a picture: give a sampling client instead"
                )
        return self._known[size]

    async def token_count(self, picture: Picture) -> int:
        """Returns the number of tokens of a picture, as `Policy` does."""
        return self.of(picture)


def token_count(model: str | pathlib.Path | tinker.SamplingClient, size: tuple[int, int]) -> int:
    """Returns the number of tokens of a picture.

    Args:
        model: A checkpoint's directory or hub name, or a client that samples from the model.
        size: Width and height in pixels.

    Raises:
        FailedPrecondition: The model family has no formula, so a sampling client is needed.
    """
    if isinstance(model, (str, pathlib.Path)):
        counter = PictureTokens(checkpoint_formula(checkpoint_directory(str(model))))
    else:
        counter = PictureTokens(None, partial(ask_server, model))
    return counter.of(Picture.of_pixels(np.zeros((size[1], size[0], 3), np.uint8)))


def checkpoint_directory(name: str) -> pathlib.Path:
    """Returns the folder of a checkpoint's small files, which are downloaded if the name is a hub name."""
    directory = pathlib.Path(name).expanduser()
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download

    return pathlib.Path(snapshot_download(name, allow_patterns=["*.json"]))


def checkpoint_formula(directory: pathlib.Path) -> Formula | None:
    """Returns the formula of a checkpoint's model family; None for a family without one."""
    family = vision.bind(read_json(directory / "config.json"), read_added_tokens(directory))
    if family is None:
        return None
    settings = read_image_processor(directory)
    if "size" not in settings and "min_pixels" in settings:  # older files, which transformers completes in this way
        settings["size"] = {"shortest_edge": settings["min_pixels"], "longest_edge": settings["max_pixels"]}
    return family.token_counter(settings)


def ask_server(sampling: tinker.SamplingClient, picture: Picture) -> int:
    """Returns the number of tokens of a picture: the server scores it alone, with one log-probability per token.

    Raises what the SDK raises.
    """
    chunk = tinker.types.ImageChunk(data=picture.data, format=picture.format)
    scores: list[Any] = sampling.compute_logprobs(tinker.ModelInput(chunks=[chunk])).result()
    return len(scores)
