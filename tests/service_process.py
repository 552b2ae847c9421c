"""A Fovea service in its own process, for tests that need more services than `fovea up` starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from fovea.client.channel import ServiceClient
from tests.processes import survivors

_QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
_MODULES = {
    "GatewayService": "fovea_gateway",
    "RendererService": "fovea_renderer",
    "SamplerService": "fovea_sampler",
    "TrainerService": "fovea_trainer",
}
_START_S = 300.0


@dataclass(frozen=True)
class ServiceProcess:
    """A started service.

    Attributes:
        service: Its gRPC service, such as SamplerService.
        address: host:port of its gRPC server.
        log: Its output.
    """

    popen: subprocess.Popen[bytes]
    service: str
    address: str
    log: Path

    def wait_serving(self) -> None:
        """Waits for its health check. Raises AssertionError with the end of its log if it exits or
        exceeds the limit.
        """
        deadline = time.monotonic() + _START_S
        while not asyncio.run(self._is_serving()):
            assert self.popen.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def tree(self) -> list[psutil.Process]:
        """Returns its process and descendants, such as an engine."""
        own = psutil.Process(self.popen.pid)
        return [own, *own.children(recursive=True)]

    def kill(self) -> None:
        """Kills it and its children with SIGKILL."""
        for process in reversed(self.tree()):
            process.kill()

    async def _is_serving(self) -> bool:
        async with ServiceClient(self.address) as client:
            return await client.is_serving(f"fovea.api.v1.{self.service}")


@contextmanager
def service_process(
    log: Path, service: str, address: str, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[ServiceProcess]:
    """Starts `service` with `arguments`, which make it listen at `address`. Ends it; no process may remain."""
    command = [sys.executable, "-m", _MODULES[service], *arguments]
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | _QUIET | dict(environment)
        )
    process = ServiceProcess(popen, service, address, log)
    try:
        yield process
    finally:
        everything = process.tree() if popen.poll() is None else []
        popen.terminate()
        popen.wait(90.0)
        assert survivors(everything, 30.0) == []
