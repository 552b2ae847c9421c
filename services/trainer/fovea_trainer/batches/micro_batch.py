"""Micro-batches: datums packed end to end, without padding, and the plan that assigns datums to them.

Every rank computes the same plan from the sizes of all datums. Each rank computes one micro-batch per step of the plan,
because all ranks must join the collectives of a step. A rank without a datum in a step computes a filler, and the loss
of a filler is zero.

Shapes: T packed tokens, K maximum number of targets per position, M image embeddings or ids in the largest support, L
layers with experts, k experts per token.
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
from fovea_trainer.batches.datum_decoding import Datum, DatumSize

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
    """

    bounds: Tensor
    longest: int


@dataclass(frozen=True)
class TowerInput:
    """The input of the vision tower.

    Args:
        calls: Tensors keyed by tensor name, one entry per call of the tower. A call holds consecutive images that can
            be concatenated along the first dimension.
        images: Digest and number of embeddings of each image, in order. Empty if a blank image is run, only to take
            part in the collectives.
    """

    calls: tuple[dict[str, Tensor], ...]
    images: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Placement:
    """The positions of images in a micro-batch.

    Args:
        digests: Digests of all images of the micro-batch, in packed order.
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
        run_tower: bool,
        cached: Container[str] | None,
    ) -> Batch:
        """Packs datums into a batch. An empty list makes a filler.

        Args:
            datums: The datums.
            images: Tensors of images, keyed by digest.
            run_tower: True if the ranks run the vision tower in this step.
            cached: Digests of images with known tower outputs; None if the tower is trained and must run every image.
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
        self, datums: Sequence[Datum], images: Mapping[str, FeatureTensors], cached: Container[str] | None
    ) -> TowerInput:
        wanted = wanted_images(datums, cached)
        inputs = [images[digest] for digest, _ in wanted]
        if not inputs:
            assert self.vision is not None  # a text-only model never runs a tower
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
        # A copy from unpinned memory would wait for all queued kernels, and so delay the launch of the next ones.
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)


def wanted_images(datums: Iterable[Datum], cached: Container[str] | None) -> list[tuple[str, int]]:
    """Returns the digest and the number of embeddings of each image that the tower must process.

    If the tower is trained (`cached` is None), these are all images. Otherwise they are the uncached images, each once.
    """
    images = [(span.feature.digest, span.embedding_count) for datum in datums for span in datum.spans]
    if cached is None:
        return images
    return [(digest, count) for digest, count in dict(images).items() if digest not in cached]


def _row_shapes(image: FeatureTensors) -> dict[str, tuple[int, ...]]:
    """Returns the shapes without the first dimension. Images can be concatenated if these are equal."""
    return {name: array.shape[1:] for name, array in image.items()}


def _widen(rows: npt.NDArray, width: int) -> npt.NDArray:
    return rows if rows.shape[1] == width else np.pad(rows, ((0, 0), (0, width - rows.shape[1])))


@dataclass(frozen=True)
class Step:
    """One micro-batch on every rank.

    Args:
        datums: For each rank the indices of its datums in packed order; empty if it has none.
        has_vision: True if any rank has an image; all ranks then run the vision tower.
    """

    datums: tuple[tuple[int, ...], ...]
    has_vision: bool


@dataclass(frozen=True)
class Plan:
    """All micro-batches of one call, in execution order.

    Args:
        steps: The micro-batches.
        efficiency: The share of the capacity that the tokens use, in (0, 1]. The capacity of a step is the number of
            ranks times the tokens of its fullest rank.
    """

    steps: tuple[Step, ...]
    efficiency: float

    def datums_of(self, rank: int) -> list[int]:
        """Returns the indices of the datums of `rank`, in its order."""
        return [index for step in self.steps for index in step.datums[rank]]


def plan(sizes: Sequence[DatumSize], world_size: int, token_budget: int, patch_budget: int) -> Plan:
    """Distributes datums over ranks and splits each rank's share into micro-batches within the budgets.

    A datum above a budget gets a micro-batch of its own. The plan depends on the arguments alone, so all ranks compute
    the same one.

    Args:
        sizes: Size of each datum.
        world_size: Number of ranks.
        token_budget: Maximum tokens per micro-batch.
        patch_budget: Maximum patches per micro-batch.
    """
    shares = _spread(sizes, world_size)
    per_rank = [_cut(share, sizes, token_budget, patch_budget) for share in shares]
    step_count = max(len(batches) for batches in per_rank)
    steps = []
    for index in range(step_count):
        datums = tuple(batches[index] if index < len(batches) else () for batches in per_rank)
        has_vision = any(sizes[datum].patch_count for batch in datums for datum in batch)
        steps.append(Step(datums, has_vision))
    return Plan(tuple(steps), _efficiency(steps, sizes, world_size))


def _spread(sizes: Sequence[DatumSize], world_size: int) -> list[list[int]]:
    """Assigns each datum, the largest first, to the least loaded rank (Graham, 1969). Images come before text."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, 0)] * world_size
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i].patch_count, -sizes[i].token_count, i)):
        rank = min(range(world_size), key=lambda r: (loads[r], r))
        shares[rank].append(index)
        load, count = loads[rank]
        loads[rank] = (load + sizes[index].token_count + sizes[index].patch_count, count + 1)
    return shares


def _cut(
    share: Sequence[int], sizes: Sequence[DatumSize], token_budget: int, patch_budget: int
) -> list[tuple[int, ...]]:
    """Packs by first fit in the order of `share`, largest first. Sorts each batch: equal lengths are then adjacent."""
    batches: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for index in share:
        size = sizes[index]
        fits = (
            i for i, (tokens, patches) in enumerate(room) if size.token_count <= tokens and size.patch_count <= patches
        )
        entry = next(fits, len(batches))
        if entry == len(batches):
            batches.append([])
            room.append((token_budget, patch_budget))
        batches[entry].append(index)
        tokens, patches = room[entry]
        room[entry] = (tokens - size.token_count, patches - size.patch_count)
    return [tuple(sorted(batch, key=lambda i: (sizes[i].token_count, sizes[i].patch_count, i))) for batch in batches]


def _efficiency(steps: Sequence[Step], sizes: Sequence[DatumSize], world_size: int) -> float:
    used = capacity = 0
    for step in steps:
        tokens = [sum(sizes[datum].token_count for datum in batch) for batch in step.datums]
        used += sum(tokens)
        capacity += max(tokens) * world_size
    return used / capacity if capacity else 1.0
