"""Entry point of `python -m fovea_doctor`, which `fovea doctor` runs."""

import argparse
import importlib.util
import io
import json
import os
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from fovea.cli.state_folder import DEFAULT_STATE_DIR, folder_in_use
from fovea.runtime.credentials import redactor_of
from fovea_doctor import collection
from fovea_doctor.findings import Finding, findings


def main() -> None:
    """Writes the archive and prints a summary. Exits with status 1 if something is wrong."""
    options = _parser().parse_args()
    state_dir = folder_in_use(options.state_dir)
    files, found = examine(state_dir)
    output = options.output or Path(f"fovea-doctor-{collection.stamp()}.tar.gz")
    try:
        write_archive(output, files)
    except OSError as error:
        print(f"fovea doctor: --output {output} cannot be written: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    print(files["summary.txt"], end="")
    size = output.stat().st_size
    print(f"\n{output} ({size} bytes) has these facts and the log without keys, tokens and passwords.")
    print("The log may contain prompts and names: look through it before you send it.")
    raise SystemExit(1 if found else 0)


def examine(state_dir: Path) -> tuple[dict[str, str], list[Finding]]:
    """Returns the text of each file of the archive, and the findings. No file contains a secret."""
    state = collection.read_up(state_dir)
    redactor = redactor_of(state)
    lines = collection.log_lines(state_dir)
    facts: dict[str, Any] = {
        "versions": collection.versions(),
        "hardware": collection.hardware(state_dir),
        "settings": collection.settings(state),
        "services": collection.services(state),
        "database": collection.database(state_dir),
        "errors": collection.errors(lines),
    }
    facts = redactor.value(facts)
    found = list(findings(facts, _revision()))
    files = {f"{name}.json": json.dumps(fact, indent=2) + "\n" for name, fact in facts.items()}
    files["log.txt"] = redactor.text("\n".join(lines) + "\n")
    files["summary.txt"] = redactor.text(_summary(facts, found, state_dir))
    return files, found


def write_archive(output: Path, files: dict[str, str]) -> None:
    """Writes the files as one archive that only its user can read."""
    target = os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
    with target, tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, text in sorted(files.items()):
            data = text.encode(errors="replace")
            member = tarfile.TarInfo(f"fovea-doctor/{name}")
            member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(data))


def _revision() -> str | None:
    if importlib.util.find_spec("sqlalchemy") is None:
        return None
    from fovea_gateway.database.schema import REVISION

    return REVISION


def _summary(facts: dict[str, Any], found: list[Finding], state_dir: Path) -> str:
    hardware, versions = facts["hardware"], facts["versions"]
    memory, gpus = hardware["memory_bytes"].get("MemTotal", 0), len(hardware["gpus"])
    lines = [
        f"Fovea {versions['fovea']}, Python {versions['python']}, {versions['system']}",
        f"{hardware['processors']} processors, {memory / 2**30:.0f} GiB of memory, {gpus} GPUs, "
        f"{hardware['disk_bytes']['free'] / 1e9:.0f} GB free at {state_dir}",
    ]
    if database := facts["database"]:
        size = sum(database["bytes"].values())
        lines.append(f"database: {size / 1e6:.1f} MB, revision {database.get('revision', '?')}")
    lines.append(f"services: {_health(facts['services'])}")
    lines.append("")
    lines += [f"* {one.problem}\n  -> {one.fix}" for one in found] or ["Nothing is wrong as far as this can see."]
    return "\n".join(lines) + "\n"


def _health(report: dict[str, Any]) -> str:
    told = [f"{name} {'serves' if item['serves'] else 'DOWN'}" for name, item in report.get("services", {}).items()]
    return ", ".join(told) or "none run"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fovea doctor",
        description="Collect what support needs into one archive, without keys, tokens and passwords: versions, "
        "settings, hardware, disk, the health of the services, the size of the database, the log's newest lines and "
        "errors. Prints what is wrong and how to fix it; the exit code is then 1.",
    )
    parser.add_argument(
        "--state-dir", type=Path, default=DEFAULT_STATE_DIR, help="folder of this Fovea; default: .fovea"
    )
    parser.add_argument("--output", type=Path, help="the archive; default: fovea-doctor-TIME.tar.gz")
    return parser


if __name__ == "__main__":
    main()
