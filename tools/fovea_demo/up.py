"""Starts `fovea up` as a user would, waits until it is ready, and stops it."""

import json
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fovea


class NotReady(Exception):
    """`fovea up` ended or took too long; the message ends with the last lines of its log."""


@contextmanager
def running_fovea(
    state_dir: pathlib.Path, model: pathlib.Path | None, *arguments: str, timeout_s: float = 300.0
) -> Iterator[dict[str, Any]]:
    """Yields the contents of `up.json`: base_url, model_name, ready_s and the services' addresses.

    Without a model, `fovea up` uses its own tiny one. The log is written to `state_dir`/up.log. At the end of the
    block, the function sends Ctrl-C and waits until all processes have stopped.

    Raises NotReady, with the end of the log, if the services do not start.
    """
    fovea.bypass_proxies()  # the clients of this Fovea are in this process, or its children
    state_dir.mkdir(parents=True, exist_ok=True)
    state_file, log_file = state_dir / "up.json", state_dir / "up.log"
    state_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "fovea.cli.main", "up", "--state-dir", str(state_dir)]
    if model is not None:
        command += ["--model", str(model)]
    with log_file.open("w") as log, _unwound_by_sigterm():
        process = subprocess.Popen([*command, *arguments], stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield _wait(process, state_file, log_file, timeout_s)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait(90.0)


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the program as Ctrl-C does, so that its Fovea stops.

    Keeps a handler that the program has set.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _wait(
    process: subprocess.Popen[bytes], state_file: pathlib.Path, log_file: pathlib.Path, timeout_s: float
) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while not state_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log_file.read_text().splitlines()[-40:])
            how = f"ended with code {process.returncode}" if process.returncode is not None else "is not ready"
            raise NotReady(f"`fovea up` {how}; the end of {log_file}:\n{tail}")
        time.sleep(0.1)
    state: dict[str, Any] = json.loads(state_file.read_text())
    return state
