"""Text-only models of any architecture: ids pass through, images are refused before a family is asked about them."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NoReturn

from services.renderer.families.base import Grid, ImageSpan, ProcessorSettings
from services.renderer.model_directory import Checkpoint


class TextOnly:
    """A checkpoint without a vision tower."""

    model_types: ClassVar[tuple[str, ...]] = ()
    supports_images: ClassVar[bool] = False

    def __init__(self, checkpoint: Checkpoint, processor: ProcessorSettings) -> None:
        del checkpoint, processor
        self.reserved_ids: Mapping[int, str] = {}
        self.image_opener_id: int | None = None

    def token_count(self, width: int, height: int) -> NoReturn:
        """No image has a place here; asking is a mistake of the renderer."""
        raise TypeError("a text-only model takes no images")

    def placeholder_ids(self, grid: Grid) -> NoReturn:
        """No image has a place here; asking is a mistake of the renderer."""
        raise TypeError("a text-only model takes no images")

    def positions(self, length: int, spans: Sequence[ImageSpan]) -> NoReturn:
        """Positions are 0 .. length-1 and stay unsaid; asking is a mistake of the renderer."""
        raise TypeError("a text-only model has plain positions")
