"""How many tokens pictures take: by the checkpoint's own files where they tell, else by asking the server."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tinker
from tinker.types import ImageChunk

from fovea import vision
from fovea.runtime.model_files import read_added_tokens, read_image_processor, read_json
from fovea.wire.errors import FailedPrecondition
from fovea_rollout.messages import Picture

Formula = Callable[[int, int], int]
"""Tokens of a picture by its width and height in pixels."""


class PictureTokens:
    """Tokens that pictures take in a model's prompts, worked out once per size.

    Args:
        formula: Of the checkpoint; None if only processing a picture tells.
        ask: Asks a server about a picture.
    """

    def __init__(self, formula: Formula | None, ask: Callable[[Picture], int] | None = None) -> None:
        self._formula, self._ask = formula, ask
        self._known: dict[tuple[int, int], int] = {}

    def of(self, picture: Picture) -> int:
        """Tokens of a picture.

        Raises:
            InvalidInput: The picture cannot be read.
            FailedPrecondition: Neither files nor a server tell.
        """
        size = picture.size
        if size not in self._known:
            if self._formula is not None:
                self._known[size] = self._formula(*size)
            elif self._ask is not None:
                self._known[size] = self._ask(picture)
            else:
                raise FailedPrecondition(
                    "this model's files do not tell how many tokens a picture takes: give a sampling client instead"
                )
        return self._known[size]

    async def token_count(self, picture: Picture) -> int:
        """`of`, for those who await it."""
        return self.of(picture)


def token_count(model: str | pathlib.Path | tinker.SamplingClient, size: tuple[int, int]) -> int:
    """Tokens that a picture takes.

    Args:
        model: A checkpoint's directory or hub name, or a client that samples from the model.
        size: Width and height in pixels.

    Raises:
        FailedPrecondition: The checkpoint's files do not tell; a sampling client does.
    """
    if isinstance(model, (str, pathlib.Path)):
        counter = PictureTokens(checkpoint_formula(checkpoint_directory(str(model))))
    else:
        counter = PictureTokens(None, partial(ask_server, model))
    return counter.of(Picture.of_pixels(np.zeros((size[1], size[0], 3), np.uint8)))


def checkpoint_directory(name: str) -> pathlib.Path:
    """Where a checkpoint's small files are: a directory, or those of a hub name, downloaded if they are not here."""
    directory = pathlib.Path(name).expanduser()
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download

    return pathlib.Path(snapshot_download(name, allow_patterns=["*.json"]))


def checkpoint_formula(directory: pathlib.Path) -> Formula | None:
    """The family's formula, or None for a family without one."""
    family = vision.bind(read_json(directory / "config.json"), read_added_tokens(directory))
    if family is None:
        return None
    settings = read_image_processor(directory)
    if "size" not in settings and "min_pixels" in settings:  # older files, which transformers completes so
        settings["size"] = {"shortest_edge": settings["min_pixels"], "longest_edge": settings["max_pixels"]}
    return family.token_counter(settings)


def ask_server(sampling: tinker.SamplingClient, picture: Picture) -> int:
    """Has a picture scored alone: there is one log-probability per token. Raises what the SDK raises."""
    chunk = ImageChunk(data=picture.data, format=picture.format)
    scores: list[Any] = sampling.compute_logprobs(tinker.ModelInput(chunks=[chunk])).result()
    return len(scores)
