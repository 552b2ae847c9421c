"""Memory of `fovea up` with one copy of the base and with two: `python -m benchmarks.shared_base MODEL [--gpus 0]`.

Each way, one trainer rank takes steps with an adapter of rank 32, pushes it, and samples with it. Then the program
prints the memory of both services: on a CPU their proportional set size, in which a page that several processes map
counts in equal parts; on a GPU what the driver reports. It also prints the seconds of a step.
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tinker

from benchmarks.figure import emit
from fovea_demo.up import running_fovea

_WAYS = {"shared": ["--shared-base"], "own": []}
_VOCABULARY, _LENGTH, _DATUMS, _STEPS = 1000, 128, 2, 5
_MIB = 2**20


def main() -> None:
    """Measures both ways."""
    parser = argparse.ArgumentParser(prog="benchmarks.shared_base", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpus", default="none")
    options = parser.parse_args()
    for way, arguments in _WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            layout = ("--gpus", options.gpus, "--ranks", "1", "--set", "sampler.max_context=2048")
            ports = ("--port", "0", "--grpc-port", "0")
            with running_fovea(Path(folder), options.model, *ports, *layout, *arguments) as state:
                sizes = {"model": options.model.name, "way": way}
                emit("shared_base.step_s", _use(state), "s", **sizes)
                for service in ("sampler", "trainer"):
                    used = _gpu_mib(state, service) if options.gpus != "none" else _host_mib(state, service)
                    emit("shared_base.memory_mib", [used], "MiB", service=service, **sizes)


def _use(state: dict[str, Any]) -> list[float]:
    """Trains, pushes and samples; returns the seconds of each step but the first."""
    ids = np.random.default_rng(0).integers(0, _VOCABULARY, (_DATUMS, _LENGTH + 1)).tolist()
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(data=row[1:], dtype="int64"),
                "weights": tinker.TensorData(data=[1.0] * _LENGTH, dtype="float32"),
            },
        )
        for row in ids
    ]
    seconds = []
    with tinker.ServiceClient(base_url=state["base_url"], api_key="tml-local") as service:
        training = service.create_lora_training_client(base_model=state["model_name"], rank=32).result()
        for _ in range(_STEPS):
            began = time.perf_counter()
            training.forward_backward(data, "cross_entropy")
            training.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
            seconds.append(time.perf_counter() - began)
        sampling = training.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=32)
        sampling.sample(data[0].model_input, num_samples=8, sampling_params=params).result()
    return seconds[1:]


def _processes(state: dict[str, Any], service: str) -> list[psutil.Process]:
    own = psutil.Process(state["services"][service]["pid"])
    return [own, *own.children(recursive=True)]


def _host_mib(state: dict[str, Any], service: str) -> float:
    return sum(float(one.memory_full_info().pss) for one in _processes(state, service)) / _MIB


def _gpu_mib(state: dict[str, Any], service: str) -> float:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    used = dict(line.split(", ") for line in lines)
    return sum(float(used.get(str(one.pid), 0)) for one in _processes(state, service))


if __name__ == "__main__":
    main()
