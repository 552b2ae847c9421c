"""The demo: held-out accuracy by sampling through vLLM, before and after fine-tuning through the official SDK."""

import json
import pathlib
import subprocess
import sys

import pytest

from fovea_demo.digits import HELD_OUT_COUNT, load_scans
from tests.client_environment import client_environment
from tests.e2e.stack import Stack


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "least"), [(1, 0.6), pytest.param(3, 0.9, marks=pytest.mark.long)])
def test_the_demo_learns_to_read_digits(epochs: int, least: float, stack: Stack, tmp_path: pathlib.Path) -> None:
    """Runs three passes, and one. fovea_data/test_export.py reads nine of ten digits after passes
    over fewer of them.
    """
    server = ["--base-url", stack.base_url, "--base-model", stack.model_name]
    command = [sys.executable, "-m", "fovea_demo", "--epochs", str(epochs), "--out", str(tmp_path), *server]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=client_environment())
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads((tmp_path / "result.json").read_text())
    assert figures["accuracy_before"] <= 0.25
    assert figures["accuracy_after"] >= least
    report = (tmp_path / "report.html").read_text()
    assert report.count("data:image/png;base64,") == 60
    assert report.count('<figure class="curve">') == 2


def test_no_scan_is_in_both_sets() -> None:
    train, held_out = load_scans()
    assert (len(train), len(held_out)) == (1797 - HELD_OUT_COUNT, HELD_OUT_COUNT)
    assert not {scan.png for scan in train} & {scan.png for scan in held_out}
