"""Runs the suite on a new Fovea with the tiny VLM: `python -m fovea_conformance.fresh [options of the suite]`."""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import fovea_tinyvlm
from fovea_demo.up import running_fovea

SESSION_TTL_S = 30.0
ENVIRONMENT = {"FOVEA_GATEWAY_SESSION_TTL_S": str(SESSION_TTL_S), "FOVEA_TRAINER_RECOVERY": ""}
"""Sessions without heartbeats end sooner than by default. With recovery they are parked, which C8 does not expect."""
MODEL_NAME = "Qwen/Qwen3-VL-30B-A3B-Instruct"
"""Name of the tiny model. It is in the cookbook's catalogue, in which the recipes look up a renderer."""
COOKBOOK_CHECKS = {"C117", "C118", "C119"}
"""Checks that run only with --cookbook, because they build their own client environments."""


@contextmanager
def fresh_fovea(folder: Path, *options: str) -> Iterator[dict[str, Any]]:
    """Runs a new Fovea server, and yields its `up.json`. Its gateway reads `ENVIRONMENT` from this process.

    Args:
        folder: State folder of the server.
        options: Further options of `fovea up`.
    """
    up = ("--model-name", MODEL_NAME, "--port", "0", "--grpc-port", "0")
    with running_fovea(folder, fovea_tinyvlm.ensure("qwen3_vl"), *up, *options) as state:
        yield state


def suite_command(state: dict[str, Any], folder: Path) -> list[str]:
    """Returns the command of the suite, with all options for a `fresh_fovea`."""
    restart = [sys.executable, "-m", "fovea.cli.main", "restart", "gateway", "--state-dir", str(folder)]
    return [
        *(sys.executable, "-m", "fovea_conformance", "--base-url", state["base_url"], "--model", MODEL_NAME, "--vlm"),
        *("--checkpoint", str(fovea_tinyvlm.ensure("qwen3_vl")), "--session-ttl-s", str(SESSION_TTL_S)),
        *("--restart-command", shlex.join(restart), "--admin-key", admin_key(folder)),
    ]


@cache
def admin_key(folder: Path) -> str:
    """Creates a key of scope admin in the state folder of a server, and returns it."""
    command = [sys.executable, "-m", "fovea.cli.main", "keys", "create", "--owner", "auditor", "--scope", "admin"]
    made = subprocess.run([*command, "--state-dir", str(folder)], check=True, capture_output=True, text=True)
    return made.stdout.strip()


def main(arguments: list[str]) -> int:
    """Starts Fovea with a second base model, and runs the suite; returns its exit code."""
    os.environ |= ENVIRONMENT
    teacher = ("--also-sample", f"teacher={fovea_tinyvlm.ensure('qwen3')}")
    with (
        tempfile.TemporaryDirectory(prefix="fovea-conformance-") as folder,
        fresh_fovea(Path(folder), *teacher) as state,
    ):
        return subprocess.run([*suite_command(state, Path(folder)), *arguments], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
