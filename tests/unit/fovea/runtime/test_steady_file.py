"""Files that reach the disk in pieces while they are written."""

import io
import os
from pathlib import Path

import pytest

from fovea.runtime import durable
from fovea.runtime.durable import SteadyFile

_DATA = os.urandom(1 << 16)


def test_no_more_than_a_piece_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "PIECE_BYTES", 10_000)
    sizes, real = [0], os.fdatasync

    def watched(descriptor: int) -> None:
        real(descriptor)
        sizes.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", watched)
    path = tmp_path / "large"
    with path.open("wb") as file:
        steady = SteadyFile(file)
        # One part is larger than a piece, others are smaller, and one is a view of other elements than bytes.
        assert steady.write(_DATA[:25_000]) == 25_000
        for at in range(25_000, 33_000, 1000):
            steady.write(_DATA[at : at + 1000])
        steady.write(memoryview(_DATA[33_000:]).cast("I"))
    assert path.read_bytes() == _DATA
    assert len(sizes) > len(_DATA) // 20_000
    waiting = [later - earlier for earlier, later in zip(sizes, [*sizes[1:], len(_DATA)], strict=True)]
    assert max(waiting) < 20_000


def test_a_file_without_a_disk_is_written_as_it_is() -> None:
    memory = io.BytesIO()
    SteadyFile(memory).write(_DATA)
    assert memory.getvalue() == _DATA
