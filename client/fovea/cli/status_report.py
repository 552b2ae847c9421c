"""The report of `fovea status`: services, their memory and health, sessions and queues."""

import asyncio
import os
import pathlib
import time
import urllib.request
from collections import defaultdict
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.table import Column, Table

from fovea.cli.service import kind_of
from fovea.client.channel import ServiceClient
from fovea.runtime import credentials

_TIMEOUT_S = 5.0
_COLUMNS = ("service", "gRPC", "pid", "memory", "up for", "restarts", "health")
_SPARE = ("gRPC", "pid", "up for")
"""Columns that a narrow terminal does without; `fovea status --json` has them."""
_WRAPPED = 24
"""Characters from which a cell may be wrapped, instead of a column left out."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def read_report(state: dict[str, Any], healthy: dict[str, bool]) -> dict[str, Any]:
    """Collects the report as plain values.

    Args:
        state: Contents of `up.json`.
        healthy: Whether each service serves; keys are service names.

    Figures of a service that does not answer are None. `memory_bytes` is the sum over all processes of a service and
    counts the pages that they share once per process. `gpu_memory_bytes` is the used memory of all devices that the
    service sees, by any process.
    """
    figures = {name: _figures(item["metrics"]) for name, item in state["services"].items()}
    families = _children()
    services = {
        name: item
        | {
            "serves": healthy[name],
            "memory_bytes": _resident_bytes(item["pid"], families),
            "gpu_memory_bytes": _sum(figures[name], "fovea_gpu_memory_bytes", kind="used"),
            "models": _sum(figures[name], "fovea_trainer_models") if kind_of(name) == "trainer" else None,
        }
        for name, item in state["services"].items()
    }
    gateway = figures.get("gateway")
    trainers = [figures[name] for name in state["services"] if kind_of(name) == "trainer"]
    return {
        "version": state["version"],
        "base_url": state["base_url"],
        "base_models": [state["model_name"], *state["further_models"]],
        "uptime_s": time.time() - state["started_at"],
        "sessions": _sum(gateway, "fovea_gateway_sessions"),
        "parked_sessions": _sum(gateway, "fovea_gateway_parked_sessions"),
        "models": None if None in trainers else sum(_sum(each, "fovea_trainer_models") or 0 for each in trainers),
        "running": _sum(gateway, "fovea_gateway_queue_depth", state="running"),
        "waiting": _sum(gateway, "fovea_gateway_queue_depth", state="waiting"),
        "free_disk_bytes": _sum(gateway, "fovea_gateway_state_volume_bytes", kind="free"),
        "services": services,
    }


def summary(report: dict[str, Any]) -> str:
    """Returns the first two lines of `fovea status`."""
    counts = ("sessions", "models", "running", "waiting")
    sessions, models, running, waiting = ("?" if report[name] is None else f"{report[name]:.0f}" for name in counts)
    parked = f" ({report['parked_sessions']:.0f} parked)" if report["parked_sessions"] else ""
    return (
        f"Fovea {report['version']} at {report['base_url']}, up for {format_duration(report['uptime_s'])}: "
        f"{' and '.join(report['base_models'])}\n"
        f"{sessions} sessions{parked}, {models} models in training, {running} requests run, {waiting} wait"
    )


def services_table(report: dict[str, Any], healthy: dict[str, bool], width: int | None) -> Table:
    """Returns the table of `fovea status`, without columns of `_SPARE` as long as it is wider than `width`.

    Cells that are still too wide are wrapped, never cut. None is for output that is no terminal, which has no width.
    """
    rows = []
    for name, item in report["services"].items():
        up_for = format_duration(time.time() - item["started_at"]) if item["pid"] else "-"
        memory = f"{item['memory_bytes'] / 2**30:.1f} GiB"
        memory += f" + GPU {item['gpu_memory_bytes'] / 2**30:.1f}" if item["gpu_memory_bytes"] else ""
        health = describe_health(item, healthy[name])
        row = (name, item["address"], str(item["pid"] or "-"), memory, up_for, str(item["restarts"]), health)
        rows.append(dict(zip(_COLUMNS, row, strict=True)))
    left = list(_COLUMNS)
    for column in _SPARE:
        cells = [dict(zip(left, left, strict=True)), *rows]
        widths = [min(max(len(cell[name]) for cell in cells), _WRAPPED) for name in left]
        if width is None or sum(widths) + 3 * len(left) + 1 <= width:
            break
        left.remove(column)
    table = Table(*(Column(name, overflow="fold") for name in left))
    for cells_of in rows:
        table.add_row(*(cells_of[name] for name in left))
    return table


def format_duration(seconds: float) -> str:
    """Formats a duration in a readable unit: `42 s`, `3 min`, `5.2 h`, `3.1 days`."""
    for size, word in ((86400.0, "days"), (3600.0, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {word}"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


Figures = dict[str, list[tuple[dict[str, str], float]]]


def _figures(url: str) -> Figures | None:
    """Returns the samples of a service's Prometheus page by metric name; None if the service does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    found: Figures = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name].append((sample.labels, sample.value))
    return found


def _sum(figures: Figures | None, name: str, **labels: str) -> float | None:
    if figures is None:
        return None
    return sum(value for own, value in figures.get(name, []) if labels.items() <= own.items())


def _children() -> dict[int, list[int]]:
    """Returns the process ids of this machine by the id of their parent."""
    found: dict[int, list[int]] = defaultdict(list)
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has just ended
            continue
        found[parent].append(int(path.parent.name))
    return found


def _resident_bytes(pid: int | None, children: dict[int, list[int]]) -> int:
    """Returns the resident memory of a process and all its descendants."""
    if pid is None:
        return 0
    try:
        own = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        own = 0
    return own + sum(_resident_bytes(child, children) for child in children.get(pid, []))


def describe_health(item: dict[str, Any], is_healthy: bool) -> str:
    """Describes the health of a service; if it does not serve, with the reason."""
    if is_healthy:
        return "serving" if item.get("models") is None else f"serving {item['models']:.0f} models"
    if item["pid"]:
        return "not serving: loading, or waiting for another service"
    return f"down, restarts in {max(item['starts_again_at'] - time.time(), 0.0):.0f} s"


def all_healthy(state: dict[str, Any]) -> dict[str, bool]:
    """Returns whether each service in `up.json` serves; keys are service names."""
    if state["tls_dir"]:
        os.environ[credentials.TLS_VARIABLE] = state["tls_dir"]
    return asyncio.run(_health({name: item["address"] for name, item in state["services"].items()}))


async def _health(addresses: dict[str, str]) -> dict[str, bool]:
    async def ask(name: str, address: str) -> bool:
        async with ServiceClient(address, internal=name != "gateway") as client:
            return await client.is_serving()

    return dict(zip(addresses, await asyncio.gather(*map(ask, addresses, addresses.values())), strict=True))
