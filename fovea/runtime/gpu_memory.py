"""Memory of the GPUs that a service sees, as the driver tells it: that of other processes is in it."""

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)


class DeviceMemory(NamedTuple):
    """One GPU: its number or UUID as the driver counts, bytes in use and in all."""

    device: str
    used_bytes: int
    total_bytes: int


class GpuMemory(Collector):
    """Asks for the memory of all devices whenever Prometheus does."""

    def __init__(self, read: Callable[[], Iterable[DeviceMemory]]) -> None:
        self._read = read

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The metric without values."""
        yield _family()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Used and total bytes by device."""
        family = _family()
        for memory in self._read():
            family.add_metric([memory.device, "used"], memory.used_bytes)
            family.add_metric([memory.device, "total"], memory.total_bytes)
        yield family


def show_gpu_memory() -> None:
    """Shows, from now on, the memory of the GPUs in CUDA_VISIBLE_DEVICES, of all if it is not set.

    Makes no CUDA context. Without nvidia-ml-py, or where the driver does not answer it, the log says so.
    """
    if importlib.util.find_spec("pynvml") is None:
        logger.warning("GPU memory is not in the metrics: install nvidia-ml-py")
        return
    nvml: Any = importlib.import_module("pynvml")
    try:
        handles = _visible(nvml)
    except nvml.NVMLError as error:
        logger.warning("GPU memory is not in the metrics: %s", error)
        return

    def read() -> Iterator[DeviceMemory]:
        for name, handle in handles.items():
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            yield DeviceMemory(name, memory.used, memory.total)

    REGISTRY.register(GpuMemory(read))


def _visible(nvml: Any) -> dict[str, Any]:
    nvml.nvmlInit()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    return {name: _handle(nvml, name) for name in map(str.strip, names)}


def _handle(nvml: Any, name: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


def _family() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        "fovea_gpu_memory_bytes",
        "Memory of the GPUs that this service sees: used and total.",
        labels=["device", "kind"],
    )
