"""Files of a torch checkpoint reach the disk while they are written, with and without checksums."""

import errno
import os
import zlib
from pathlib import Path

import pytest

from fovea.runtime import durable
from fovea.wire.errors import DiskFull
from fovea_trainer.weights.torch_checkpoint import Writer

_DATA = os.urandom(50_000)


@pytest.mark.parametrize("is_summed", [False, True])
def test_pieces_reach_the_disk_before_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_summed: bool
) -> None:
    monkeypatch.setattr(durable, "PIECE_BYTES", 10_000)
    synced, real = [], os.fdatasync

    def watched(descriptor: int) -> None:
        real(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", watched)
    files, path = Writer(str(tmp_path), str(tmp_path), is_summed).written, tmp_path / "part"
    with files.create_stream(str(path), "wb") as stream:
        stream.write(_DATA)  # type: ignore[attr-defined]
    assert path.read_bytes() == _DATA
    assert len(synced) == 5
    assert all(size_bytes >= 10_000 * count for count, size_bytes in enumerate(synced, 1))
    assert files.checksums == ({"part": zlib.crc32(_DATA)} if is_summed else {})
    with files.create_stream(str(path), "rb") as stream:
        assert stream.read() == _DATA  # type: ignore[attr-defined]


def test_a_sync_that_fails_leaves_neither_a_file_nor_a_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(durable, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(os, "fdatasync", full)
    files, path = Writer(str(tmp_path), str(tmp_path), is_summed=True).written, tmp_path / "part"
    with pytest.raises(DiskFull), files.create_stream(str(path), "wb") as stream:
        stream.write(_DATA[:10_000])  # type: ignore[attr-defined]
    assert not path.exists()
    assert files.checksums == {}
