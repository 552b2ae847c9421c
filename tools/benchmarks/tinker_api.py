"""Measures a client's view of the Tinker API: `python -m benchmarks.tinker_api --bench PATH/bench_tinker.py`.

Starts a Fovea with a tiny text model and one with the tiny VLM, and runs the vendor-neutral script `bench_tinker.py`
against each through the official SDK. Its rows become the output lines. The reference of a figure is the best value
that another server's run of that script gave on such a machine (SkyRL 0.3.0, README next to the script), so it is from
another run. The SDK caches get_info, so the gateway's own answer is measured separately, over 16 connections without
the SDK.

The script is not part of this repository; `--bench` gives its path. `mktiny_text.py` next to it builds the text model
unless `--text-model` is given.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.figure import emit
from benchmarks.gateway_polls import KEY, Connection
from benchmarks.running import Running

_READY_S = 300.0
_PICTURE_SIDE = 64
_CONNECTIONS = 16
_BARE_S = 3.0
_PEER_GET_INFO = 370.0


class Field(NamedTuple):
    """A number in a row of the script, and the reference server's best; 0 if it has none."""

    name: str
    unit: str
    scale: float
    peer: float = 0.0


FIELDS = {
    "create_lora_training_client": [Field("latency_s", "s", 1.0)],
    "a_fb_optim_b1": [Field("p50_ms", "s", 1e-3, 0.16), Field("p99_ms", "s", 1e-3)],
    "a_fb_optim_b16": [Field("p50_ms", "s", 1e-3, 0.43), Field("p99_ms", "s", 1e-3)],
    "a_fb_optim_b128": [Field("p50_ms", "s", 1e-3, 2.7), Field("p99_ms", "s", 1e-3)],
    "b_train_tokens": [
        Field("tokens_per_s", "token/s", 1.0, 5900.0),
        Field("pipelined_tokens_per_s", "token/s", 1.0),
    ],
    "c_sample_throughput": [
        Field("tokens_per_s", "token/s", 1.0, 1890.0),
        Field("wall_s", "s", 1.0),
        Field("p50_ms", "s", 1e-3),
    ],
    "d_sample_single": [
        Field("p50_ms", "s", 1e-3, 0.12),
        Field("p99_ms", "s", 1e-3),
        Field("mean_new_tokens", "token", 1.0),
    ],
    "e_save_and_sampler": [Field("p50_ms", "s", 1e-3, 0.16), Field("first_sample_p50_ms", "s", 1e-3, 0.22)],
    "f_get_info": [Field("requests_per_s", "1/s", 1.0, _PEER_GET_INFO)],
    "f_get_server_capabilities": [Field("requests_per_s", "1/s", 1.0), Field("p50_ms", "s", 1e-3)],
    "g_multi_client": [Field("ratio", "of one client's time", 1.0, 3.2)],
    "vlm_probe": [Field("max_logprob_change", "nat", 1.0)],
}
"""Fields by row. A row of figure X with images is vlm_X; the reference server drops images, so those have no reference.
"""


@contextmanager
def fovea_up(model: str) -> Iterator[Running]:
    """Runs a Fovea that serves `model`. Raises RuntimeError if it does not start."""
    with tempfile.TemporaryDirectory(prefix="fovea-api-") as folder:
        state = Path(folder) / "up.json"
        command = ["-m", "fovea.cli.main", "up", "--model", model, "--state-dir", folder, "--port", "0"]
        with (Path(folder) / "up.log").open("w+") as log:
            process = subprocess.Popen([sys.executable, *command, "--grpc-port", "0"], stdout=log, stderr=log)
            try:
                deadline = time.monotonic() + _READY_S
                while not state.exists():
                    if process.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        raise RuntimeError(f"fovea up did not become ready:\n{log.read()[-2000:]}")
                    time.sleep(0.2)
                yield Running.read(state)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()


def run_script(running: Running, bench: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """Runs the script once and returns its rows."""
    address = ["--base-url", running.base_url, "--model", running.model_name, "--api-key", KEY]
    environment = os.environ | {"TINKER_TELEMETRY": "0"}
    command = [sys.executable, str(bench), *address, *arguments]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def collect(runs: list[list[dict[str, Any]]]) -> tuple[dict[tuple[str, Field], list[float]], list[str]]:
    """Returns the values of each field, one per run, and the problems of missing or failed rows."""
    values: dict[tuple[str, Field], list[float]] = defaultdict(list)
    problems = []
    for row in (row for run in runs for row in run):
        if row.get("status", "ok") != "ok" or row.get("first_sample", "ok") != "ok" or row.get("errors"):
            problems.append(json.dumps(row))
            continue
        figure = row["figure"]
        for field in FIELDS.get(figure) or FIELDS.get(figure.removeprefix("vlm_"), []):
            values[figure, field].append(float(row[field.name]) * field.scale)
    return values, problems


def image_tokens(model: str) -> int:
    """Returns the number of tokens of the script's image."""
    from PIL import Image
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(model)
    frames, height, width = processor(images=Image.new("RGB", (_PICTURE_SIDE, _PICTURE_SIDE)))["image_grid_thw"][0]
    return int(frames * height * width) // int(processor.merge_size) ** 2


async def bare_rate(running: Running) -> float:
    """Returns get_info requests per second over bare HTTP connections."""
    port = urlsplit(running.base_url).port
    assert port is not None
    first = Connection(port)
    session_id = (await first.ok("create_session", {"sdk_version": "0.38.0"}))["session_id"]
    lora = {"rank": 16, "train_attn": True, "train_mlp": True, "train_unembed": True}
    model = {"session_id": session_id, "model_seq_id": 0, "base_model": running.model_name, "lora_config": lora}
    about = {"model_id": (await first.ok("create_model", model))["model_id"], "type": "get_info"}
    first.close()
    end = time.perf_counter() + _BARE_S

    async def ask() -> int:
        connection, count = Connection(port), 0
        while time.perf_counter() < end:
            await connection.ok("get_info", about)
            count += 1
        connection.close()
        return count

    return sum(await asyncio.gather(*(ask() for _ in range(_CONNECTIONS)))) / _BARE_S


def measure(kind: str, model: str, options: argparse.Namespace) -> list[str]:
    """Prints the figures of one model. Returns what is missing."""
    arguments = ["--figures", options.figures, *(["--quick"] if options.quick else [])]
    if kind == "vlm":
        arguments += ["--vlm", "--image-tokens", str(image_tokens(model))]
    with fovea_up(model) as running:
        values, problems = collect([run_script(running, options.bench, arguments) for _ in range(options.repeats)])
        for (figure, field), found in values.items():
            peer = [field.peer] if field.peer and not figure.startswith("vlm_") else None
            emit(f"tinker_api.{figure}.{field.name.removesuffix('_ms')}", found, field.unit, peer, model=kind)
        rates = [asyncio.run(bare_rate(running)) for _ in range(options.repeats)]
        emit("tinker_api.get_info.without_sdk", rates, "1/s", [_PEER_GET_INFO], model=kind, connections=_CONNECTIONS)
    return problems


def main() -> int:
    """Prints the figures. Returns 1 if one is missing, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, required=True, help="Path of bench_tinker.py.")
    parser.add_argument("--text-model", help="Checkpoint directory; default: mktiny_text.py builds one.")
    parser.add_argument("--vlm-model", help="Checkpoint directory; default: the tiny Qwen3-VL.")
    parser.add_argument("--kinds", nargs="+", choices=("text", "vlm"), default=["text", "vlm"])
    parser.add_argument("--figures", default="a,b,c,d,e,f,g", help="Letters of the script's figures.")
    parser.add_argument("--repeats", type=int, default=3, help="Runs of the script for each model.")
    parser.add_argument("--quick", action="store_true", help="A tenth of the counts, to see that it runs.")
    options = parser.parse_args()
    if not options.bench.is_file():
        parser.error(f"--bench: {options.bench} is no file; name bench_tinker.py, which is not in this repository")
    builders = {
        "text": [str(options.bench.with_name("mktiny_text.py"))],
        "vlm": ["-m", "fovea_tinyvlm"],
    }
    problems = []
    with tempfile.TemporaryDirectory(prefix="tiny-text-") as folder:
        for kind in options.kinds:
            model = getattr(options, f"{kind}_model")
            if model is None:
                out = [folder] if kind == "text" else []
                built = subprocess.run(
                    [sys.executable, *builders[kind], *out], stdout=subprocess.PIPE, check=True, text=True
                )
                model = folder if kind == "text" else built.stdout.strip().splitlines()[-1]
            problems += measure(kind, model, options)
    for problem in problems:
        print(f"missing: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
