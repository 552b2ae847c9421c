"""One micro-batch of one rank: datums packed end to end, without padding.

Shapes: T packed tokens, K most targets a position, M embeddings of images, L layers with experts, k experts of a token.
"""

# ruff: noqa: N803, N815 -- the suffix of a tensor's name is its shape

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fovea.vision.vision_family import VisionFamily
from fovea.wire.features import FeatureTensors
from fovea_services.trainer.batches.datum_decoding import Datum

FILLER_TOKENS = 2
"""Of a rank without a datum in a step. One would have torch.compile make kernels for that size alone."""


@dataclass(frozen=True)
class Documents:
    """Bounds of packed documents: int32 [N + 1] (0, end of first, ..., T), and the longest."""

    bounds: Tensor
    longest: int


@dataclass(frozen=True)
class TowerInput:
    """What the vision tower is run on.

    Args:
        calls: Tensors by name, of as many images a call as can stand one after another along the first dimension.
        images: Digest and number of embeddings of each image, in order; empty for a filler, which only joins the
            collectives.
    """

    calls: tuple[dict[str, Tensor], ...]
    images: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Placement:
    """Where images stand.

    Args:
        digests: Of all images of the micro-batch, in packed order.
        index_M: int64, packed positions of their embeddings.
    """

    digests: tuple[str, ...]
    index_M: Tensor


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device.

    Args:
        tokens_T: int64.
        positions: int64 [rows, T] for multimodal RoPE, else [1, T].
        targets_TK: int64, 0 where a datum has fewer targets than K.
        inputs: What the loss reads, by name, for each datum.
        tower: None if no rank runs the vision tower in this step.
        placement: None if no image stands here.
        datums: What is packed, in order; empty for a filler.
        experts_TLk: int16, which the layers follow, -1 for tokens whose they choose; None if they choose all.
    """

    tokens_T: Tensor
    positions: Tensor
    documents: Documents
    targets_TK: Tensor
    inputs: tuple[dict[str, Tensor], ...]
    tower: TowerInput | None
    placement: Placement | None
    datums: tuple[Datum, ...]
    experts_TLk: Tensor | None = None

    def split_logprobs(self, logprobs_TK: Tensor) -> list[Tensor]:
        """The log-probabilities of each datum, views shaped as its targets; of a filler, none."""
        if not self.datums:
            return []
        parts = torch.split(logprobs_TK, [len(datum.tokens) for datum in self.datums])
        return [
            part[:, 0] if datum.flat_targets else part[:, : datum.targets.shape[1]]
            for part, datum in zip(parts, self.datums, strict=True)
        ]


@dataclass(frozen=True)
class BatchLayout:
    """What batches of a model look like.

    Args:
        vision: The family of a vision-language model; None for one that takes text only.
        device: Where batches go.
    """

    vision: VisionFamily | None
    device: torch.device

    def pack(
        self,
        datums: Sequence[Datum],
        images: Mapping[str, FeatureTensors],
        run_tower: bool,
        cached: Container[str] | None,
    ) -> Batch:
        """Packs datums; an empty list makes a filler.

        Args:
            images: Tensors of images by digest.
            run_tower: Whether the ranks run the vision tower in this step.
            cached: Digests of images whose output is known; None if the tower is trained and every image is run.
        """
        lengths = [len(datum.tokens) for datum in datums] or [FILLER_TOKENS]
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        width = max((datum.targets.shape[1] for datum in datums), default=1)
        tower = self._tower(datums, images, cached) if run_tower else None
        if not datums:
            return self._filler(bounds, tower)
        return Batch(
            self._move(np.concatenate([datum.tokens for datum in datums])),
            self._move(np.concatenate([self._positions(datum) for datum in datums], axis=1)),
            Documents(self._move(bounds), max(lengths)),
            self._move(np.concatenate([_widen(datum.targets, width) for datum in datums])),
            self._inputs(datums),
            tower,
            self._placement(datums, bounds),
            tuple(datums),
            self._experts(datums),
        )

    def _experts(self, datums: Sequence[Datum]) -> Tensor | None:
        shape = next((datum.experts.shape[1:] for datum in datums if datum.experts is not None), None)
        if shape is None:
            return None
        rows = [
            np.full((len(datum.tokens), *shape), -1, np.int16) if datum.experts is None else datum.experts
            for datum in datums
        ]
        return self._move(np.concatenate(rows))

    def _inputs(self, datums: Sequence[Datum]) -> tuple[dict[str, Tensor], ...]:
        """Moves all values of one type at once: datums may be many and small."""
        moved: list[dict[str, Tensor]] = [{} for _ in datums]
        places = [(index, name, value) for index, datum in enumerate(datums) for name, value in datum.inputs.items()]
        for dtype in {value.dtype for _, _, value in places}:
            own = [place for place in places if place[2].dtype == dtype]
            flat = self._move(np.concatenate([value.ravel() for _, _, value in own]))
            parts = torch.split(flat, [value.size for _, _, value in own])
            for (index, name, value), part in zip(own, parts, strict=True):
                moved[index][name] = part.view(value.shape)
        return tuple(moved)

    def _filler(self, bounds: npt.NDArray[np.int32], tower: TowerInput | None) -> Batch:
        zeros = torch.zeros(FILLER_TOKENS, 1, dtype=torch.int64, device=self.device)
        positions = zeros.T.expand(self._position_rows, -1)
        return Batch(zeros[:, 0], positions, Documents(self._move(bounds), FILLER_TOKENS), zeros, (), tower, None, ())

    def _positions(self, datum: Datum) -> npt.NDArray[np.int64]:
        if datum.positions is not None:
            return datum.positions
        count = len(datum.tokens)
        return np.broadcast_to(np.arange(count, dtype=np.int64), (self._position_rows, count))

    @property
    def _position_rows(self) -> int:
        return 1 if self.vision is None else self.vision.position_rows

    def _tower(
        self, datums: Sequence[Datum], images: Mapping[str, FeatureTensors], cached: Container[str] | None
    ) -> TowerInput:
        wanted = wanted_images(datums, cached)
        inputs = [images[digest] for digest, _ in wanted]
        if not inputs:
            assert self.vision is not None  # a text model runs no tower
            inputs = [self.vision.blank_image()]
        alike = (list(members) for _, members in groupby(inputs, _row_shapes))
        calls = [
            {name: self._move(np.concatenate([image[name] for image in members])) for name in members[0]}
            for members in alike
        ]
        return TowerInput(tuple(calls), tuple(wanted))

    def _placement(self, datums: Sequence[Datum], bounds: npt.NDArray[np.int32]) -> Placement | None:
        digests, index = [], []
        for datum, start in zip(datums, bounds, strict=False):
            for span in datum.spans:
                digests.append(span.feature.digest)
                index.append(start + span.offset + np.flatnonzero(span.is_embedding))
        return Placement(tuple(digests), self._move(np.concatenate(index))) if index else None

    def _move(self, array: npt.NDArray) -> Tensor:
        if self.device.type == "cpu":
            return torch.from_numpy(array)
        # From memory that is not pinned the copy waits for the kernels before it, and the next ones come late.
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)


def wanted_images(datums: Iterable[Datum], cached: Container[str] | None) -> list[tuple[str, int]]:
    """Digest and number of embeddings of images to run the tower on: all, or each that is not cached, once."""
    images = [(span.feature.digest, span.embedding_count) for datum in datums for span in datum.spans]
    if cached is None:
        return images
    return [(digest, count) for digest, count in dict(images).items() if digest not in cached]


def _row_shapes(image: FeatureTensors) -> dict[str, tuple[int, ...]]:
    """What must be equal for images to stand one after another: all sizes but the first."""
    return {name: array.shape[1:] for name, array in image.items()}


def _widen(rows: npt.NDArray, width: int) -> npt.NDArray:
    return rows if rows.shape[1] == width else np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
