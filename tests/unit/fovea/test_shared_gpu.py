"""Group members take turns at shared memory, here a host tensor. tests/gpu covers GPU memory."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from fovea_weights.weight_transfer import SharedGpuGroup

MEMBERS = 3


def options(seconds: float) -> dist.BroadcastOptions:
    made = dist.BroadcastOptions()
    made.timeout = timedelta(seconds=seconds)
    return made


@pytest.fixture
def groups() -> list[SharedGpuGroup]:
    host = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    stores = [
        host,
        *(TCPStore("127.0.0.1", host.port, None, False, wait_for_workers=False) for _ in range(MEMBERS - 1)),
    ]
    memory = torch.zeros(100, dtype=torch.uint8)
    return [SharedGpuGroup(store, rank, MEMBERS, memory) for rank, store in enumerate(stores)]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(MEMBERS) as pool:
        yield pool


def test_every_receiver_gets_all_of_what_is_larger_than_the_memory(
    groups: list[SharedGpuGroup], threads: ThreadPoolExecutor
) -> None:
    for size in (1, 99, 100, 101, 1234):
        sent = torch.randint(0, 256, (size,), dtype=torch.uint8)
        tensors = [sent, *(torch.zeros_like(sent) for _ in range(MEMBERS - 1))]
        works = [
            threads.submit(group.broadcast, [each], options(20)) for group, each in zip(groups, tensors, strict=True)
        ]
        assert all(work.result(30).is_completed() for work in works)
        assert all(torch.equal(each, sent) for each in tensors)
    assert not groups[0]._store.check(["0"]), "after all members have read, the store must be empty"


@pytest.mark.parametrize("leaver", range(MEMBERS))
def test_a_leaving_member_ends_the_wait_of_the_others(
    groups: list[SharedGpuGroup], threads: ThreadPoolExecutor, leaver: int
) -> None:
    """Two thirds of the members have started, and the leaving one itself may be in the middle."""
    waiting = [
        threads.submit(group.broadcast, [torch.zeros(250, dtype=torch.uint8)], options(60))
        for rank, group in enumerate(groups)
        if rank != leaver
    ]
    time.sleep(0.05)
    assert not any(work.done() for work in waiting)
    groups[leaver].abort()
    for work in waiting:
        with pytest.raises(RuntimeError, match="a member left it"):
            work.result(20)


def test_a_waiting_broadcast_can_be_aborted(groups: list[SharedGpuGroup], threads: ThreadPoolExecutor) -> None:
    waiting = threads.submit(groups[1].broadcast, [torch.zeros(8, dtype=torch.uint8)], options(60))
    groups[1].abort()
    with pytest.raises(RuntimeError, match="a member left it"):
        waiting.result(20)


def test_a_broadcast_ends_with_its_time(groups: list[SharedGpuGroup]) -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        groups[0].broadcast([torch.zeros(8, dtype=torch.uint8)], options(0.05))
