"""The trainer refuses a transformers that it does not know, before it reads a checkpoint."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fovea_trainer.ranks.rank_launcher import check_transformers

LOCKS = sorted((Path(__file__).parents[4] / "requirements").glob("[cg]pu*.txt"))


def test_the_trainer_ends_with_the_versions_to_install(tmp_path: Path) -> None:
    """A host of GPUs had 5.17 installed: the trainer found no experts there and said nothing."""
    described = tmp_path / "transformers-5.17.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.17.0\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "fovea_trainer", "--model", str(tmp_path), "--port", "0"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    message = "trainer: transformers 5.17.0 is installed, but Fovea runs on 5.19 and 5.20: install one of them"
    assert ended.stderr.splitlines()[-1] == message


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: str(lock.stem))
def test_all_locked_versions_are_known(lock: Path) -> None:
    (locked,) = re.findall(r"^transformers==(\S+)", lock.read_text(), re.MULTILINE)
    check_transformers(locked)


def test_an_unknown_later_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"transformers 5\.21\.0"):
        check_transformers("5.21.0")
