"""Finds the Fovea that `fovea up` runs on this machine, for the other commands, and holds what they share."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Console

from fovea.cli.supervisor import StateFolder

PUBLISHED_KEY = "tml-local"
DEFAULT_STATE_DIR = pathlib.Path(".fovea")
FAILED, MISUSED = 1, 2
"""Exit codes. MISUSED (2) means that the command line is wrong or cannot work in the current state of the machine."""
_DATABASE_VARIABLES = ("FOVEA_GATEWAY_STATE_DIR", "FOVEA_GATEWAY_DATABASE_URL")

ApiKey = Annotated[
    str,
    typer.Option(
        envvar="TINKER_API_KEY", help="API key; a key of scope admin reaches every owner. Prefer the variable."
    ),
]
StateDir = Annotated[pathlib.Path, typer.Option(help="Folder of this Fovea: database, checkpoints, logs, up.json.")]


def complain(message: str, code: int = FAILED) -> int:
    """Prints an error message to stderr and returns the exit code."""
    Console(stderr=True).print(message, soft_wrap=True, markup=False, highlight=False)
    return code


def running_folders() -> list[pathlib.Path]:
    """Returns the state folders of all Foveas that this user runs on this machine, sorted.

    They are found by their lock file, which each `fovea up` keeps open.
    """
    found: set[pathlib.Path] = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended or belongs to another user
            if process.stat().st_uid == os.getuid():
                found |= {path.parent for path in _open_files(process) if path.name == StateFolder.LOCK}
    return sorted(folder for folder in found if StateFolder(folder).holder() is not None)


def _open_files(process: pathlib.Path) -> list[pathlib.Path]:
    files: list[pathlib.Path] = []
    for descriptor in os.listdir(process / "fd"):
        with suppress(OSError):  # the file was closed in the meantime
            files.append(pathlib.Path(os.readlink(process / "fd" / descriptor)))
    return files


def folder_in_use(state_dir: pathlib.Path, find: Callable[[], list[pathlib.Path]] = running_folders) -> pathlib.Path:
    """Returns the folder that a command reads: the given one, or the running Fovea's if the default one is missing.

    Prints the folder if it is not the default one. If several Foveas run, the default folder is returned.
    """
    if state_dir != DEFAULT_STATE_DIR or state_dir.exists():
        return state_dir
    running = find()
    if len(running) != 1:
        return state_dir
    complain(f"--state-dir: {state_dir} does not exist here; using the running Fovea in {running[0]}")
    return running[0]


def others_run(state_dir: pathlib.Path) -> str:
    """Returns a hint that lists the state folders of other running Foveas; empty if there are none."""
    others = [str(folder) for folder in running_folders() if folder != state_dir.resolve()]
    return f"; running Foveas: --state-dir {' or '.join(others)}" if others else ""


def read_state(state_dir: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of `up.json`. Ends the command if no Fovea runs there or it is not ready yet."""
    state_file = state_dir / "up.json"
    pid = StateFolder(state_dir).holder()
    if pid is None:
        hint = others_run(state_dir) or "; start one with fovea up"
        raise typer.Exit(complain(f"--state-dir: no Fovea runs in {state_dir.resolve()}{hint}"))
    if not state_file.exists():
        raise typer.Exit(complain(f"the Fovea in {state_dir} (process {pid}) is not ready yet; see fovea logs"))
    state: dict[str, Any] = json.loads(state_file.read_text())
    return state


def name_database(find: Callable[[], list[pathlib.Path]] = running_folders) -> None:
    """Sets the running Fovea's folder as the default for commands that open the gateway's database.

    Does nothing if the environment names a database or the default folder contains one.
    """
    if any(os.environ.get(name) for name in _DATABASE_VARIABLES) or (DEFAULT_STATE_DIR / "gateway.db").exists():
        return
    running = find()
    if len(running) > 1:
        words = "several Foveas run; choose one: --state-dir " + " or ".join(map(str, running))
        raise typer.Exit(complain(words, MISUSED))
    if running:
        os.environ[_DATABASE_VARIABLES[0]] = str(running[0])


def make_first_key(state_dir: pathlib.Path) -> None:
    """Creates and prints an API key of scope admin, for a gateway on a public address that has no key yet."""
    options = ("--owner", "admin", "--scope", "admin", "--name", "of the first fovea up", "--state-dir", str(state_dir))
    made = subprocess.run([sys.executable, "-m", "fovea_gateway.access.keys_command", "create", *options], check=False)
    if made.returncode:
        raise typer.Exit(
            complain(
                "an API key is needed because other machines can reach this host, but none could be "
                "created; use --api-key"
            )
        )


def may_have_keys(state_dir: pathlib.Path) -> bool:
    """Returns whether the gateway may already have API keys; without one it refuses to start on a public address."""
    given = ("FOVEA_GATEWAY_API_KEY", "FOVEA_GATEWAY_API_KEY_FILE", _DATABASE_VARIABLES[1])
    return (state_dir / "gateway.db").exists() or any(name in os.environ for name in given)
