"""Files of a torch checkpoint reach the disk while they are written, with and without checksums."""

import os
import zlib
from pathlib import Path

import pytest

from fovea.runtime import durable
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
    assert synced == [10_000, 20_000, 30_000, 40_000, 50_000]
    assert files.checksums == ({"part": zlib.crc32(_DATA)} if is_summed else {})
    with files.create_stream(str(path), "rb") as stream:
        assert stream.read() == _DATA  # type: ignore[attr-defined]
