"""The examples that the README lists run unchanged."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np

from examples.rl_geometry3k import write_rows
from tests.client_environment import client_environment
from tests.e2e.stack import API_KEY, Stack

ROOT = pathlib.Path(__file__).parents[2]


def run(name: str, stack: Stack) -> str:
    environment = client_environment(
        TINKER_BASE_URL=stack.base_url,
        TINKER_API_KEY=API_KEY,
        FOVEA_GRPC=stack.address("gateway"),
        TINKER_TELEMETRY="0",
    )
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / name],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_tinker_example_learns_its_picture(stack: Stack) -> None:
    assert "Ada<|im_end|>" in run("tinker_image.py", stack).splitlines()[-1]


def test_a_first_model_is_good(stack: Stack) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "examples.first_model", "--base-url", stack.base_url, "--steps", "3"],
        cwd=ROOT,
        env=client_environment(TINKER_API_KEY=API_KEY),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    before, *steps, learnt, after, judged = ended.stdout.splitlines()
    assert before.startswith("before training: sampler and trainer are apart by at most ")
    assert [line.split()[:2] for line in steps] == [["step", "1"], ["step", "2"], ["step", "3"]]
    assert learnt.startswith("pictures that were not trained on: loss ")
    assert after.startswith("after training: sampler and trainer are apart by at most ")
    assert judged.startswith("GOOD: it learns, it sees its pictures, and sampler and trainer agree")


def test_records_are_learnt_from_and_a_run_that_is_over_stays_so(stack: Stack, tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    files = [tmp_path / "train.jsonl", tmp_path / "test.jsonl"]
    for file in files:
        write_rows(file, rng, 4)
    small = ["--steps", "2", "--groups-per-step", "2", "--group-size", "2", "--max-tokens", "8", "--max-turns", "2"]
    command = [sys.executable, "-m", "examples.train_on_records", files[0], "--held-out", files[1], *small]
    environment = client_environment(TINKER_BASE_URL=stack.base_url, TINKER_API_KEY=API_KEY, TINKER_TELEMETRY="0")
    for lines in (["before:", "step 1:", "step 2:", "weights: tinker://"], ["weights: tinker://"]):
        asked = [*command, "--out", tmp_path / "run"]
        ended = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
        assert ended.returncode == 0, ended.stderr
        said = ended.stdout.splitlines()
        assert [line[: len(begin)] for line, begin in zip(said, lines, strict=True)] == lines
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], "held_out_reward" in row) for row in rows] == [(1, False), (2, True)]


CELLS = """
import asyncio, json, sys
async def run(names):
    for source in json.load(sys.stdin):
        exec(source, names)
asyncio.run(run({}))
"""
"""Runs its input inside a running event loop, as Jupyter does."""


def test_the_notebook_runs(stack: Stack, tmp_path: pathlib.Path) -> None:
    cells = json.loads((ROOT / "examples" / "fine_tune.ipynb").read_text())["cells"]
    given, *sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    given += f"\nADDRESS, KEY, PICTURES, EPOCHS = {stack.base_url!r}, {API_KEY!r}, 40, 1"
    result = subprocess.run(
        [sys.executable, "-c", CELLS],
        cwd=tmp_path,
        input=json.dumps([given, *sources]),
        env=os.environ | {"TINKER_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    steps, read, *answers, merged = result.stdout.splitlines()
    assert steps.startswith("2 steps, loss ")
    assert read.endswith("of 8 held-out pictures are read right")
    assert len(answers) == 5
    assert (tmp_path / merged / "model.safetensors").exists()


def test_the_grpc_example_streams_an_answer(stack: Stack) -> None:
    assert run("grpc_image.py", stack).strip()


def test_the_openai_example_streams_an_answer(stack: Stack) -> None:
    assert run("openai_chat.py", stack).strip()


def test_the_grpc_example_trains_with_the_protos_alone(stack: Stack) -> None:
    *losses, refused, saved, said = run("grpc_training.py", stack).splitlines()
    found = [float(line.removeprefix("loss ")) for line in losses]
    assert len(found) == 20
    assert found[-1] < 0.1 * found[0]
    assert refused.startswith("refused: INVALID_ARGUMENT")
    assert "no such loss" in refused
    assert saved.startswith("saved tinker://")
    assert said == "Ada<|im_end|>"
