"""The suite against a fresh Fovea with the tiny VLM: `python -m conformance.fresh [options of the suite]`."""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import tinyvlm
from demo.up import running_fovea

SESSION_TTL_S = 30.0
MODEL_NAME = "Qwen/Qwen3-VL-30B-A3B-Instruct"
"""The tiny model goes by a name of the cookbook's catalogue: its recipes ask that for a renderer."""
COOKBOOK_CHECKS = {"C117", "C118", "C119"}
"""Made only with --cookbook: they build client environments of their own."""


def main(arguments: list[str]) -> int:
    """Starts Fovea, runs the suite with everything that it can be told, and returns its exit code."""
    # Sessions end sooner than by default, so that the check of silence does not take ten minutes.
    os.environ["FOVEA_GATEWAY_SESSION_TTL_S"] = str(SESSION_TTL_S)
    model = tinyvlm.ensure("qwen3_vl")
    up = ("--model-name", MODEL_NAME, "--port", "0", "--grpc-port", "0")
    with (
        tempfile.TemporaryDirectory(prefix="fovea-conformance-") as folder,
        running_fovea(Path(folder), model, *up) as state,
    ):
        restart = [sys.executable, "-m", "fovea.cli.main", "restart", "gateway", "--state-dir", folder]
        told = ["--base-url", state["base_url"], "--model", MODEL_NAME, "--vlm", "--checkpoint", str(model)]
        told += ["--session-ttl-s", str(SESSION_TTL_S), "--restart-command", shlex.join(restart)]
        suite = [sys.executable, "-m", "conformance", *told, *arguments]
        return subprocess.run(suite, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
