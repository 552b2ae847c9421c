"""A sampler in its own process, started with the public command."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.sampler.copies import Copy, copied

_START_S = 180
_LISTENING = re.compile(r"listening on (\S+?), metrics on (\S+)")


@dataclass
class SamplerProcess:
    """A running sampler."""

    process: subprocess.Popen[str] | Copy
    log: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        """host:port of its gRPC server."""
        return self._listening()[1]

    @property
    def metrics_address(self) -> str:
        """host:port of its metrics."""
        return self._listening()[2]

    def metrics_page(self) -> str:
        """All its metrics as text."""
        page: bytes = urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=10).read()
        return page.decode()

    def metric(self, name: str) -> float:
        """Returns the sum of a metric over all its labels."""
        rows = [line for line in self.metrics_page().splitlines() if re.match(rf"{re.escape(name)}(\{{| )", line)]
        assert rows, f"no metric {name}"
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows)

    def engine_pids(self) -> list[int]:
        """Returns the processes that the sampler has started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    def serving(self) -> bool:
        """Returns whether the health check says SERVING."""
        with grpc.insecure_channel(self.address) as channel:
            request = health_pb2.HealthCheckRequest(service="fovea.api.v1.SamplerService")
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_for_line(self, pattern: str, timeout_s: float = _START_S) -> str:
        """Waits for a line of the log."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in self.log:
                if re.search(pattern, line):
                    return line
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} in the sampler's log:\n" + "".join(self.log[-60:]))

    def _listening(self) -> re.Match[str]:
        match = _LISTENING.search(self.wait_for_line("listening on"))
        assert match
        return match


@contextlib.contextmanager
def running_sampler(model: Path, *arguments: str, is_copy: bool = False) -> Iterator[SamplerProcess]:
    """Runs a sampler that serves; SIGTERM must end it.

    Args:
        is_copy: Forks it from a process that has imported vLLM; see `copies`.
    """
    options = ["--model", str(model), "--metrics-port", "0", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    reading, writing = os.pipe()
    if is_copy:
        process: subprocess.Popen[str] | Copy = copied(options, environment, writing)
    else:
        command = [sys.executable, "-m", "fovea_sampler", *options]
        process = subprocess.Popen(command, stderr=writing, text=True, env=environment)
    os.close(writing)
    sampler = SamplerProcess(process)

    def read() -> None:
        with open(reading, encoding="utf-8", errors="replace") as errors:
            sampler.log.extend(errors)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        sampler.wait_for_line("ready .* after the start")
        yield sampler
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            reader.join(10)
