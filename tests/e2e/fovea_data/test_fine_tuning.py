"""A killed fine-tuning run resumes as if uninterrupted; test_export.py beside it checks the learning result."""

import asyncio
import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
from PIL import Image

from tests.client_environment import client_environment
from tests.e2e.stack import API_KEY, Stack
from tests.waiting import eventually

RUN = """
import sys
from fovea_data import FineTuneSettings, fine_tune, image_folder

folder, out, url, key = sys.argv[1:]
train, held_out = image_folder(folder).split(0.25)
fine_tune(train, held_out, FineTuneSettings(epochs=2, batch_size=4), out=out, base_url=url, api_key=key).close()
"""


def digits(folder: pathlib.Path, count: int) -> pathlib.Path:
    from sklearn.datasets import load_digits  # not at the top: see conftest.py of all tests

    scans = load_digits()
    for number in range(count):
        place = folder / str(scans.target[number])
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.round(scans.images[number] * 255 / 16).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


def metrics(out: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the logged figures without times."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [{name: value for name, value in row.items() if name not in ("seconds", "time")} for row in rows]


def test_a_killed_run_goes_on_to_the_bit(stack: Stack, tmp_path: pathlib.Path) -> None:
    folder = digits(tmp_path / "digits", 48)

    def start(out: pathlib.Path) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", RUN, folder, out, stack.base_url, API_KEY]
        return subprocess.Popen(command, env=client_environment(TINKER_TELEMETRY="0"))

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    undisturbed, killed = start(whole), start(cut)
    # After the first of two evaluations, within the next epoch.
    asyncio.run(eventually(lambda: any("held_out_loss" in row for row in metrics(cut)[:-2]), 240))
    killed.kill()
    killed.wait()
    before = len(metrics(cut))
    assert start(cut).wait(240) == 0
    assert undisturbed.wait(240) == 0
    assert before < len(metrics(whole)), "the kill must interrupt work"
    assert metrics(cut) == metrics(whole)
