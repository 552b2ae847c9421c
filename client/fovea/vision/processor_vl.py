"""Families that use the output of the checkpoint's own Hugging Face processor, one image at a time.

The processor turns its image token and one image into ids and named tensors, which are passed on unchanged. The ids
travel with them as `input_ids`, so they are computed once. A family declares its tensors and the number of embeddings
that its tower makes of them. A model server uses this to reject tensors that would crash its engine.

A shape contains numbers and names. A name stands for any positive size, and for the same size everywhere in an image.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from fovea.vision.vision_family import ImageAt, ImageTensors, Replacement, VisionFamily, require

IDS = "input_ids"
"""Name, among an image's tensors, of the ids that replace the image, int32 [L]."""

# An approximate value of normalised pixels. It must not be 0: vLLM skips tiles of zeros as padding (Idefics 3).
_GREY = 0.5

# LLaVA-OneVision pools the embeddings of its tiles only if they exceed the maximum by this factor.
_LEAST_SHRINKING = 1.1
_SLICE_MERGE = 4
"""The patches on a side of the square that becomes one embedding of MiniCPM-V."""
# Limit for an image's side in pixels: far more than any image has, and small enough to multiply safely.
_LONGEST_SIDE = 2**24

Sizes = Mapping[str, int]
"""Sizes that the names in an image's shapes stand for."""


class Declared(NamedTuple):
    """Declaration of a tensor: the name of its numpy dtype, and its shape."""

    dtype: str
    shape: tuple[int | str, ...]


class ProcessorVL(VisionFamily):
    """Images as the tensors of the model's own processor."""

    opener: ClassVar[str] = ""
    placeholders: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Mapping[str, Any], added_tokens: Mapping[str, int]) -> None:
        super().__init__(config, added_tokens)
        self.declared: Mapping[str, Declared] = self._declare(config, require(config, "vision_config"))
        """The processor's tensors, keyed by their names."""

    @abstractmethod
    def _declare(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Declared]:
        """Returns the tensors of an image, from config.json and its `vision_config`.

        Also sets the attributes that `_embedding_count` needs.
        """

    @abstractmethod
    def _embedding_count(self, sizes: Sizes, tensors: ImageTensors) -> int:
        """Returns the number of embeddings that the tower makes of the tensors; 0 if their values are invalid.

        Their types and shapes have been checked before.
        """

    @abstractmethod
    def _blank(self) -> tuple[Sizes, dict[str, npt.NDArray]]:
        """Returns the sizes of a small image, and its tensors other than pixels."""

    def token_counter(self, processor: Mapping[str, Any]) -> None:
        return None

    def replacement(self, tensors: ImageTensors) -> Replacement:
        ids = tensors[IDS]
        return Replacement(ids, ids == self.image_token_id)

    def positions(self, length: int, images: Sequence[ImageAt]) -> None:
        return None

    def tensors_problem(self, tensors: ImageTensors) -> str:
        declared = {**self.declared, IDS: Declared("int32", ("ids",))}
        if set(tensors) != set(declared):
            return f"tensors are {sorted(tensors)}, must be {sorted(declared)}"
        sizes: dict[str, int] = {}
        for name, (dtype, shape) in declared.items():
            found = tensors[name]
            if found.dtype.name != dtype:
                return f"{name} is {found.dtype.name}, must be {dtype}"
            if not _matches(found.shape, shape, sizes):
                return f"{name} has shape {list(found.shape)}, must be [{', '.join(map(str, shape))}]"
        made = self._embedding_count(sizes, tensors)
        count = int(np.count_nonzero(self.replacement(tensors).is_embedding))
        if made != count:
            return f"{IDS} has {count} placeholders, but the tower makes {made} embeddings of the other tensors"
        return ""

    def blank_image(self) -> dict[str, npt.NDArray]:
        """Returns the tensors of an image of grey pixels, and ids that are only placeholders."""
        sizes, others = self._blank()
        pixels = {
            name: np.full([sizes[size] if isinstance(size, str) else size for size in shape], _GREY, dtype)
            for name, (dtype, shape) in self.declared.items()
            if name not in others
        }
        tensors = pixels | others
        ids = np.full(self._embedding_count(sizes, tensors), self.image_token_id, np.int32)
        return tensors | {IDS: ids}


class TiledVL(ProcessorVL):
    """Images in square tiles of one size, each with the same number of embeddings."""

    model_types: ClassVar[tuple[str, ...]] = ("internvl", "gemma3")
    opener = "<img>"

    def patch_count(self, embedding_count: int) -> int:
        return embedding_count * self._tile_patches // self._tile_embeddings

    def _declare(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Declared]:
        side, patch = _first(vision["image_size"]), _first(vision["patch_size"])
        self._tile_patches = (side // patch) ** 2
        self._tile_embeddings = self._count(config, self._tile_patches)
        return {"pixel_values": Declared("float32", ("tiles", int(vision.get("num_channels", 3)), side, side))}

    def _count(self, config: Mapping[str, Any], patches: int) -> int:
        key = "mm_tokens_per_image" if config["model_type"] == "gemma3" else "image_seq_length"
        return int(require(config, key))

    def _embedding_count(self, sizes: Sizes, tensors: ImageTensors) -> int:
        return sizes["tiles"] * self._tile_embeddings

    def _blank(self) -> tuple[Sizes, dict[str, npt.NDArray]]:
        return {"tiles": 1}, {}


class MaskedTilesVL(TiledVL):
    """Square tiles with a mask of their pixels. The tensors have an extra leading dimension of 1."""

    model_types = ("idefics3", "smolvlm")
    opener = "<fake_token_around_image>"

    def _declare(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Declared]:
        _, shape = super()._declare(config, vision)["pixel_values"]
        tiles, channels, height, width = shape
        return {
            "pixel_values": Declared("float32", (1, tiles, channels, height, width)),
            "pixel_attention_mask": Declared("int64", (1, tiles, height, width)),
        }

    def _count(self, config: Mapping[str, Any], patches: int) -> int:
        return patches // int(require(config, "scale_factor")) ** 2

    def _blank(self) -> tuple[Sizes, dict[str, npt.NDArray]]:
        shape = self.declared["pixel_attention_mask"].shape
        return {"tiles": 1}, {"pixel_attention_mask": np.ones((1, 1, *shape[2:]), np.int64)}  # type: ignore[arg-type]


class ShuffledTilesVL(TiledVL):
    """Square tiles, of which several patches are shuffled into one embedding, and a view of the whole after them."""

    model_types = ("llama4",)
    opener = "<|image_start|>"
    placeholders = ("<|image|>",)

    def _count(self, config: Mapping[str, Any], patches: int) -> int:
        return patches // round(1 / float(config["vision_config"].get("pixel_shuffle_ratio", 0.5)) ** 2)


class RaggedVL(ProcessorVL):
    """Whole images in their own aspect ratio. An embedding is a square of merged patches, and a token ends each row."""

    model_types = ("mistral3", "llava")

    def patch_count(self, embedding_count: int) -> int:
        return embedding_count * self._merge_size**2

    def _declare(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Declared]:
        if vision.get("model_type", "pixtral") != "pixtral":
            raise ValueError(
                f"vision_config.model_type is {vision['model_type']!r}; for LLaVA, Fovea supports only pixtral towers"
            )
        self._merge_size = int(config.get("spatial_merge_size", 1))
        self._factor = _first(vision["patch_size"]) * self._merge_size
        channels = int(vision.get("num_channels", 3))
        return {
            "pixel_values": Declared("float32", (1, channels, "height", "width")),
            "image_sizes": Declared("int64", (1, 2)),
        }

    def _embedding_count(self, sizes: Sizes, tensors: ImageTensors) -> int:
        height, width = sizes["height"], sizes["width"]
        if tensors["image_sizes"][0].tolist() != [height, width] or height % self._factor or width % self._factor:
            return 0
        return height // self._factor * (width // self._factor)

    def _blank(self) -> tuple[Sizes, dict[str, npt.NDArray]]:
        side = 2 * self._factor
        return {"height": side, "width": side}, {"image_sizes": np.array([[side, side]], np.int64)}


class UnpaddedTilesVL(ProcessorVL):
    """A thumbnail of the image and a grid of tiles.

    Embeddings of the padding in tiles are removed, and a token ends each row. The formulas are those of transformers
    5.19: `select_best_resolution` in image_processing_utils.py, and `unpad_image` and `pack_image_features` in
    models/llava_onevision/modeling_llava_onevision.py.
    """

    model_types = ("llava_next",)

    def patch_count(self, embedding_count: int) -> int:
        """Returns an upper bound, because embeddings are pooled only if there are many tiles."""
        return embedding_count * self._most_pooled

    def _declare(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Declared]:
        self._tile_side = _first(vision["image_size"])
        self._tile_patches = self._tile_side // _first(vision["patch_size"])
        self._grids = [(int(height), int(width)) for height, width in require(config, "image_grid_pinpoints")]
        most = max(height * width for height, width in self._grids) // self._tile_side**2
        self._most_tiles = self._tiles_unpooled(config) or most
        self._most_pooled = math.ceil(most / self._most_tiles)
        shape = (1, "tiles", int(vision.get("num_channels", 3)), self._tile_side, self._tile_side)
        return {"pixel_values": Declared("float32", shape), "image_sizes": Declared("int64", (1, 2))}

    def _embedding_count(self, sizes: Sizes, tensors: ImageTensors) -> int:
        height, width = tensors["image_sizes"][0].tolist()
        if min(height, width) < 1 or max(height, width) > _LONGEST_SIDE:
            return 0
        rows, columns = (side // self._tile_side for side in max(self._grids, key=partial(_fit, height, width)))
        if sizes["tiles"] != 1 + rows * columns:
            return 0
        rows, columns = rows * self._tile_patches, columns * self._tile_patches
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        shrink = math.sqrt(rows * columns / (self._most_tiles * self._tile_patches**2))
        if shrink > _LEAST_SHRINKING:
            rows, columns = int(rows // shrink), int(columns // shrink)
        return self._tile_patches**2 + rows * (columns + 1)

    def _tiles_unpooled(self, config: Mapping[str, Any]) -> int | None:
        """Returns the most tiles of an image without pooled embeddings; None if embeddings are never pooled."""
        return None

    def _blank(self) -> tuple[Sizes, dict[str, npt.NDArray]]:
        side = self._tile_side
        rows, columns = (side // self._tile_side for side in max(self._grids, key=partial(_fit, side, side)))
        return {"tiles": 1 + rows * columns}, {"image_sizes": np.array([[side, side]], np.int64)}


class PooledTilesVL(UnpaddedTilesVL):
    """Tiles as in `UnpaddedTilesVL`. With many tiles, embeddings are pooled to about as many as a few tiles have."""

    model_types = ("llava_onevision",)
    takes_adapters = False

    def _tiles_unpooled(self, config: Mapping[str, Any]) -> int | None:
        return int(config.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_"))


class PaddedTilesVL(ProcessorVL):
    """Tiles and a thumbnail in patches, padded to the same number of patches. An embedding is a square of patches."""

    model_types = ("lfm2_vl",)
    opener = "<|image_start|>"

    def patch_count(self, embedding_count: int) -> int:
        return embedding_count * self._factor**2

    def _declare(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Declared]:
        self._factor = int(require(config, "downsample_factor"))
        patch = int(vision.get("num_channels", 3)) * _first(vision["patch_size"]) ** 2
        return {
            "pixel_values": Declared("float32", ("tiles", "patches", patch)),
            "pixel_attention_mask": Declared("int32", ("tiles", "patches")),
            "spatial_shapes": Declared("int64", ("tiles", 2)),
        }

    def _embedding_count(self, sizes: Sizes, tensors: ImageTensors) -> int:
        shapes = tensors["spatial_shapes"]
        real = tensors["pixel_attention_mask"].sum(axis=1)
        if shapes.min() < 1 or shapes.max() > sizes["patches"] or not np.array_equal(shapes.prod(axis=1), real):
            return 0
        return 0 if (shapes % self._factor).any() else int((shapes // self._factor).prod(axis=1).sum())

    def _blank(self) -> tuple[Sizes, dict[str, npt.NDArray]]:
        side = 2 * self._factor
        mask, shapes = np.ones((1, side * side), np.int32), np.array([[side, side]], np.int64)
        return {"tiles": 1, "patches": side * side}, {"pixel_attention_mask": mask, "spatial_shapes": shapes}


class SlicedVL(ProcessorVL):
    """The whole image and slices of it, as patches in one long row. Squares of 2 x 2 patches are merged twice."""

    model_types = ("minicpmv4_6",)
    opener = "</image_id>"

    def patch_count(self, embedding_count: int) -> int:
        return embedding_count * _SLICE_MERGE**2

    def _declare(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Declared]:
        # vLLM or transformers ignores each of these.
        fixed = {"downsample_mode": "16x", "drop_vision_last_layer": False, "merger_times": 1}
        for entry, value in fixed.items():
            if config.get(entry, value) != value:
                raise ValueError(f"{entry} is {config[entry]!r}; Fovea supports only {value!r}")
        self._side = _first(vision["patch_size"])
        return {
            "pixel_values": Declared("float32", (1, int(vision.get("num_channels", 3)), self._side, "columns")),
            "target_sizes": Declared("int32", ("slices", 2)),
        }

    def _embedding_count(self, sizes: Sizes, tensors: ImageTensors) -> int:
        grids = tensors["target_sizes"].astype(np.int64)
        if grids.min() < 1 or grids.max() > sizes["columns"] or (grids % _SLICE_MERGE).any():
            return 0
        patches = int(grids.prod(axis=1).sum())
        return patches // _SLICE_MERGE**2 if patches * self._side == sizes["columns"] else 0

    def _blank(self) -> tuple[Sizes, dict[str, npt.NDArray]]:
        side = 2 * _SLICE_MERGE
        return {"columns": side * side * self._side}, {"target_sizes": np.array([[side, side]], np.int32)}


class PlacedPatchesVL(ProcessorVL):
    """Patches with their positions, padded with patches at position -1. Squares of patches are pooled."""

    model_types = ("gemma4",)

    def patch_count(self, embedding_count: int) -> int:
        return embedding_count * self._pooled**2

    def _declare(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Declared]:
        self._pooled = int(vision["pooling_kernel_size"])
        self._places = int(vision["position_embedding_size"])
        patch = 3 * _first(vision["patch_size"]) ** 2
        return {
            "pixel_values": Declared("float32", (1, "patches", patch)),
            "image_position_ids": Declared("int64", (1, "patches", 2)),
        }

    def _embedding_count(self, sizes: Sizes, tensors: ImageTensors) -> int:
        places = tensors["image_position_ids"]
        if places.min() < -1 or places.max() >= self._places:
            return 0
        return int(np.count_nonzero(places.min(axis=-1) >= 0)) // self._pooled**2

    def _blank(self) -> tuple[Sizes, dict[str, npt.NDArray]]:
        side = 2 * self._pooled
        places = np.indices((side, side)).reshape(2, -1).T[None, :, ::-1].astype(np.int64)
        return {"patches": side * side}, {"image_position_ids": np.ascontiguousarray(places)}


def _fit(height: int, width: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Rates how well a grid (height, width) fits an image: first by used pixels, then by few unused ones."""
    scale = min(grid[1] / width, grid[0] / height)
    taken = min(int(width * scale) * int(height * scale), width * height)
    return taken, taken - grid[0] * grid[1]


def _matches(found: Sequence[int], shape: Sequence[int | str], sizes: dict[str, int]) -> bool:
    """Returns whether a shape is as declared. Records in `sizes` what its names stand for."""
    if len(found) != len(shape):
        return False
    return all(
        size >= 1 and size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
        for size, wanted in zip(found, shape, strict=True)
    )


def _first(size: int | Sequence[int]) -> int:
    """Returns a side that a config gives as one number or as one number per side."""
    return int(size if isinstance(size, int) else size[0])
