"""Files that reach the disk in pieces while they are written."""

import errno
import io
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea.runtime import durable
from fovea.runtime.durable import SteadyFile
from tests.waiting import eventually

_DATA = os.urandom(1 << 16)


class Disk:
    """Replaces fdatasync: each sync waits until the test lets it go on, and then fails if `error` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.allowed, self.ended = 0, threading.Semaphore(0), 0
        self.error: OSError | None = None
        self._real = os.fdatasync
        monkeypatch.setattr(durable, "PIECE_BYTES", 10_000)
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, descriptor: int) -> None:
        self.begun += 1
        self.allowed.acquire()
        self._real(descriptor)  # fails if the file was closed meanwhile
        self.ended += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(monkeypatch)
    yield made
    made.allowed.release(100)


async def test_one_piece_is_written_while_the_one_before_is_synced_and_no_more(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "large"
    steady = SteadyFile(path.open("wb", buffering=0))
    writing = threading.Thread(target=lambda: (steady.write(_DATA), steady.close()))
    writing.start()
    for count in range(1, 7):
        size_bytes = min(10_000 * (count + 1), len(_DATA))
        await eventually(lambda count=count: disk.begun == count)
        await eventually(lambda size_bytes=size_bytes: path.stat().st_size == size_bytes)
        assert disk.ended == count - 1
        disk.allowed.release()
    writing.join()
    assert path.read_bytes() == _DATA
    assert (disk.begun, disk.ended) == (6, 6)


def test_parts_of_any_size_and_kind_are_written_and_summed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(durable, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(durable, "_SLICE_BYTES", 3_000)
    with SteadyFile((tmp_path / "large").open("wb"), is_summed=True) as steady:
        assert steady.write(_DATA[:25_000]) == 25_000
        for at in range(25_000, 33_000, 1000):
            steady.write(_DATA[at : at + 1000])
        steady.write(memoryview(_DATA[33_000:]).cast("I"))
    assert (tmp_path / "large").read_bytes() == _DATA
    assert steady.checksum == zlib.crc32(_DATA)


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_sync_that_fails_fails_the_file(disk: Disk, tmp_path: Path, pieces: int) -> None:
    """After one piece only `close` can report it; otherwise a later write does too."""
    disk.error = OSError(errno.EIO, "the disk is broken")
    for _ in range(pieces):
        disk.allowed.release()
    file = (tmp_path / "large").open("wb")
    with pytest.raises(OSError, match="the disk is broken"), SteadyFile(file) as steady:
        steady.write(_DATA[: 10_000 * pieces])
    assert file.closed
    assert disk.begun == 1, "nothing follows a failure"
    with pytest.raises(OSError, match="the disk is broken"):
        steady.close()


async def test_a_file_stays_open_until_its_last_sync_is_over(disk: Disk, tmp_path: Path) -> None:
    """Otherwise the thread would sync whatever file has the descriptor next."""
    file = (tmp_path / "large").open("wb")
    steady = SteadyFile(file)
    steady.write(_DATA[:10_000])
    closing = threading.Thread(target=steady.close)
    closing.start()
    await eventually(lambda: disk.begun == 1)
    assert not file.closed
    disk.allowed.release()
    closing.join()
    assert file.closed
    assert disk.ended == 1


def test_a_file_without_a_disk_is_written_as_it_is() -> None:
    memory = io.BytesIO()
    steady = SteadyFile(memory, is_summed=True)
    steady.write(_DATA)
    assert memory.getvalue() == _DATA
    assert steady.checksum == zlib.crc32(_DATA)
    steady.close()
