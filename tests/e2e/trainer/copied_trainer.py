"""A real trainer that is forked from a process with its imports, which saves six seconds of processor time.

`fovea up` in other folders starts trainers as programs. Here `TrainerProcess` does, for tests that change the modules
that Python finds or loads.
"""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from fovea.runtime.processes import die_with_parent
from fovea_trainer.settings import TrainerSettings
from tests.e2e.trainer.trainer_process import TrainerProcess
from tests.ranks import PRELOADED


class Copy:
    """A process with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    def poll(self) -> int | None:
        """Returns the exit status, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; returns the exit status."""
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(f"trainer {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM, unless the process has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)


class CopiedTrainer(TrainerProcess):
    """A trainer on a free port, with the arguments of `python -m fovea_trainer`."""

    def _start(self, arguments: list[str]) -> Copy:
        multiprocessing.set_forkserver_preload(PRELOADED)
        self.log.write_text("")
        process = multiprocessing.get_context("forkserver").Process(
            target=_be_launcher, args=(arguments, dict(os.environ), self.log), daemon=True
        )
        process.start()
        return Copy(process)


def _be_launcher(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """Runs the program `python -m fovea_trainer` in this copy of the process."""
    from fovea_trainer.__main__ import main

    gc.freeze()
    die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["fovea_trainer", *arguments]
    # The launcher sets the number of OpenMP threads, which started earlier here.
    torch.set_num_threads(TrainerSettings.from_command_line("trainer").threads)
    # multiprocessing forbids children of daemons. This one ends with its test's process, and its children with it.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    main()
