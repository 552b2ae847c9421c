"""The interface of a vision-language family, bound to one checkpoint. It computes on numbers, never on a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
"""Token ids, int32 [N]."""

ImageTensors = Mapping[str, npt.NDArray]
"""The tensors of one image, keyed by their names."""

TokenCounter = Callable[[int, int], int]
"""A function of (width, height) in pixels that returns the number of ids that replace an image."""


_MARGINS = {"Gemma3Processor": "\n\n"}
"""Whitespace that a processor writes before and after an image, keyed by the name of the processor's class."""


def image_margin(tokenizer: Any, index: int = 0) -> tuple[str, str]:
    """Returns the text that a model's own processor writes before and after an image; empty for most models.

    It is not part of an image's replacement, which is the same anywhere in a prompt: the tokenizer joins Gemma 3's line
    feeds with those of the neighbouring text, and MiniCPM-V numbers the images. The writer of a prompt puts it into the
    text before and after each image.

    Args:
        tokenizer: A tokenizer of transformers. For Gemma 3, tokenizer_config.json contains the class name of the
            processor; for MiniCPM-V, it names the tokens around a number.
        index: The number of images before it in the prompt.
    """
    if (start := getattr(tokenizer, "image_id_start_token", None)) is not None:
        return f"{start}{index}{tokenizer.image_id_end_token}", ""
    margin = _MARGINS.get(getattr(tokenizer, "init_kwargs", {}).get("processor_class") or "", "")
    return margin, margin


def with_margins(text: str, placeholder: str, tokenizer: Any, index: int = 0) -> str:
    """Returns a text with the margins of the images for which its placeholders stand; see `image_margin`.

    Args:
        index: The number of images before the text.
    """
    found, *runs = text.split(placeholder)
    for place, run in enumerate(runs, index):
        before, after = image_margin(tokenizer, place)
        found += before + placeholder + after + run
    return found


class Replacement(NamedTuple):
    """The ids that replace one image.

    Attributes:
        ids: int32 [L].
        is_embedding: bool [L], true where an embedding of the vision tower replaces the id's own embedding.
    """

    ids: TokenIds
    is_embedding: npt.NDArray[np.bool_]


class ImageAt(NamedTuple):
    """One image of an input: the index of the first id that replaces it, and its tensors."""

    offset: int
    tensors: ImageTensors


# Config entries that may contain the token that precedes an image.
_OPENER_KEYS = ("vision_start_token_id", "image_start_token_id", "boi_token_index", "boi_token_id")


class VisionFamily(ABC):
    """Facts about the images of one checkpoint.

    Args:
        config: config.json of the checkpoint.
        added_tokens: Ids of the added tokens of tokenizer.json, keyed by text.

    Raises ValueError, which names the entry, if the config lacks one.
    """

    model_types: ClassVar[tuple[str, ...]]
    """Values of `model_type` in config.json that this family handles."""

    opener: ClassVar[str]
    """The token that precedes an image."""

    placeholders: ClassVar[tuple[str, ...]]
    """Tokens that stand for a component of an image or a video. Text may not have one directly after the opener."""

    takes_adapters: ClassVar[bool] = True
    """True if vLLM supports LoRA for it; otherwise all parameters are trained."""

    position_rows: ClassVar[int] = 1
    """Rows of the position ids of an input with images; 1 if they count up as for text."""

    def __init__(self, config: Mapping[str, Any], added_tokens: Mapping[str, int]) -> None:
        token_key = "image_token_index" if config.get("image_token_index") is not None else "image_token_id"
        self.image_token_id = int(require(config, token_key))
        openers = (config[key] for key in _OPENER_KEYS if config.get(key) is not None)
        self.opener_id: int | None = next(openers, added_tokens.get(self.opener))
        reserved = {added_tokens[name]: name for name in self.placeholders if name in added_tokens}
        reserved.setdefault(self.image_token_id, "the image placeholder")
        if config.get("video_token_id") is not None:
            reserved.setdefault(int(config["video_token_id"]), "the video placeholder")
        self.reserved_ids: Mapping[int, str] = reserved
        """Ids of `placeholders`, with their names."""

    @abstractmethod
    def token_counter(self, processor: Mapping[str, Any]) -> TokenCounter | None:
        """Returns a function that computes the number of ids from the image size alone; None if that is impossible.

        Args:
            processor: Settings of the checkpoint's image processor, as from its `to_dict`.

        Raises ValueError, which names the setting, if processor and checkpoint do not match.
        """

    @abstractmethod
    def replacement(self, tensors: ImageTensors) -> Replacement:
        """Returns the ids that the family's processor writes for an image, computed from the image's valid tensors.

        They do not include the text around the image; see `image_margin`.
        """

    @abstractmethod
    def positions(self, length: int, images: Sequence[ImageAt]) -> npt.NDArray[np.int32] | None:
        """Returns the position ids, int32 [position_rows, length], of an input of `length` ids with images.

        None for a family without multimodal RoPE, where they are 0 .. length-1.
        """

    @abstractmethod
    def patch_count(self, embedding_count: int) -> int:
        """Returns the number of patches for a number of embeddings; the tower's memory depends on it."""

    @abstractmethod
    def tensors_problem(self, tensors: ImageTensors) -> str:
        """Checks names, types and shapes of an image's tensors. Returns the problem; empty if there is none."""

    @abstractmethod
    def blank_image(self) -> dict[str, npt.NDArray]:
        """Returns the tensors of a small grey image, for warm-ups."""

    def image_problem(self, tensors: ImageTensors, is_embedding: npt.NDArray[np.bool_]) -> str:
        """Checks tensors against the ids of an image. Returns the problem; empty if there is none.

        Args:
            tensors: Tensors of the image.
            is_embedding: bool [L], which of the ids are embeddings according to the request.
        """
        if problem := self.tensors_problem(tensors):
            return problem
        expected = self.replacement(tensors).is_embedding
        if len(expected) != len(is_embedding):
            return f"the tensors make {len(expected)} ids, but the request has {len(is_embedding)}"
        if not np.array_equal(expected, is_embedding):
            return "embedding_mask is not that of the tensors"
        return ""

    def find_lost_image(self, ids: npt.NDArray, previous_id: int = -1) -> int | None:
        """Returns the index of the first placeholder that follows the opener but belongs to no image, or None.

        Such a placeholder means that an image was lost. A placeholder elsewhere is an ordinary token, which a model may
        sample.

        Args:
            ids: Token ids [N] without those of existing images, or with -1 in their positions.
            previous_id: The id before `ids`.
        """
        if self.opener_id is None or not len(ids):
            return None
        opened = np.concatenate(([previous_id], ids[:-1])) == self.opener_id
        lost = np.flatnonzero(opened & np.isin(ids, list(self.reserved_ids)))
        return int(lost[0]) if lost.size else None


def require(config: Mapping[str, Any], key: str) -> Any:
    """Returns a top-level entry of config.json. Raises ValueError if it is missing."""
    if config.get(key) is None:
        raise ValueError(f"config.json has no {key}")
    return config[key]
