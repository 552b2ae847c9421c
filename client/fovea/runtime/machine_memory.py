"""Memory and utilisation of the GPUs that a service sees, and memory of this machine, for metrics and reports."""

import importlib
import importlib.util
import logging
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)


class DeviceMemory(NamedTuple):
    """Memory of one GPU: its index or UUID in the driver, and used and total bytes.

    `utilization` is the share of the driver's last sample period, at most a second, in which a kernel ran: 0 to 1; None
    where the driver does not say, as for MIG instances.
    """

    device: str
    used_bytes: int
    total_bytes: int
    utilization: float | None = None


class MemoryUse(NamedTuple):
    """Memory of a service: used and total bytes of its GPUs, or of the host if it has none; and the mean utilisation of
    its GPUs, None if it is unknown.
    """

    used_bytes: int
    total_bytes: int
    kind: Literal["gpu", "host"]
    utilization: float | None = None


class GpuMemory(Collector):
    """Prometheus collector that reads memory and utilisation of all GPUs at each scrape."""

    def __init__(self, read: Callable[[], Iterable[DeviceMemory]]) -> None:
        self.read = read

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yields the metrics without values."""
        yield from _families()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields used and total bytes per device, and its utilisation if that is known."""
        family, utilization = _families()
        for memory in self.read():
            family.add_metric([memory.device, "used"], memory.used_bytes)
            family.add_metric([memory.device, "total"], memory.total_bytes)
            if memory.utilization is not None:
                utilization.add_metric([memory.device], memory.utilization)
        yield family
        yield utilization


_SHOWN: list[GpuMemory] = []


def show_gpu_memory() -> None:
    """Adds memory and use of the GPUs in CUDA_VISIBLE_DEVICES to the metrics; of all if the variable is not set.

    Creates no CUDA context. Logs a warning if nvidia-ml-py is missing or the driver does not answer.
    """
    if importlib.util.find_spec("pynvml") is None:
        logger.warning("GPU memory is missing from the metrics: install nvidia-ml-py")
        return
    nvml: Any = importlib.import_module("pynvml")
    try:
        handles = _visible(nvml)
    except nvml.NVMLError as error:
        logger.warning("GPU memory is missing from the metrics: %s", error)
        return

    def utilization(handle: Any) -> float | None:
        try:
            return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except nvml.NVMLError:  # MIG instances have none.
            return None

    def read() -> Iterator[DeviceMemory]:
        for name, handle in handles.items():
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            yield DeviceMemory(name, memory.used, memory.total, utilization(handle))

    _SHOWN.append(GpuMemory(read))
    REGISTRY.register(_SHOWN[-1])


def memory_use(root_pid: int) -> MemoryUse:
    """Returns the use of all GPUs in the metrics; without any, the memory of a process and its descendants.

    For processes, used bytes are their resident memory, with shared pages counted once per process; total bytes are the
    memory of the host.
    """
    devices = [device for shown in _SHOWN for device in shown.read()]
    if devices:
        used, in_all = (sum(values) for values in zip(*((d.used_bytes, d.total_bytes) for d in devices), strict=True))
        known = [device.utilization for device in devices if device.utilization is not None]
        return MemoryUse(used, in_all, "gpu", sum(known) / len(known) if known else None)
    return MemoryUse(sum(map(_resident_bytes, _tree(root_pid))), host_memory_bytes(), "host")


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # the process has ended
            continue
        for child in children:
            yield from _tree(int(child))


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # the process has ended
        return 0


def _visible(nvml: Any) -> dict[str, Any]:
    nvml.nvmlInit()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    return {name: _handle(nvml, name) for name in map(str.strip, names)}


def _handle(nvml: Any, name: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
    memory = GaugeMetricFamily(
        "fovea_gpu_memory_bytes",
        "Memory of the GPUs that this service sees: used and total.",
        labels=["device", "kind"],
    )
    utilization = GaugeMetricFamily(
        "fovea_gpu_utilization_ratio",
        "Share of the driver's last sample period, at most a second, in which a kernel ran on the GPU.",
        labels=["device"],
    )
    return memory, utilization


def host_memory_bytes() -> int:
    """Returns the total memory of this machine, or the limit of this process's container if that is lower."""
    whole = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    limit = _of_container("max")
    return min(whole, int(limit)) if limit.isdigit() else whole


def host_free_bytes() -> int:
    """Returns the free memory of this machine or container."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_bytes = int(lines["MemAvailable"].split()[0]) * 1024
    limit = _of_container("max")
    if not limit.isdigit():
        return free_bytes
    cached = dict(line.split() for line in _of_container("stat").splitlines())
    return min(free_bytes, int(limit) - int(_of_container("current")) + int(cached["inactive_file"]))


def _of_container(name: str) -> str:
    """Reads a memory file of this control group; empty outside containers and with cgroup v1."""
    try:
        return Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip()
    except OSError:
        return ""
