"""Micro-batches: datums packed end to end, without padding. The loss of a filler is zero.

Shapes: T packed tokens, K maximum number of targets per position, M image embeddings or ids in the largest support, L
layers with experts, k experts per token.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fovea.vision.vision_family import VisionFamily
from fovea.wire.tensors import FeatureTensors
from fovea_trainer.batches.datum_decoding import Datum
from fovea_trainer.batches.datum_groups import DealtImages, Share
from fovea_trainer.batches.vision_cache import tower_calls

FILLER_TOKENS = 2
"""Length of the filler for a rank without a datum in a step. With length 1, torch.compile would build kernels for that
size alone.
"""


@dataclass(frozen=True)
class Documents:
    """The bounds of packed documents.

    Args:
        bounds: int32 [documents + 1]: 0, end of the first document, ..., T.
        longest: Length of the longest document.
        share: This rank's part of the tokens, if a group of ranks computes them together; the bounds are those of all.
    """

    bounds: Tensor
    longest: int
    share: Share | None = None


@dataclass(frozen=True)
class TowerInput:
    """The input of the vision tower.

    Args:
        calls: Tensors keyed by tensor name, one entry per call of the tower. A call holds consecutive images that can
            be concatenated along the first dimension. The last calls may hold a blank image, only to take part in the
            collectives.
        images: Digest and number of embeddings of each image, in order, without blank ones.
    """

    calls: tuple[dict[str, Tensor], ...]
    images: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Placement:
    """The positions of images in a micro-batch.

    Args:
        digests: Digests of all images of the micro-batch, in packed order. Of a shared datum, those that this rank
            computes.
        index_M: int64, packed positions of their embeddings. Of a shared datum, those in this rank's part.
        dealt: The images of a shared datum.
    """

    digests: tuple[str, ...]
    index_M: Tensor
    dealt: DealtImages | None = None


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device.

    Args:
        tokens_T: int64.
        positions: int64 [rows, T] for multimodal RoPE, else [1, T].
        documents: Bounds of the datums.
        targets_TK: int64, 0 where a datum has fewer targets than K.
        inputs: Inputs of the loss for each datum, keyed by input name.
        tower: None if no rank runs the vision tower in this step.
        placement: None if the micro-batch has no image.
        datums: The packed datums, in order; empty for a filler.
        experts_TLk: int16, the experts that layers must use, or -1 where the model's router decides. None if the router
            decides for all tokens.
        support_TM: int32, the supports of the targets, see `target_logprobs`; at most 4 KiB for each token. None if no
            datum has any.
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
    support_TM: Tensor | None = None

    def __post_init__(self) -> None:
        # Without its support, a datum would be computed with other log-probabilities than it asks for.
        assert self.support_TM is not None or not any(one.support and one.support.ids.size for one in self.datums)

    def split_logprobs(self, logprobs_TK: Tensor) -> list[Tensor]:
        """Splits log-probabilities [T, K] into views per datum, shaped like its targets.

        Returns an empty list for a filler.
        """
        if not self.datums:
            return []
        parts = torch.split(logprobs_TK, [len(datum.tokens) for datum in self.datums])
        return [
            part[:, 0] if datum.flat_targets else part[:, : datum.targets.shape[1]]
            for part, datum in zip(parts, self.datums, strict=True)
        ]


@dataclass(frozen=True)
class BatchLayout:
    """Builds batches for a model.

    Args:
        vision: The family of a vision-language model; None for a text-only model.
        device: Device of the batches.
    """

    vision: VisionFamily | None
    device: torch.device

    def pack(
        self,
        datums: Sequence[Datum],
        images: Mapping[str, FeatureTensors],
        call_count: int,
        cached: Container[str] | None,
    ) -> Batch:
        """Packs datums into a batch. An empty list makes a filler.

        Args:
            datums: The datums.
            images: Tensors of images, keyed by digest.
            call_count: Number of calls of the vision tower by each rank in this step, at least those for the datums.
            cached: Digests of images with known tower outputs; None if the tower is trained and must run every image.
        """
        lengths = [len(datum.tokens) for datum in datums] or [FILLER_TOKENS]
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        width = max((datum.targets.shape[1] for datum in datums), default=1)
        tower = self._tower(datums, images, cached, call_count) if call_count else None
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
            self._support(datums, bounds),
        )

    def _support(self, datums: Sequence[Datum], bounds: npt.NDArray[np.int32]) -> Tensor | None:
        width = max((int(np.diff(datum.support.offsets).max()) for datum in datums if datum.support), default=0)
        if not width:
            return None
        rows = np.full((bounds[-1], width), -1, np.int32)
        for datum, start in zip(datums, bounds, strict=False):
            if datum.support:
                counts = np.diff(datum.support.offsets)
                own = rows[start : start + len(counts)]
                own[np.arange(width) < counts[:, None]] = datum.support.ids
        return self._move(rows)

    def pack_part(
        self,
        datum: Datum,
        share: Share,
        images: Mapping[str, FeatureTensors],
        call_count: int,
        cached: Container[str] | None,
    ) -> Batch:
        """Packs this rank's part of a shared datum. Arguments are those of `pack`."""
        own, part = share.with_own_images(datum), slice(share.start, share.start + share.part_size)
        tokens_T = np.pad(datum.tokens, (0, share.padding))
        positions = np.pad(self._positions(datum), ((0, 0), (0, share.padding)))
        targets_TK = np.pad(datum.targets, ((0, share.padding), (0, 0)))
        ends = np.unique([0, len(datum.tokens), len(tokens_T)]).astype(np.int32)
        support_TM = self._support([datum], np.array([0, len(tokens_T)], np.int32))
        return Batch(
            self._move(tokens_T[part]),
            self._move(positions[:, part]),
            Documents(self._move(ends), len(datum.tokens), share),
            self._move(targets_TK[part]),
            self._inputs([datum]),
            self._tower([own], images, cached, call_count) if call_count else None,
            self._deal(datum, own, share) if datum.spans else None,
            (datum,),
            support_TM=None if support_TM is None else support_TM[part],
        )

    def _deal(self, datum: Datum, own: Datum, share: Share) -> Placement:
        digests = tuple(span.feature.digest for span in own.spans)
        index_M = np.concatenate([span.offset + np.flatnonzero(span.is_embedding) for span in datum.spans])
        is_own_M = np.concatenate(
            [np.full(span.embedding_count, span.feature.digest in digests) for span in datum.spans]
        )
        is_here_M = (index_M >= share.start) & (index_M < share.start + share.part_size)
        own_rows, taken_m = (self._move(np.flatnonzero(rows)) for rows in (is_own_M, is_here_M))
        dealt = DealtImages(share, len(index_M), own_rows, taken_m)
        return Placement(digests, self._move(index_M[is_here_M] - share.start), dealt)

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
        """Copies all values of one dtype to the device at once, since datums may be many and small."""
        moved: list[dict[str, Tensor]] = [{} for _ in datums]
        entries = [(index, name, value) for index, datum in enumerate(datums) for name, value in datum.inputs.items()]
        for dtype in {value.dtype for _, _, value in entries}:
            own = [entry for entry in entries if entry[2].dtype == dtype]
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
        self, datums: Sequence[Datum], images: Mapping[str, FeatureTensors], cached: Container[str] | None, count: int
    ) -> TowerInput:
        wanted = wanted_images(datums, cached)
        calls = tower_calls(images[digest] for digest, _ in wanted)
        if (missing := count - len(calls)) > 0:
            assert self.vision is not None  # a text-only model never runs a tower
            calls += missing * [[self.vision.blank_image()]]
        moved = [
            {name: self._move(np.concatenate([image[name] for image in members])) for name in members[0]}
            for members in calls
        ]
        return TowerInput(tuple(moved), tuple(wanted))

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
        # A copy from unpinned memory would wait for all queued kernels, and so delay the launch of the next ones.
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)


def fillers(tokens: int, longest: int) -> list[Datum]:
    """Returns blank datums with that many tokens in total, each with at most `longest`."""
    whole, rest = divmod(tokens, longest)
    return [*[Datum.blank(longest)] * whole, *([Datum.blank(rest)] if rest else [])]


def wanted_images(datums: Iterable[Datum], cached: Container[str] | None) -> list[tuple[str, int]]:
    """Returns the digest and the number of embeddings of each image that the tower must process.

    If the tower is trained (`cached` is None), these are all images. Otherwise they are the uncached images, each once.
    """
    images = [(span.feature.digest, span.embedding_count) for datum in datums for span in datum.spans]
    if cached is None:
        return images
    return [(digest, count) for digest, count in dict(images).items() if digest not in cached]


def _widen(rows: npt.NDArray, width: int) -> npt.NDArray:
    return rows if rows.shape[1] == width else np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
