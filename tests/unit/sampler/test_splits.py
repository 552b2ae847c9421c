"""The parts of tensors that each worker of a sampler needs: found from the model's own loader, and divided exactly."""

import random
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from fovea.api.v1 import weights_pb2
from fovea.wire.manifest import division_problem, joined_digest, parts_of
from fovea_sampler.engine.manifest_check import Reads, SplitTable
from fovea_sampler.engine.snapshot_receiver import Arrival
from fovea_sampler.engine.weight_loading import LoadTrace
from fovea_trainer.weights.snapshot_store import packed, packed_parts, specs_of
from fovea_weights.weight_transfer import PartSums, device_digest

WORKERS = 2
SHAPES = {
    "rows": (8, 6),
    "columns": (4, 8),
    "fused": (12, 4),
    "stacked": (4, 6, 8),
    "one of two": (4, 2),
    "spread": (6, 4),
    "corner": (4, 4),
    "scaled": (8,),
    "scalar": (1,),
    "joined": (4, 4),
    "ignored": (4, 4),
    "flat": (4, 4),
}


class Worker(nn.Module):
    """A model with a loader that takes parts of tensors in the ways of vLLM's loaders.

    Args:
        rank: Index of the worker.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.weight = nn.Parameter(torch.full((4, 6, 8), 7.0), requires_grad=False)
        self.stored: list[torch.Tensor] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads the worker's half of each tensor."""
        for name, tensor in weights:
            getattr(self, f"_{name.replace(' ', '_')}", self._all)(tensor)

    def _write(self, part: torch.Tensor) -> None:
        self.weight.data.view(-1)[: part.numel()].view(part.shape).copy_(part)

    def _all(self, tensor: torch.Tensor) -> None:
        self._write(tensor)

    def _rows(self, tensor: torch.Tensor) -> None:
        self._write(tensor.narrow(0, 4 * self.rank, 4))

    def _columns(self, tensor: torch.Tensor) -> None:
        self._write(tensor.t().chunk(2)[self.rank].t())

    def _fused(self, tensor: torch.Tensor) -> None:
        for third in tensor.split(4):
            self._write(third[2 * self.rank : 2 * self.rank + 2])

    def _stacked(self, tensor: torch.Tensor) -> None:
        """Gate and up projections of experts, side by side and transposed in the file."""
        for half in tensor.transpose(-1, -2).chunk(2, dim=-2):
            for expert in half.unbind(0):
                self._write(expert.narrow(0, 2 * self.rank, 2))

    def _one_of_two(self, tensor: torch.Tensor) -> None:
        if self.rank:
            self._write(tensor.to("cpu", torch.bfloat16))

    def _spread(self, tensor: torch.Tensor) -> None:
        """Both workers read the rows in the middle."""
        self._write(tensor[2 * self.rank : 2 * self.rank + 4])

    def _corner(self, tensor: torch.Tensor) -> None:
        self._write(tensor[2 * self.rank : 2 * self.rank + 2, :2])

    def _scaled(self, tensor: torch.Tensor) -> None:
        self._write(-torch.exp(tensor[4 * self.rank : 4 * self.rank + 4].float()))

    def _scalar(self, tensor: torch.Tensor) -> None:
        self.weight.data[0].fill_(tensor.item())

    def _joined(self, tensor: torch.Tensor) -> None:
        """Reads two tensors once the second one is there."""
        self.stored.append(tensor[2 * self.rank : 2 * self.rank + 2])
        self._write(torch.cat(self.stored))

    def _ignored(self, tensor: torch.Tensor) -> None:
        pass

    def _flat(self, tensor: torch.Tensor) -> None:
        self._write(tensor.reshape(-1)[6 * self.rank : 6 * self.rank + 10])


def traced(rank: int) -> dict[str, Reads]:
    """Returns the reads of one worker, which must keep its weights."""
    worker, trace = Worker(rank), LoadTrace(SHAPES, torch.float32)
    with torch.no_grad(), trace:
        worker.load_weights(iter(trace.tensors.items()))
    assert worker.weight.eq(7).all()
    return trace.reads()


def test_a_loader_tells_what_it_reads() -> None:
    expected: dict[str, tuple[Reads, Reads]] = {
        "rows": ((0, (0, 4)), (0, (4, 8))),
        "columns": ((1, (0, 4)), (1, (4, 8))),
        "fused": ((0, (0, 2, 4, 6, 8, 10)), (0, (2, 4, 6, 8, 10, 12))),
        "stacked": ((2, (0, 2, 4, 6)), (2, (2, 4, 6, 8))),
        "one of two": ((0, ()), (0, (0, 4))),
        "spread": ((0, (0, 4)), (0, (2, 6))),
        "corner": ((0, (0, 4)), (0, (0, 4))),
        "scaled": ((0, (0, 4)), (0, (4, 8))),
        "scalar": ((0, (0, 1)), (0, (0, 1))),
        "joined": ((0, (0, 2)), (0, (2, 4))),
        "ignored": ((0, ()), (0, ())),
        "flat": ((0, (0, 4)), (0, (0, 4))),
    }
    for rank in range(WORKERS):
        assert traced(rank) == {name: reads[rank] for name, reads in expected.items()}


@pytest.mark.parametrize(("dtype", "too_narrow"), [("float32", set()), ("bfloat16", {"stacked"})])
def test_only_tensors_that_are_divided_exactly_are_cut(dtype: str, too_narrow: set[str]) -> None:
    """The others go whole to both workers: overlapping parts, parts that no worker reads, and parts of words."""
    table = SplitTable([traced(rank) for rank in range(WORKERS)], str)
    manifest = weights_pb2.SnapshotManifest()
    for name, shape in {**SHAPES, "unknown": (4, 4)}.items():
        manifest.tensors.add(name=name, dtype=dtype, shape=shape)
    ready = table.ready(manifest)
    cut = {spec.name for spec, number in zip(manifest.tensors, ready.split_of, strict=True) if number}
    assert cut == {"rows", "columns", "fused", "stacked", "one of two", "scaled", "joined"} - too_narrow
    assert table.ready(manifest) is ready


def test_a_worker_without_notes_makes_all_tensors_whole() -> None:
    """The trace of its loader has failed."""
    manifest = weights_pb2.SnapshotManifest()
    for name, shape in SHAPES.items():
        manifest.tensors.add(name=name, dtype="float32", shape=shape)
    ready = SplitTable([traced(0), {}], str).ready(manifest)
    assert not ready.splits
    assert not any(ready.split_of)


def _drawn(draw: random.Random, shape: list[int], workers: int) -> list[Reads]:
    """Returns reads of a tensor: random ranges along one dimension, each read by a group of neighbouring workers."""
    dimension, groups = draw.randrange(len(shape)), draw.choice([n for n in (1, 2, 4, 8) if workers % n == 0])
    size = shape[dimension]
    ends = [0, *sorted(draw.sample(range(1, size), min(size - 1, draw.randint(1, 5)))), size]
    owners = [draw.randrange(groups) for _ in ends[1:]]
    reads: list[Reads] = []
    for worker in range(workers):
        bounds: list[int] = []
        for start, end, owner in zip(ends, ends[1:], owners, strict=False):
            if owner != worker * groups // workers:
                continue
            if bounds and bounds[-1] == start:
                bounds[-1] = end
            else:
                bounds += [start, end]
        reads.append((dimension, tuple(bounds)) if bounds else (0, ()))
    return reads


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_each_worker_gets_what_it_reads_and_all_prove_the_digest(workers: int) -> None:
    """For random divisions. Several workers may hold the same part."""
    draw, seen = random.Random(workers), set[str]()
    torch.manual_seed(workers)
    for _ in range(60):
        tensors = {
            f"t{index}": torch.randn([draw.choice([2, 4, 8, 16]) for _ in range(draw.randint(1, 4))]).to(
                draw.choice([torch.float32, torch.bfloat16])
            )
            for index in range(5)
        }
        drawn = {name: _drawn(draw, list(tensor.shape), workers) for name, tensor in tensors.items()}
        reads = [{name: found[worker] for name, found in drawn.items()} for worker in range(workers)]
        manifest = weights_pb2.SnapshotManifest(tensors=specs_of(tensors))
        ready = SplitTable(reads, str).ready(manifest)
        assert not division_problem(manifest.tensors, ready, workers)
        parts = [parts_of(manifest.tensors, ready, worker, workers) for worker in range(workers)]
        seen |= {part.holders for own in parts for part in own if not part.is_whole and 0 not in part.spec.shape}
        sums = []
        for worker, data in enumerate(packed_parts(parts, list(tensors.values()))):
            sums.append(PartSums())
            sums[-1].add(parts[worker], data.view(torch.int64))
            found = dict(Arrival(manifest, [parts[worker]], [data]).tensors(torch.device("cpu")))
            for name, (dimension, bounds) in reads[worker].items():
                for start, end in zip(bounds[::2], bounds[1::2], strict=True):
                    own, expected = (one.narrow(dimension, start, end - start) for one in (found[name], tensors[name]))
                    assert torch.equal(own, expected)
        digest = device_digest()
        digest.add(manifest.tensors, packed(list(manifest.tensors), tensors.values()).view(torch.int64))
        assert joined_digest(manifest.tensors, [one.by_holders() for one in sums]) == digest.hexdigest()
    assert workers == 2 or any("," in holders for holders in seen), "some parts have several holders"
    assert any("," not in holders for holders in seen)
