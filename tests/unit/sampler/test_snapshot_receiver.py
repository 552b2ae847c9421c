"""Two ranks of a trainer send in turns to the two workers of a sampler, over gloo: everything, or its parts to each."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
import torch

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.wire.manifest import buckets, division_problem, joined_digest, most_placed_bytes, padded_bytes, parts_of
from fovea_sampler.engine.snapshot_receiver import Arrival, SnapshotReceiver
from fovea_trainer.weights.snapshot_store import packed, packed_parts, specs_of
from fovea_trainer.weights.transfer_groups import SenderGroup, TransferGroups
from fovea_weights.weight_transfer import PartSums, device_digest

GROUP, WORKERS, SENDERS, BUCKET_BYTES = "g", 2, 2, 256
TENSORS = {f"layer.{index}": torch.randn(5 + 11 * index) for index in range(7)} | {"last": torch.ones(3).bfloat16()}
MANIFEST = weights_pb2.SnapshotManifest(tensors=specs_of(TENSORS), bucket_bytes=BUCKET_BYTES)
WHOLE = sampler_pb2.SnapshotReady()


@pytest.fixture
def senders() -> list[TransferGroups]:
    first = TransferGroups.hosting("127.0.0.1", "127.0.0.1")
    return [first, TransferGroups.beside("127.0.0.1", first.port, 1)]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(WORKERS + SENDERS) as pool:
        yield pool


def _met(
    senders: list[TransferGroups], threads: ThreadPoolExecutor, is_split: bool = False
) -> tuple[list[SenderGroup], list[SnapshotReceiver]]:
    receivers = [SnapshotReceiver(torch.device("cpu"), rank, WORKERS) for rank in range(WORKERS)]
    size = 2 if is_split else 1 + WORKERS
    request = sampler_pb2.JoinTransferGroupRequest(
        group_id=GROUP,
        master_address=senders[0].address,
        master_port=senders[0].port,
        rank_offset=1,
        world_size=size,
        timeout_s=20,
        sender_count=SENDERS,
        is_split=is_split,
    )
    for receiver in receivers:
        receiver.start_join("join", request, "gloo")
    # One after the other, as the ranks of a trainer do.
    groups = [each.open(GROUP, size, WORKERS if is_split else 0, "gloo", 20, 20) for each in senders]
    for receiver in receivers:
        assert _ended(receiver, "join")["phase"] == "done"
    return groups, receivers


def _ended(receiver: SnapshotReceiver, task: str) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while (report := receiver.report(task))["phase"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return report


def _send(group: SenderGroup, sender: int) -> None:
    rest = iter(TENSORS.values())
    for number, specs in enumerate(buckets(MANIFEST.tensors, BUCKET_BYTES)):
        data = packed(specs, [next(rest) for _ in specs])
        if number % SENDERS == sender:
            group.send(data, 20)


def test_every_worker_gets_all_in_order(senders: list[TransferGroups], threads: ThreadPoolExecutor) -> None:
    groups, receivers = _met(senders, threads)
    specs = list(MANIFEST.tensors)
    digest = device_digest()
    digest.add(specs, packed(specs, TENSORS.values()).view(torch.int64))
    assert len(buckets(specs, BUCKET_BYTES)) > 2 * SENDERS
    arrived: list[Arrival] = []
    for attempt in ("first", "second"):
        for receiver in receivers:
            receiver.start_receive(attempt, GROUP, MANIFEST, 20, lambda arrival: arrival, WHOLE)
        list(threads.map(_send, groups, range(SENDERS)))
        for receiver in receivers:
            report = _ended(receiver, attempt)
            assert (report["phase"], report["digest"]) == ("done", digest.hexdigest())
            arrived.append(receiver.arrival(attempt))
    for arrival in arrived:
        found = dict(arrival.tensors(torch.device("cpu")))
        assert list(found) == list(TENSORS)
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert sum(map(padded_bytes, specs)) == sum(buffer.numel() for buffer in arrived[0].buffers)


DIVIDED: dict[str, tuple[torch.Tensor, int, list[list[int]]]] = {
    "rows": (torch.randn(7, 6), 0, [[0, 4], [4, 7]]),
    "whole": (torch.randn(5), 0, []),
    "columns": (torch.randn(3, 8).bfloat16(), 1, [[0, 4], [4, 8]]),
    "halves of two": (torch.randn(3, 8, 5, 2), 1, [[0, 2, 4, 6], [2, 4, 6, 8]]),
    "an expert of the second": (torch.randn(4, 2), 0, [[], [0, 4]]),
    "rows, larger than a bucket": (torch.randn(40, 2), 0, [[0, 20], [20, 40]]),
}
"""Tensors, and the dimension and bounds of each worker's part."""


def _division() -> sampler_pb2.SnapshotReady:
    ready = sampler_pb2.SnapshotReady()
    for _, dimension, bounds in DIVIDED.values():
        ready.split_of.append(len(ready.splits) + 1 if bounds else 0)
        if bounds:
            ready.splits.add(dimension=dimension, parts=[weights_pb2.TensorPart(bounds=one) for one in bounds])
    return ready


def _rows(dimension: int, bounds: list[int], tensor: torch.Tensor) -> torch.Tensor:
    """Returns a mask of a worker's part, by another way than the code under test."""
    mask = torch.zeros(tensor.shape, dtype=torch.bool).movedim(dimension, 0)
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        mask[start:end] = True
    return mask.movedim(0, dimension)


def test_each_worker_of_a_split_group_gets_its_parts(
    senders: list[TransferGroups], threads: ThreadPoolExecutor
) -> None:
    """Together they prove the digest of the whole snapshot. Elsewhere a tensor is NaN."""
    tensors = {name: tensor for name, (tensor, _, _) in DIVIDED.items()}
    manifest = weights_pb2.SnapshotManifest(tensors=specs_of(tensors), bucket_bytes=BUCKET_BYTES)
    groups, receivers = _met(senders, threads, is_split=True)
    ready = _division()

    def send(group: SenderGroup, sender: int) -> None:
        cuts = [iter(parts_of(manifest.tensors, ready, worker, WORKERS)) for worker in range(WORKERS)]
        rest = iter(tensors.values())
        for number, specs in enumerate(buckets(manifest.tensors, BUCKET_BYTES)):
            parts = [list(islice(cut, len(specs))) for cut in cuts]
            payloads = packed_parts(parts, list(islice(rest, len(specs))))
            for worker, data in enumerate(payloads):
                if number % SENDERS == sender and data.numel():
                    group.send(data, 20, worker)

    for receiver in receivers:
        receiver.start_receive("task", GROUP, manifest, 20, lambda arrival: arrival, ready)
    list(threads.map(send, groups, range(SENDERS)))
    reports = [_ended(receiver, "task") for receiver in receivers]
    assert [report["phase"] for report in reports] == ["done", "done"]
    digest = device_digest()
    digest.add(manifest.tensors, packed(list(manifest.tensors), tensors.values()).view(torch.int64))
    sums = [report["sums"] for report in reports]
    assert joined_digest(manifest.tensors, sums) == digest.hexdigest()
    assert all(report["digest"] == "" for report in reports)
    for worker, receiver in enumerate(receivers):
        arrival = receiver.arrival("task")
        held = [tensor.nbytes for tensor, _, bounds in DIVIDED.values() if bounds and bounds[worker]]
        assert arrival.room.numel() == sum(held), "memory for tensors in full shape is reserved before the load"
        found = dict(arrival.tensors(torch.device("cpu")))
        assert arrival.room is None
        size_bytes = 0
        for name, (tensor, dimension, bounds) in DIVIDED.items():
            own = _rows(dimension, bounds[worker], tensor) if bounds else torch.ones(tensor.shape, dtype=torch.bool)
            size_bytes += -(-int(own.sum()) * tensor.element_size() // 8) * 8
            if not own.any():
                assert name not in found
                continue
            assert torch.equal(found[name][own], tensor[own])
            assert found[name][~own].isnan().all()
        assert reports[worker]["size_bytes"] == size_bytes
    assert set(sums[0]) > {"0,1"}
    with pytest.raises(ValueError, match="workers 0,1 hold the same tensors, but only 1 reported them"):
        joined_digest(manifest.tensors, [{key: value for key, value in sums[0].items() if key != "0,1"}, sums[1]])
    sums[0]["0,1"] += 1
    with pytest.raises(ValueError, match="workers 0,1 received different bytes"):
        joined_digest(manifest.tensors, sums)


def test_a_worker_without_memory_for_a_divided_tensor_fails_before_it_receives(
    senders: list[TransferGroups], threads: ThreadPoolExecutor
) -> None:
    """Nothing is sent: the tensor in full shape does not fit into any address space."""
    _, receivers = _met(senders, threads, is_split=True)
    spec = weights_pb2.TensorSpec(name="model.layers.0.up", dtype="float32", shape=[2**46, 2])
    manifest = weights_pb2.SnapshotManifest(tensors=[spec], bucket_bytes=BUCKET_BYTES)
    parts = [weights_pb2.TensorPart(bounds=one) for one in ([0, 1], [1, 2**46])]
    ready = sampler_pb2.SnapshotReady(splits=[weights_pb2.TensorSplit(parts=parts)], split_of=[1])
    receivers[0].start_receive("task", GROUP, manifest, 20, lambda arrival: arrival, ready)
    report = _ended(receivers[0], "task")
    assert report["phase"] == "failed"
    assert "loading needs 524288.0 GiB beside the snapshot" in report["error"]


def test_the_sum_of_a_large_part_is_made_of_chunks() -> None:
    """Each half of the columns has more words than one chunk, and their number is no multiple of it."""
    tensor = torch.randn(600, 8192)
    specs = specs_of({"first": torch.ones(3), "columns": tensor})
    bounds = [weights_pb2.TensorPart(bounds=one) for one in ([0, 4096], [4096, 8192])]
    ready = sampler_pb2.SnapshotReady(splits=[weights_pb2.TensorSplit(dimension=1, parts=bounds)], split_of=[0, 1])
    parts = [parts_of(specs, ready, worker, WORKERS) for worker in range(WORKERS)]
    sums = [PartSums() for _ in range(WORKERS)]
    for one, own, data in zip(sums, parts, packed_parts(parts, [torch.ones(3), tensor]), strict=True):
        one.add(own, data.view(torch.int64))
    digest = device_digest()
    digest.add(specs, packed(specs, [torch.ones(3), tensor]).view(torch.int64))
    assert joined_digest(specs, [one.by_holders() for one in sums]) == digest.hexdigest()


@pytest.mark.parametrize(
    ("split_of", "dimension", "bounds", "problem"),
    [
        ([1], 0, [[0, 4], [4, 7]], ""),
        ([], 0, [[0, 4], [4, 7]], ""),
        ([1], 1, [[], [0, 6]], ""),
        ([1, 1], 0, [[0, 4], [4, 7]], "split_of has 2 entries for 1 tensors"),
        ([2], 0, [[0, 4], [4, 7]], "rows has division 2 of 1"),
        ([-1], 0, [[0, 4], [4, 7]], "rows has division -1 of 1"),
        ([1], 0, [[0, 7]], "rows is divided into 1 parts along dimension 0"),
        ([1], 2, [[0, 4], [4, 7]], "rows is divided into 2 parts along dimension 2"),
        ([1], 0, [[0, 4], [4]], "a part with bounds [4]"),
        ([1], 0, [[0, 4], [4, 8]], "a part with bounds [4, 8]"),
        ([1], 0, [[4, 0], [4, 7]], "a part with bounds [4, 0]"),
    ],
)
def test_a_division_that_no_sender_can_follow_has_a_problem(
    split_of: list[int], dimension: int, bounds: list[list[int]], problem: str
) -> None:
    parts = [weights_pb2.TensorPart(bounds=one) for one in bounds]
    split = weights_pb2.TensorSplit(dimension=dimension, parts=parts)
    ready = sampler_pb2.SnapshotReady(splits=[split], split_of=split_of)
    found = division_problem(specs_of({"rows": torch.zeros(7, 6)}), ready, WORKERS)
    assert problem in found
    assert bool(problem) == bool(found)


def test_a_layer_is_loaded_at_a_time_and_what_is_outside_layers_stays() -> None:
    sizes = {"embed": 5, "model.layers.0.q": 2, "model.layers.0.experts.1.up": 3, "model.layers.1.q": 4, "head": 6}
    assert most_placed_bytes(sizes.items()) == 5 + 6 + 2 + 3
    assert most_placed_bytes([]) == 0


def test_a_sender_hears_that_the_group_was_closed(senders: list[TransferGroups], threads: ThreadPoolExecutor) -> None:
    """No worker receives; only rank 0 knows the reason, and closes the group."""
    groups, _ = _met(senders, threads)
    sending = threads.submit(groups[1].send, torch.zeros(1 << 24, dtype=torch.uint8), 20)
    senders[0].close(GROUP)
    begun = time.monotonic()
    with pytest.raises(RuntimeError):
        sending.result(10)
    assert time.monotonic() - begun < 5


def test_a_worker_that_leaves_ends_the_transfer_of_all(
    senders: list[TransferGroups], threads: ThreadPoolExecutor
) -> None:
    groups, receivers = _met(senders, threads)
    receivers[0].start_receive("task", GROUP, MANIFEST, 2, lambda arrival: arrival, WHOLE)
    receivers[1].leave(GROUP)
    sending = [threads.submit(_send, group, sender) for sender, group in enumerate(groups)]
    with pytest.raises(RuntimeError):
        sending[0].result(10)
    senders[0].close(GROUP)
    with pytest.raises(RuntimeError):
        sending[1].result(10)
    receivers[0].leave(GROUP)
    assert _ended(receivers[0], "task")["phase"] == "failed"
