"""The interface of a vision-language family, bound to one checkpoint. It computes on numbers, never on a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
"""Token ids, int32 [N]."""

ImageTensors = Mapping[str, npt.NDArray]
"""The tensors of one image by name."""

TokenCounter = Callable[[int, int], int]
"""The number of ids that replace an image of (width, height) pixels."""


_MARGINS = {"Gemma3Processor": "\n\n"}
"""The whitespace that a processor writes before and after an image, by the name of the processor's class."""


def image_margin(tokenizer: Any) -> str:
    """Returns the whitespace that a model's own processor writes on both sides of an image; empty for most models.

    It is text: the tokenizer joins its line feeds with those of the neighbouring text. So it is no part of an image's
    replacement, and the writer of a prompt puts it into the text before and after each image.

    Args:
        tokenizer: Of transformers; tokenizer_config.json names the class of the processor.
    """
    return _MARGINS.get(getattr(tokenizer, "init_kwargs", {}).get("processor_class") or "", "")


class Replacement(NamedTuple):
    """What stands in the place of one image.

    Attributes:
        ids: int32 [L].
        is_embedding: bool [L], where an embedding of the tower takes the place of the id's own.
    """

    ids: TokenIds
    is_embedding: npt.NDArray[np.bool_]


class ImageAt(NamedTuple):
    """One image of an input: the index of the first id that replaces it, and its tensors."""

    offset: int
    tensors: ImageTensors


# Under one of these a configuration names the token that an image follows.
_OPENER_KEYS = ("vision_start_token_id", "image_start_token_id", "boi_token_index", "boi_token_id")


class VisionFamily(ABC):
    """Facts about the images of one checkpoint.

    Args:
        config: config.json of the checkpoint.
        added_tokens: Ids of the added tokens of tokenizer.json by their text.

    Raises ValueError, naming the entry, for a configuration that lacks one.
    """

    model_types: ClassVar[tuple[str, ...]]
    """The values of `model_type` in config.json that this family reads."""

    opener: ClassVar[str]
    """The token that an image follows."""

    placeholders: ClassVar[tuple[str, ...]]
    """Tokens that stand for a piece of an image or a video. Text may not carry one right after the opener."""

    takes_adapters: ClassVar[bool] = True
    """Whether vLLM has LoRA for it; if not, all parameters are trained."""

    position_rows: ClassVar[int] = 1
    """Rows of the position ids of an input with images; 1 where they count on as in text."""

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
        """Counts the ids that replace an image by geometry alone; None if only processing an image tells.

        Args:
            processor: Settings of the checkpoint's image processor, as its `to_dict` gives them.

        Raises ValueError, naming the setting, if processor and checkpoint do not fit.
        """

    @abstractmethod
    def replacement(self, tensors: ImageTensors) -> Replacement:
        """What the family's own processor puts in the place of an image of these tensors, which have no problem.

        Without the whitespace around it, see `image_margin`.
        """

    @abstractmethod
    def positions(self, length: int, images: Sequence[ImageAt]) -> npt.NDArray[np.int32] | None:
        """Position ids of an input of `length` ids with images, int32 [position_rows, length].

        None for a family without multimodal RoPE, where they are 0 .. length-1.
        """

    @abstractmethod
    def patch_count(self, embedding_count: int) -> int:
        """Patches of the tower that so many embeddings are made of: what its memory depends on."""

    @abstractmethod
    def tensors_problem(self, tensors: ImageTensors) -> str:
        """What is wrong with the tensors of an image, or the empty string: names, types and shapes."""

    @abstractmethod
    def blank_image(self) -> dict[str, npt.NDArray]:
        """Tensors of a small grey image, for warm-ups."""

    def image_problem(self, tensors: ImageTensors, is_embedding: npt.NDArray[np.bool_]) -> str:
        """What is wrong with tensors for an image whose ids are embeddings where `is_embedding` (bool [L]) says."""
        if problem := self.tensors_problem(tensors):
            return problem
        expected = self.replacement(tensors).is_embedding
        if len(expected) != len(is_embedding):
            return f"the tensors make {len(expected)} ids, the request says {len(is_embedding)}"
        if not np.array_equal(expected, is_embedding):
            return "embedding_mask is not that of the tensors"
        return ""

    def find_lost_image(self, ids: npt.NDArray, previous_id: int = -1) -> int | None:
        """Index of the first placeholder that follows the opener where no image is: an image that was lost; or None.

        A placeholder by itself is a token like any other, since a model may sample one.

        Args:
            ids: Token ids [N] without those of images that are there (or with -1 in their places).
            previous_id: The id before `ids`.
        """
        if self.opener_id is None or not len(ids):
            return None
        opened = np.concatenate(([previous_id], ids[:-1])) == self.opener_id
        lost = np.flatnonzero(opened & np.isin(ids, list(self.reserved_ids)))
        return int(lost[0]) if lost.size else None


def require(config: Mapping[str, Any], key: str) -> Any:
    """A top-level entry of config.json. Raises ValueError if it is missing."""
    if config.get(key) is None:
        raise ValueError(f"config.json has no {key}")
    return config[key]
