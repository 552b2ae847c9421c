"""What the renderer asks of a model family. A family computes on numbers only: no pixels, no torch, no transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from services.renderer.model_directory import Checkpoint

Grid = tuple[int, int, int]
"""Patches of one image before merging: time, height, width."""

TokenIds = npt.NDArray[np.int32]
"""Token ids, int32 [N]."""

ProcessorSettings = Mapping[str, Any]
"""Settings of the checkpoint's image processor, as its `to_dict` gives them."""


@dataclass(frozen=True)
class ImageSpan:
    """Where one image stands in the spliced tokens: its first placeholder, and its patch grid."""

    offset: int
    grid: Grid


class Family(Protocol):
    """One model family, bound to one checkpoint."""

    model_types: ClassVar[tuple[str, ...]]
    """The values of `model_type` in config.json that this family reads."""

    supports_images: ClassVar[bool]

    reserved_ids: Mapping[int, str]
    """Ids that stand for a piece of an image, with their names."""

    image_opener_id: int | None
    """The id that an image follows. Text may not carry one of `reserved_ids` right after it."""

    def __init__(self, checkpoint: Checkpoint, processor: ProcessorSettings) -> None:
        """Binds the family to a checkpoint. Raises ValueError, naming the setting, if the two do not fit."""

    def token_count(self, width: int, height: int) -> int:
        """The number of placeholder tokens that an image of this size in pixels takes, by geometry alone."""

    def placeholder_ids(self, grid: Grid) -> TokenIds:
        """The ids that the family's own processor puts in the place of an image: int32 [token count]."""

    def positions(self, length: int, spans: Sequence[ImageSpan]) -> TokenIds:
        """Rotary position ids (time, height, width) of an input of `length` tokens with images: int32 [3, length]."""
