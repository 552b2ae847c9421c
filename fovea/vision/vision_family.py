"""The interface of a vision-language family, bound to one checkpoint. It computes on numbers, never on a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

Grid = tuple[int, int, int]
"""Patches of one image before merging: time, height, width."""

TokenIds = npt.NDArray[np.int32]
"""Token ids, int32 [N]."""

TensorShapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""numpy dtype name and shape of each tensor of an image, by processor name."""

TokenCounter = Callable[[int, int], int]
"""Number of placeholder tokens of an image of (width, height) pixels."""


class GridSpan(NamedTuple):
    """Where one image stands in the spliced tokens: its first placeholder, and its patch grid."""

    offset: int
    grid: Grid


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

    uses_mrope: ClassVar[bool]
    """Whether an input with images has position ids of its own, int32 [3, N]."""

    merge_size: int
    """Patches along each side of the square that becomes one token."""

    patch_bytes: int
    """Uint8 values of one patch."""

    def __init__(self, config: Mapping[str, Any], added_tokens: Mapping[str, int]) -> None:
        self.image_token_id = int(require(config, "image_token_id"))
        self.opener_id: int | None = config.get("vision_start_token_id", added_tokens.get(self.opener))
        reserved = {added_tokens[name]: name for name in self.placeholders if name in added_tokens}
        reserved.setdefault(self.image_token_id, "the image placeholder")
        if config.get("video_token_id") is not None:
            reserved.setdefault(int(config["video_token_id"]), "the video placeholder")
        self.reserved_ids: Mapping[int, str] = reserved
        """Ids of `placeholders`, with their names."""

    @abstractmethod
    def token_counter(self, processor: Mapping[str, Any]) -> TokenCounter:
        """Counts the placeholder tokens of an image by geometry alone.

        Args:
            processor: Settings of the checkpoint's image processor, as its `to_dict` gives them.

        Raises ValueError, naming the setting, if processor and checkpoint do not fit.
        """

    @abstractmethod
    def token_count(self, grid: Grid) -> int:
        """The number of placeholder tokens that an image of this grid takes. The grid has no problem."""

    @abstractmethod
    def positions(self, length: int, spans: Sequence[GridSpan]) -> TokenIds:
        """Rotary position ids (time, height, width) of an input of `length` tokens with images: int32 [3, length]."""

    @abstractmethod
    def grid_problem(self, grid: Sequence[int]) -> str:
        """What is wrong with a patch grid, `grid_thw` by name, or the empty string."""

    @abstractmethod
    def tensor_shapes(self, grid: Grid) -> TensorShapes:
        """The tensors of a well-formed image of this grid."""

    @abstractmethod
    def grid_of(self, tensors: Mapping[str, npt.NDArray]) -> Grid:
        """The grid that the tensors of one image say."""

    @abstractmethod
    def blank_image(self) -> tuple[dict[str, npt.NDArray], Grid]:
        """Tensors and grid of a small grey image, for warm-ups."""

    def placeholder_ids(self, grid: Grid) -> TokenIds:
        """The ids that the family's own processor puts in the place of an image: int32 [token count]."""
        return np.full(self.token_count(grid), self.image_token_id, dtype=np.int32)

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

    def tensors_problem(self, grid: Grid, tensors: Mapping[str, npt.NDArray]) -> str:
        """What is wrong with the tensors of an image of this grid, or the empty string."""
        expected = self.tensor_shapes(grid)
        if set(tensors) != set(expected):
            return f"tensors are {sorted(tensors)}, must be {sorted(expected)}"
        for name, (dtype, shape) in expected.items():
            array = tensors[name]
            if array.dtype != np.dtype(dtype):
                return f"{name} is {array.dtype.name}, must be {dtype}"
            if array.shape != shape:
                return f"{name} has shape {list(array.shape)}, must be {list(shape)} for the grid {list(grid)}"
        if (found := self.grid_of(tensors)) != tuple(grid):
            return f"the tensors are of the grid {list(found)}, the request says {list(grid)}"
        return ""


def require(config: Mapping[str, Any], key: str) -> Any:
    """A top-level entry of config.json. Raises ValueError if it is missing."""
    if config.get(key) is None:
        raise ValueError(f"config.json has no {key}")
    return config[key]
