"""The Fovea that `fovea up` runs on this machine, as other commands find it, and what these have in common."""

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
"""Exit codes: 2 for a command that was called wrongly, or cannot work as things are here."""
_DATABASE_VARIABLES = ("FOVEA_GATEWAY_STATE_DIR", "FOVEA_GATEWAY_DATABASE_URL")

ApiKey = Annotated[
    str, typer.Option(envvar="TINKER_API_KEY", help="Whose; of scope admin, everybody's. Prefer the variable.")
]
StateDir = Annotated[pathlib.Path, typer.Option(help="Database, checkpoints, logs and up.json of this Fovea.")]


def complain(message: str, code: int = FAILED) -> int:
    """Prints one line of what is wrong; returns the exit code to leave with."""
    Console(stderr=True).print(message, soft_wrap=True, markup=False, highlight=False)
    return code


def running_folders() -> list[pathlib.Path]:
    """State folders of the Foveas that this user runs on this machine, sorted: each `up` holds its lock file open."""
    found: set[pathlib.Path] = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if process.stat().st_uid == os.getuid():
                found |= {path.parent for path in _open_files(process) if path.name == StateFolder.LOCK}
    return sorted(folder for folder in found if StateFolder(folder).holder() is not None)


def _open_files(process: pathlib.Path) -> list[pathlib.Path]:
    files: list[pathlib.Path] = []
    for descriptor in os.listdir(process / "fd"):
        with suppress(OSError):  # closed meanwhile
            files.append(pathlib.Path(os.readlink(process / "fd" / descriptor)))
    return files


def folder_in_use(state_dir: pathlib.Path, find: Callable[[], list[pathlib.Path]] = running_folders) -> pathlib.Path:
    """The folder that a command reads: the one given or, where the default one is not there, the running Fovea's.

    It prints which other folder it takes. If several Foveas run, it takes none of them.
    """
    if state_dir != DEFAULT_STATE_DIR or state_dir.exists():
        return state_dir
    running = find()
    if len(running) != 1:
        return state_dir
    complain(f"--state-dir: the Fovea of {running[0]}, for there is no {state_dir} here")
    return running[0]


def others_run(state_dir: pathlib.Path) -> str:
    """A hint for an error that names the state folders of other running Foveas; empty if there are none."""
    others = [str(folder) for folder in running_folders() if folder != state_dir.resolve()]
    return f"; those that run: --state-dir {' or '.join(others)}" if others else ""


def read_state(state_dir: pathlib.Path) -> dict[str, Any]:
    """The contents of `up.json`. Ends the command if nothing is up there, or not yet ready."""
    state_file = state_dir / "up.json"
    pid = StateFolder(state_dir).holder()
    if pid is None:
        hint = others_run(state_dir) or "; start one there (fovea up)"
        raise typer.Exit(complain(f"--state-dir: no Fovea is up in {state_dir.resolve()}{hint}"))
    if not state_file.exists():
        raise typer.Exit(complain(f"the Fovea of process {pid} in {state_dir} is not ready yet; fovea logs says why"))
    state: dict[str, Any] = json.loads(state_file.read_text())
    return state


def name_database(find: Callable[[], list[pathlib.Path]] = running_folders) -> None:
    """Names the running Fovea's folder to a command on the gateway's database, unless one is named or is here."""
    if any(os.environ.get(name) for name in _DATABASE_VARIABLES) or (DEFAULT_STATE_DIR / "gateway.db").exists():
        return
    running = find()
    if len(running) > 1:
        words = "several Foveas run; name one: --state-dir " + " or ".join(map(str, running))
        raise typer.Exit(complain(words, MISUSED))
    if running:
        os.environ[_DATABASE_VARIABLES[0]] = str(running[0])


def make_first_key(state_dir: pathlib.Path) -> None:
    """Makes a key that allows everything, and shows it: other machines reach the gateway, and no key exists."""
    options = ("--owner", "admin", "--scope", "admin", "--name", "of the first fovea up", "--state-dir", str(state_dir))
    made = subprocess.run([sys.executable, "-m", "fovea_gateway.access.keys_command", "create", *options], check=False)
    if made.returncode:
        raise typer.Exit(complain("no API key could be made, and other machines reach this host: give one"))


def may_have_keys(state_dir: pathlib.Path) -> bool:
    """Returns whether the gateway may have keys already; without a key, it ends as it starts."""
    given = ("FOVEA_GATEWAY_API_KEY", "FOVEA_GATEWAY_API_KEY_FILE", _DATABASE_VARIABLES[1])
    return (state_dir / "gateway.db").exists() or any(name in os.environ for name in given)
