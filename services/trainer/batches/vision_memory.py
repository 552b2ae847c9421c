"""What the frozen vision tower made of images: computed once an image, not once a datum or an epoch.

While an adapter leaves the tower alone, its output depends on the image only. Prompts come back (epochs, groups of
samples, turns), so remembering it saves most of the tower's work. Models that train the tower never come here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fovea.runtime.byte_lru import ByteLru
from services.trainer.model.families.base import VisionOutput

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class SeenImage:
    """The tower's output for one image: [m, D] embeddings and deepstack features, and the grid that it had."""

    grid_thw: Grid
    output: VisionOutput

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return sum(t.numel() * t.element_size() for t in (self.output.embeddings, *self.output.deepstack))


class VisionMemory:
    """Least recently used outputs by image digest, up to `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._held: ByteLru[SeenImage] = ByteLru(max_bytes)

    def recall(self, images: Mapping[str, Grid]) -> dict[str, SeenImage]:
        """Those of the images (digest to grid) that are held, under that grid."""
        found = {}
        for digest, grid in images.items():
            seen = self._held.get(digest)
            if seen is not None and seen.grid_thw == grid:
                found[digest] = seen
        return found

    def remember(self, images: Mapping[str, SeenImage]) -> None:
        """Holds outputs, dropping the least recently used above the limit."""
        for digest, seen in images.items():
            if digest not in self._held and seen.size_bytes <= self._held.limit_bytes:
                self._held.put(digest, seen, seen.size_bytes)


def split_output(output: VisionOutput, grids: Sequence[Grid], merge_size: int) -> list[SeenImage]:
    """One entry an image, in order; copies, so that dropping one frees its memory."""
    counts = [time * height * width // merge_size**2 for time, height, width in grids]
    embeddings = torch.split(output.embeddings, counts)
    deepstack = [torch.split(feature, counts) for feature in output.deepstack]
    return [
        SeenImage(grid, VisionOutput(embeddings[i].clone(), tuple(level[i].clone() for level in deepstack)))
        for i, grid in enumerate(grids)
    ]


def join_outputs(images: Iterable[SeenImage]) -> VisionOutput:
    """The output for several images, in order."""
    outputs = [seen.output for seen in images]
    levels = zip(*(output.deepstack for output in outputs), strict=True)
    return VisionOutput(
        torch.cat([output.embeddings for output in outputs]), tuple(torch.cat(list(level)) for level in levels)
    )
