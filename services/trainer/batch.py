"""One micro-batch of one rank: datums packed end to end, without padding.

Shapes: T packed tokens, K most targets a position, P patches, W bytes of a patch, I images, M placeholder tokens.
"""

# ruff: noqa: N803, N815 -- the suffix of a tensor's name is its shape

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.trainer.datums import Datum
from services.trainer.families.base import Documents
from services.trainer.losses import Loss

Patches = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ImageBatch:
    """The images of a micro-batch.

    Args:
        patches_PW: uint8.
        grids_I3: int64, time, height, width in patches.
        index_M: int64, packed positions of the placeholder tokens; None for a filler image that stands nowhere.
    """

    patches_PW: Tensor
    grids_I3: Tensor
    index_M: Tensor | None


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device.

    Args:
        tokens_T: int64.
        positions: int64 [3, T] for multimodal RoPE, else [1, T].
        targets_TK: int64, 0 where a datum has fewer targets than K.
        inputs_TK: float32 by name, 0 there.
        images: None if no rank has an image in this step.
        datums: What is packed, in order; empty for a filler.
    """

    tokens_T: Tensor
    positions: Tensor
    documents: Documents
    targets_TK: Tensor
    inputs_TK: dict[str, Tensor]
    images: ImageBatch | None
    datums: tuple[Datum, ...]

    def split_logprobs(self, logprobs_TK: Tensor) -> dict[int, npt.NDArray[np.float32]]:
        """float32 log-probabilities by datum index, each shaped as the datum's targets."""
        rows = logprobs_TK.cpu().numpy()
        result = {}
        start = 0
        for datum in self.datums:
            own = rows[start : start + len(datum.tokens), : datum.targets.shape[1]]
            result[datum.index] = own[:, 0].copy() if datum.flat_targets else own.copy()
            start += len(datum.tokens)
        return result


@dataclass(frozen=True)
class BatchLayout:
    """What batches of a model look like.

    Args:
        uses_mrope: Whether positions are [3, T].
        patch_bytes: W; 0 for a text model.
        merge_size: Patches along each side of a token's square.
        device: Where batches go.
    """

    uses_mrope: bool
    patch_bytes: int
    merge_size: int
    device: torch.device

    def pack(self, datums: Sequence[Datum], loss: Loss, patches: Mapping[str, Patches], has_vision: bool) -> Batch:
        """Packs datums; an empty list makes a filler of one token. `patches` has uint8 [P, W] by digest."""
        lengths = [len(datum.tokens) for datum in datums] or [1]
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        width = max((datum.targets.shape[1] for datum in datums), default=1)
        if not datums:
            return self._filler(loss, bounds, has_vision)
        return Batch(
            self._move(np.concatenate([datum.tokens for datum in datums])),
            self._move(np.concatenate([self._positions(datum) for datum in datums], axis=1)),
            Documents(self._move(bounds), max(lengths)),
            self._move(np.concatenate([_widen(datum.targets, width) for datum in datums])),
            {
                given.name: self._move(np.concatenate([_widen(datum.inputs[given.name], width) for datum in datums]))
                for given in loss.inputs
            },
            self._images(datums, bounds, patches) if has_vision else None,
            tuple(datums),
        )

    def _filler(self, loss: Loss, bounds: npt.NDArray[np.int32], has_vision: bool) -> Batch:
        zero_11 = torch.zeros(1, 1, device=self.device)
        return Batch(
            zero_11.long().squeeze(0),
            torch.zeros(3 if self.uses_mrope else 1, 1, dtype=torch.int64, device=self.device),
            Documents(self._move(bounds), 1),
            zero_11.long(),
            {given.name: zero_11 for given in loss.inputs},
            self._filler_image() if has_vision else None,
            (),
        )

    def _positions(self, datum: Datum) -> npt.NDArray[np.int64]:
        rows = 3 if self.uses_mrope else 1
        if datum.positions is not None:
            return datum.positions
        return np.broadcast_to(np.arange(len(datum.tokens), dtype=np.int64), (rows, len(datum.tokens)))

    def _images(
        self, datums: Sequence[Datum], bounds: npt.NDArray[np.int32], patches: Mapping[str, Patches]
    ) -> ImageBatch:
        pixels, grids, index = [], [], []
        for datum, start in zip(datums, bounds, strict=False):
            for span in datum.spans:
                pixels.append(patches[span.feature.digest])
                grids.append(span.grid_thw)
                index.append(np.arange(start + span.offset, start + span.offset + span.length, dtype=np.int64))
        if not pixels:
            return self._filler_image()
        return ImageBatch(
            self._move(np.concatenate(pixels)),
            self._move(np.array(grids, dtype=np.int64)),
            self._move(np.concatenate(index)),
        )

    def _filler_image(self) -> ImageBatch:
        side = self.merge_size
        return ImageBatch(
            torch.zeros(side * side, self.patch_bytes, dtype=torch.uint8, device=self.device),
            torch.tensor([[1, side, side]], device=self.device),
            None,
        )

    def _move(self, array: npt.NDArray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _widen(rows: npt.NDArray, width: int) -> npt.NDArray:
    return rows if rows.shape[1] == width else np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
