"""Two ranks of a trainer send in turns to the two workers of a sampler, over gloo."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.wire.manifest import buckets, padded_bytes
from fovea_sampler.engine.snapshot_receiver import Arrival, SnapshotReceiver
from fovea_trainer.weights.snapshot_store import packed, specs_of
from fovea_trainer.weights.transfer_groups import SenderGroup, TransferGroups
from fovea_weights.weight_transfer import device_digest

GROUP, WORKERS, SENDERS, BUCKET_BYTES = "g", 2, 2, 256
TENSORS = {f"layer.{index}": torch.randn(5 + 11 * index) for index in range(7)} | {"last": torch.ones(3).bfloat16()}
MANIFEST = weights_pb2.SnapshotManifest(tensors=specs_of(TENSORS), bucket_bytes=BUCKET_BYTES)


@pytest.fixture
def senders() -> list[TransferGroups]:
    first = TransferGroups.hosting("127.0.0.1", "127.0.0.1")
    return [first, TransferGroups.beside("127.0.0.1", first.port, 1)]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(WORKERS + SENDERS) as pool:
        yield pool


def _met(
    senders: list[TransferGroups], threads: ThreadPoolExecutor
) -> tuple[list[SenderGroup], list[SnapshotReceiver]]:
    receivers = [SnapshotReceiver(torch.device("cpu"), rank) for rank in range(WORKERS)]
    request = sampler_pb2.JoinTransferGroupRequest(
        group_id=GROUP,
        master_address=senders[0].address,
        master_port=senders[0].port,
        rank_offset=1,
        world_size=1 + WORKERS,
        timeout_s=20,
        sender_count=SENDERS,
    )
    for receiver in receivers:
        receiver.start_join("join", request, "gloo")
    # One after the other, as the ranks of a trainer do.
    groups = [each.open(GROUP, 1 + WORKERS, "gloo", 20, 20) for each in senders]
    for receiver in receivers:
        assert _ended(receiver, "join") == {"phase": "done", "error": "", "digest": ""}
    return groups, receivers


def _ended(receiver: SnapshotReceiver, task: str) -> dict[str, str]:
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
            receiver.start_receive(attempt, GROUP, MANIFEST, 20, lambda arrival: arrival)
        list(threads.map(_send, groups, range(SENDERS)))
        for receiver in receivers:
            assert _ended(receiver, attempt) == {"phase": "done", "error": "", "digest": digest.hexdigest()}
            arrived.append(receiver.arrival(attempt))
    for arrival in arrived:
        found = dict(arrival.tensors())
        assert list(found) == list(TENSORS)
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert sum(map(padded_bytes, specs)) == sum(buffer.numel() for buffer in arrived[0].buffers)


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
    receivers[0].start_receive("task", GROUP, MANIFEST, 2, lambda arrival: arrival)
    receivers[1].leave(GROUP)
    sending = [threads.submit(_send, group, sender) for sender, group in enumerate(groups)]
    with pytest.raises(RuntimeError):
        sending[0].result(10)
    senders[0].close(GROUP)
    with pytest.raises(RuntimeError):
        sending[1].result(10)
    receivers[0].leave(GROUP)
    assert _ended(receivers[0], "task")["phase"] == "failed"
