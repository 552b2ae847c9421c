"""Times cold and warm starts of `fovea up`: `python -m benchmarks.starts MODEL --ways main few --out $OUT`.

Each way of starting gets an empty folder for the caches of vLLM, Triton and Inductor, starts once with it (cold) and
then again (warm). The program prints seconds until all services are ready, vLLM's own account of them, the functions in
which the engine's main thread was found, and the speed of sampling afterwards. Needs a GPU to tell anything.
"""

import argparse
import collections
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import tinker

from benchmarks.figure import emit
from fovea_demo.up import running_fovea

_FEW = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
_SIZES = {"cudagraph_capture_sizes": _FEW}
WAYS: dict[str, dict[str, Any]] = {
    "main": {},
    "512": {"compilation_config": {"max_cudagraph_capture_size": 512}},
    "few": {"compilation_config": _SIZES},
    "decode": {"compilation_config": {**_SIZES, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "lora_always": {"compilation_config": {**_SIZES, "cudagraph_specialize_lora": False}},
    "uncompiled": {"compilation_config": {**_SIZES, "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "eager": {"settings": {"EAGER": "true"}},
    "few_8_adapters": {"compilation_config": _SIZES, "settings": {"MAX_LORAS": "8"}},
    "few_plan": {"compilation_config": _SIZES, "environment": {"VLLM_ENABLE_STARTUP_PLAN": "1"}},
}
_SECONDS = re.compile(r"\d+(\.\d+)? ?(s|secs?|seconds)\b")
_PERIOD_S = 0.25
_SAMPLER = "fovea_sampler"
_WATCH = f"""
import os, sys, threading, time
def _watch(main):
    with open(os.path.join({{folder!r}}, str(os.getpid())), "w") as file:
        while True:
            frame, names = sys._current_frames().get(main), []
            while frame is not None:
                code = frame.f_code
                names.append("/".join(code.co_filename.split("/")[-2:]) + ":" + code.co_name)
                frame = frame.f_back
            print(time.time(), *names, sep=" ", file=file, flush=True)
            time.sleep({_PERIOD_S})
if "{_SAMPLER}" in " ".join(sys.orig_argv) or "multiprocessing.spawn" in " ".join(sys.orig_argv):
    threading.Thread(target=_watch, args=(threading.main_thread().ident,), daemon=True).start()
"""


@contextmanager
def environment(way: dict[str, Any], caches: Path) -> Iterator[None]:
    """Sets the variables of one way of starting, with its caches in a folder, and restores the earlier ones."""
    config = way.get("compilation_config")
    given = {
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "FLASHINFER_WORKSPACE_BASE": str(caches / "flashinfer"),
        **({"FOVEA_SAMPLER_ENGINE_ARGUMENTS": json.dumps({"compilation_config": config})} if config else {}),
        **{f"FOVEA_SAMPLER_{name}": value for name, value in way.get("settings", {}).items()},
        **way.get("environment", {}),
    }
    with mock.patch.dict(os.environ, given):
        yield


@contextmanager
def stacks(folder: Path) -> Iterator[None]:
    """Makes the sampler's processes write their main thread's stack into files of a folder, four times a second."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(_WATCH.format(folder=str(folder)))
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{folder}:{before}"
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


def busiest(folder: Path, until: float, count: int = 45) -> list[tuple[float, str]]:
    """Returns seconds and name of the functions in which the busiest process was found, inclusive, until a moment."""
    found: list[collections.Counter[str]] = []
    for path in folder.glob("[0-9]*"):
        rows = [row.split() for row in path.read_text().splitlines()]
        names: collections.Counter[str] = collections.Counter()
        for row in rows:
            if row and float(row[0]) <= until:
                names.update({name for name in row[1:] if "/" in name})
        found.append(names)
    engine = max(found, key=_time_in_worker, default=collections.Counter())
    return [(seen * _PERIOD_S, name) for name, seen in engine.most_common(count)]


def _time_in_worker(names: collections.Counter[str]) -> int:
    return max((seen for name, seen in names.items() if "worker/gpu" in name), default=0)


def speed(base_url: str, model: str) -> dict[str, float]:
    """Returns tokens per second of 64 requests and of a single one, without and with an adapter."""
    found: dict[str, float] = {}
    with tinker.ServiceClient(base_url=base_url, api_key="tml-local") as service:
        begun = time.perf_counter()
        training = service.create_lora_training_client(base_model=model, rank=16, seed=0).result(300)
        adapter = training.save_weights_and_get_sampling_client().result(300)
        found["adapter_s"] = round(time.perf_counter() - begun, 1)
        base = service.create_sampling_client(base_model=model).result(300)
        for name, client in (("base", base), ("adapter", adapter)):
            for requests in (1, 64, 64):  # the last of each kind counts
                found[f"{name}_{requests}_tok_s"] = round(_tokens_per_second(client, requests))
    return found


def _tokens_per_second(client: tinker.SamplingClient, requests: int) -> float:
    begun = time.perf_counter()
    asked = [
        client.sample(
            tinker.ModelInput.from_ints([100 + number, *range(200, 232)]),
            1,
            tinker.SamplingParams(max_tokens=128, temperature=1.0, seed=number),
        )
        for number in range(requests)
    ]
    drawn = sum(len(future.result(300).sequences[0].tokens) for future in asked)
    return drawn / (time.perf_counter() - begun)


def start(model: Path, name: str, state: Path, out: Path, wait_s: float) -> dict[str, Any]:
    """Starts Fovea once; returns what it measured. Copies the log to `out`."""
    begun = time.perf_counter()
    try:
        with running_fovea(state, model, "--port", "0", "--grpc-port", "0", timeout_s=wait_s) as up:
            seconds, ready_at = time.perf_counter() - begun, time.time()
            figures = speed(up["base_url"], up["model_name"])
    finally:
        if (state / "up.log").exists():
            (out / f"{name}.log").write_text((state / "up.log").read_text())
    log = (out / f"{name}.log").read_text().splitlines()
    said = [line.strip()[:200] for line in log if _SECONDS.search(line) and "sampler" in line.partition("│")[0]]
    return {"ready_s": round(seconds, 1), "ready_at": ready_at, "speed": figures, "said": said[:60]}


def measure(model: Path, way: str, out: Path, warm: int, with_stacks: bool, wait_s: float) -> None:
    """Prints a cold start and `warm` further ones."""
    with tempfile.TemporaryDirectory(prefix="starts-") as folder, environment(WAYS[way], Path(folder) / "caches"):
        for number in range(1 + warm):
            name = f"{model.name}-{way}-{'warm' if number else 'cold'}"
            watched = Path(folder) / f"stacks{number}"
            if with_stacks:
                with stacks(watched):
                    found = start(model, name, Path(folder) / f"state{number}", out, wait_s)
            else:
                found = start(model, name, Path(folder) / f"state{number}", out, wait_s)
            emit(
                f"{'warm' if number else 'cold'} start",
                [found["ready_s"]],
                "s",
                model=model.name,
                way=way,
                **found["speed"],
            )
            for line in found["said"]:
                print(f"  {line}", flush=True)
            if with_stacks:
                rows = busiest(watched, found["ready_at"])
                (out / f"{name}.stacks.json").write_text(json.dumps(rows, indent=1))
                for seconds, function in rows:
                    print(f"  {seconds:7.1f} s  {function}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all ways of one model. A way that fails is reported, and the next one is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["main", "few"], help="ways of starting")
    parser.add_argument("--warm", type=int, default=1, help="warm starts of each way (default: %(default)s)")
    parser.add_argument("--no-stacks", action="store_true", help="do not watch the engine's main thread")
    parser.add_argument("--wait-s", type=float, default=290, help="the longest start (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder for logs")
    given = parser.parse_args(arguments)
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    given.out.mkdir(parents=True, exist_ok=True)
    for way in given.ways:
        try:
            measure(given.model, way, given.out, given.warm, not given.no_stacks, given.wait_s)
        except Exception as error:  # one way must not end the others
            print(f"{way} failed: {error}"[:3000], flush=True)


if __name__ == "__main__":
    main()
