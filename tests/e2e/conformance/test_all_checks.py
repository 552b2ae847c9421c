"""The whole suite against a fresh Fovea that stores checkpoints in a bucket; its gateway is killed meanwhile."""

import json
import pathlib
import subprocess

import fsspec
import pytest

from fovea_conformance.fresh import COOKBOOK_CHECKS, suite_command
from tests.e2e.stack import Stack

REFUSED = {"C12"}
"""JWT mode, which the contract makes optional; see docs/reference/tinker.md."""
SEVERAL_MODELS = {"C120", "C121"}
"""Needs a teacher, and runs in tests/e2e/fovea_data/test_learning_otherwise.py."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fresh_fovea_keeps_every_promise(stack: Stack, bucket: str, tmp_path: pathlib.Path) -> None:
    """Runs as `make conformance` does. The file's name makes it the first of the folder, so that Fovea is fresh."""
    out = tmp_path / "verdicts.json"
    command = [*suite_command(stack.state, stack.log.parent), "--json", out, "--html", tmp_path / "verdicts.html"]
    result = subprocess.run([*command, "--long-job-s", "100"], capture_output=True, text=True, timeout=880)
    assert out.exists(), result.stdout[-20000:] + result.stderr[-5000:]
    rows = json.loads(out.read_text())
    assert [f"{row['id']}: {row['detail']}" for row in rows if row["status"] == "failed"] == []
    assert result.returncode == 0, result.stderr[-5000:]
    verdicts = {row["id"]: row["status"] for row in rows}
    assert len(verdicts) == 131
    assert fsspec.filesystem("s3").find(bucket), "checkpoints were stored elsewhere"
    assert {name for name, status in verdicts.items() if status == "refused"} == REFUSED
    assert {name for name, status in verdicts.items() if status == "not_applicable"} == COOKBOOK_CHECKS | SEVERAL_MODELS
    assert "C119" in (tmp_path / "verdicts.html").read_text()
