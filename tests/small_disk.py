"""A small file system that tests can fill. Tests that need one are skipped if it cannot be mounted."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64m", "fovea-test", str(place)]
    if subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(file: Path, spare_bytes: int = 0) -> None:
    """Fills the file system, except for `spare_bytes`."""
    spare = file.with_suffix(".spare")
    spare.write_bytes(bytes(spare_bytes))
    with file.open("wb", buffering=0) as junk:
        for size in (2**20, 4096):
            try:
                while True:
                    junk.write(b"x" * size)
            except OSError:
                continue
    spare.unlink()
