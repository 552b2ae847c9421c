"""A second sampler and a gateway over both, beside a running Fovea."""

from __future__ import annotations

import asyncio
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil

from fovea.cli.ports import free_ports
from fovea.client.channel import ServiceClient
from tests.e2e.stack import API_KEY, Stack
from tests.processes import survivors

_QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class TwoSamplers:
    """What can be reached, and who can be killed.

    Attributes:
        base_url: Of the gateway over both samplers.
        metrics: Of the second sampler.
    """

    base_url: str
    metrics: str
    second: subprocess.Popen[bytes]

    def kill_second(self) -> None:
        """SIGKILL, its engine too."""
        for process in [*psutil.Process(self.second.pid).children(recursive=True), psutil.Process(self.second.pid)]:
            process.kill()


@contextmanager
def running_beside(stack: Stack, folder: pathlib.Path) -> Iterator[TwoSamplers]:
    """Starts both on free ports, and stops them."""
    sampler, gateway, rest, *metrics = free_ports(5)
    to = "127.0.0.1:"
    renderer = ("--renderer", stack.address("renderer"))
    with ExitStack() as exit_stack:
        second = exit_stack.enter_context(
            _service(
                folder, "services.sampler", "SamplerService", sampler, "--port", str(sampler),
                "--metrics-port", str(metrics[0]), "--model", str(stack.model), *renderer,
            )
        )  # fmt: skip
        exit_stack.enter_context(
            _service(
                folder, "gateway", "GatewayService", gateway, "--grpc-port", str(gateway), "--port", str(rest),
                "--metrics-port", str(metrics[1]), "--model", str(stack.model), "--model-name", stack.model_name,
                "--trainer", stack.address("trainer"), "--sampler", stack.address("sampler"),
                "--sampler", f"{to}{sampler}", "--state-dir", str(folder), "--api-key", API_KEY, *renderer,
            )
        )  # fmt: skip
        yield TwoSamplers(f"http://{to}{rest}", f"http://{to}{metrics[0]}/metrics", second)


@contextmanager
def _service(
    folder: pathlib.Path, module: str, service: str, port: int, *arguments: str
) -> Iterator[subprocess.Popen[bytes]]:
    log = folder / f"{module}.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | _QUIET)
    everything = [psutil.Process(process.pid)]
    try:
        deadline = time.monotonic() + 240
        while not asyncio.run(_is_serving(f"127.0.0.1:{port}", f"fovea.api.v1.{service}")):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        everything += everything[0].children(recursive=True)
        yield process
    finally:
        process.terminate()
        process.wait(90.0)
        assert survivors(everything, 30.0) == []


async def _is_serving(address: str, service: str) -> bool:
    async with ServiceClient(address) as client:
        return await client.is_serving(service)
