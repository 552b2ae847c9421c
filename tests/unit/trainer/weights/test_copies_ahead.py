"""Host buffers of states: one is copied while another is written, within a bound."""

import threading
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from fovea_trainer.weights import host_memory
from fovea_trainer.weights.host_memory import CopiesAhead, HostCopies
from tests.waiting import eventually

DEVICES = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]


class Copying:
    """Copies states of one tensor, and lets the test end their writes.

    Args:
        device: Device of the states.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ahead = CopiesAhead(device)

    def copy(self, value: float, size_bytes: int) -> tuple[Tensor, "Future[int]"]:
        """Copies a state. Returns the copy and its unfinished write."""
        (copy,) = self.ahead.of([torch.full((size_bytes // 4,), value, device=self._device)], "a")
        written: Future[int] = Future()

        def write(copies: HostCopies) -> "Future[int]":
            copies.wait()
            return written

        assert self.ahead.read_by(write) is written
        return copy, written

    @property
    def held_bytes(self) -> int:
        return sum(turn.copies.size_bytes for turn in self.ahead._turns)

    def begin(self, value: float, size_bytes: int) -> tuple[threading.Thread, list[tuple[Tensor, "Future[int]"]]]:
        """Does the same as `copy` in a thread, because it may wait."""
        found: list[tuple[Tensor, Future[int]]] = []
        thread = threading.Thread(target=lambda: found.append(self.copy(value, size_bytes)))
        thread.start()
        return thread, found


@pytest.fixture(params=DEVICES, ids=str)
def copying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Copying:
    monkeypatch.setattr(host_memory, "AHEAD_BYTES", 4096)
    return Copying(request.param)


async def test_a_copy_waits_until_its_buffer_is_written(copying: Copying) -> None:
    first, first_written = copying.copy(1.0, 4096)
    second, second_written = copying.copy(2.0, 4096)
    thread, found = copying.begin(3.0, 4096)
    thread.join(0.2)
    assert not found
    assert (first == 1.0).all()
    assert (second == 2.0).all()
    first_written.set_exception(OSError("the disk is broken"))  # a failed write frees its buffer too
    await eventually(lambda: bool(found))
    thread.join()
    assert (second == 2.0).all()
    assert (found[0][0] == 3.0).all()
    assert copying.held_bytes == 2 * 4096
    second_written.set_result(0)


@pytest.mark.parametrize("sizes", [(4096, 8192), (8192, 4096), (8192, 8192)])
async def test_a_large_state_has_one_buffer_alone(copying: Copying, sizes: tuple[int, int]) -> None:
    first, written = copying.copy(1.0, sizes[0])
    thread, found = copying.begin(2.0, sizes[1])
    thread.join(0.2)
    assert not found
    assert (first == 1.0).all()
    written.set_result(0)
    await eventually(lambda: bool(found))
    thread.join()
    assert (found[0][0] == 2.0).all()
    assert copying.held_bytes == sizes[1]
    found[0][1].set_result(0)
    for value in (3.0, 4.0, 5.0):
        copy, written = copying.copy(value, 1024)
        written.set_result(0)
        assert (copy == value).all()
    assert copying.held_bytes <= 2 * 4096
