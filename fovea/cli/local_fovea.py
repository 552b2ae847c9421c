"""The Fovea that `fovea up` runs on this machine, as other commands find it, and what these have in common."""

import json
import pathlib
from typing import Annotated, Any

import typer
from rich.console import Console

from fovea.cli.supervisor import StateFolder

PUBLISHED_KEY = "tml-local"
DEFAULT_STATE_DIR = pathlib.Path(".fovea")
FAILED, MISUSED = 1, 2
"""Exit codes: 2 for a command that was called wrongly, or cannot work as things are here."""

ApiKey = Annotated[
    str, typer.Option(envvar="TINKER_API_KEY", help="Whose; of scope admin, everybody's. Prefer the variable.")
]
StateDir = Annotated[pathlib.Path, typer.Option(help="Database, checkpoints, logs and up.json of this Fovea.")]


def complain(message: str, code: int = FAILED) -> int:
    """Prints one line of what is wrong; returns the exit code to leave with."""
    Console(stderr=True).print(message, soft_wrap=True, markup=False, highlight=False)
    return code


def read_state(state_dir: pathlib.Path) -> dict[str, Any]:
    """The contents of `up.json`. Ends the command if nothing is up there, or not yet ready."""
    state_file = state_dir / "up.json"
    pid = StateFolder(state_dir).holder()
    if pid is None:
        raise typer.Exit(complain(f"--state-dir: no Fovea is up in {state_dir}; start one there (fovea up)"))
    if not state_file.exists():
        raise typer.Exit(complain(f"the Fovea of process {pid} in {state_dir} is not ready yet; fovea logs says why"))
    state: dict[str, Any] = json.loads(state_file.read_text())
    return state
