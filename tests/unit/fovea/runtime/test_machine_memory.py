"""GPU memory is queried at every scrape; a process without the driver's library continues without it."""

import importlib.util
import os
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from fovea.runtime import machine_memory
from fovea.runtime.machine_memory import (
    DeviceMemory,
    GpuMemory,
    MemoryUse,
    host_free_bytes,
    host_memory_bytes,
    memory_use,
    show_gpu_memory,
)


def test_every_scrape_asks_again() -> None:
    used = 10
    registry = CollectorRegistry()
    registry.register(GpuMemory(lambda: [DeviceMemory("0", used, 80), DeviceMemory("GPU-1", 5, 90)]))
    labels = {"device": "0", "kind": "used"}
    assert registry.get_sample_value("fovea_gpu_memory_bytes", labels) == 10
    used = 20
    assert registry.get_sample_value("fovea_gpu_memory_bytes", labels) == 20
    assert registry.get_sample_value("fovea_gpu_memory_bytes", {"device": "GPU-1", "kind": "total"}) == 90


def test_utilisation_is_missing_where_the_driver_does_not_say() -> None:
    registry = CollectorRegistry()
    registry.register(GpuMemory(lambda: [DeviceMemory("0", 1, 2, 0.75), DeviceMemory("MIG-1", 1, 2)]))
    assert registry.get_sample_value("fovea_gpu_utilization_ratio", {"device": "0"}) == 0.75
    assert registry.get_sample_value("fovea_gpu_utilization_ratio", {"device": "MIG-1"}) is None


def test_a_service_reports_the_mean_of_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [DeviceMemory("0", 10, 80, 0.5), DeviceMemory("1", 20, 80, 1.0), DeviceMemory("MIG-1", 1, 2)]
    monkeypatch.setattr(machine_memory, "_SHOWN", [GpuMemory(lambda: devices)])
    assert memory_use(os.getpid()) == MemoryUse(31, 162, "gpu", 0.75)
    monkeypatch.setattr(machine_memory, "_SHOWN", [GpuMemory(lambda: devices[2:])])
    assert memory_use(os.getpid()).utilization is None


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is not None, reason="nvidia-ml-py is installed here")
def test_without_the_library_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    show_gpu_memory()
    assert "install nvidia-ml-py" in caplog.text


def test_without_a_gpu_a_service_takes_what_its_processes_have_resident() -> None:
    own = memory_use(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "kept = bytearray(200 * 2**20); print(flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    with child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        both = memory_use(os.getpid())
        child.stdin.close()
    assert (both.kind, both.utilization) == ("host", None)
    assert both.used_bytes - own.used_bytes > 190 * 2**20
    assert own.used_bytes < both.used_bytes < both.total_bytes


def test_free_host_memory_is_less_than_its_total() -> None:
    assert 2**28 < host_free_bytes() < host_memory_bytes() < 2**50
