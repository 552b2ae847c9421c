"""A real trainer: its launcher, its ranks and a client."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil

from fovea.client import TrainerClient
from fovea.runtime.hosts import free_ports

ROOT = Path(__file__).parents[3]
START_TIMEOUT_S = 120.0


class Launched(Protocol):
    """The methods of a launcher's `subprocess.Popen` that tests use."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class TrainerProcess:
    """`python -m fovea_trainer` on a free port."""

    def __init__(self, model_dir: Path, log: Path, *arguments: str, ranks: int = 2) -> None:
        (self.port,) = free_ports(1)
        self.address = f"127.0.0.1:{self.port}"
        self.log = log
        place = ["--model", str(model_dir), "--port", str(self.port)]
        most = () if "--ranks" in arguments else ("--ranks", str(ranks))
        recovery = () if "--recovery" in arguments else ("--recovery", str(log.parent / "recovery"))
        self.process = self._start([*place, *most, *checkpoints(log.parent.parent), *recovery, *arguments])

    def _start(self, arguments: list[str]) -> Launched:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "fovea_trainer", *arguments]
        with self.log.open("w") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    async def ready(self) -> TrainerClient:
        """Returns a client once the trainer serves."""
        return await until_serving(self.address, lambda: self.process.poll() is None, self.log.read_text)

    def rank_pids(self) -> list[int]:
        """Returns the process ids of the ranks, rank 0 first."""
        named = [(child.name().partition("trainer-rank"), child.pid) for child in self._children()]
        return [pid for _, pid in sorted((int(rank), pid) for (_, found, rank), pid in named if found)]

    def _children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def stop(self, timeout_s: float = 40.0) -> int:
        """Sends SIGTERM; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """Sends SIGKILL to the launcher, which ends its ranks."""
        self.process.kill()
        self.process.wait()


async def until_serving(address: str, lives: Callable[[], bool], said: Callable[[], str]) -> TrainerClient:
    """Returns a client of a trainer once it serves."""
    client = TrainerClient(address)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not await client.is_serving("fovea.api.v1.TrainerService"):
        if not lives() or time.monotonic() > deadline:
            raise AssertionError(f"the trainer did not start:\n{said()}")
        await asyncio.sleep(0.2)
    return client


def checkpoints(folder: Path) -> list[str]:
    """Checkpoint roots: the folder that all tests share, and any bucket."""
    return ["--checkpoints", str(folder), "--checkpoints", "s3://"]
