"""The unmodified deploy/compose.yaml, run by podman-compose from existing images."""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.images.build import images
from deploy.images.engine import compose, exists, missing, podman
from fovea.runtime.hosts import free_ports
from tests.other_logs import logs_with_failures

_FOLDER = Path(__file__).parent
_PROJECT = "fovea-images-test"
_LOADED_MACHINE_S = 1800


@dataclass(frozen=True)
class Running:
    """The services of deploy/compose.yaml.

    Attributes:
        variables: The environment of compose.
        rest, grpc: The gateway's addresses on this machine, 127.0.0.1:port.
    """

    variables: dict[str, str]
    rest: str
    grpc: str

    def container(self, service: str) -> str:
        """Returns the name of a service's container."""
        return f"{_PROJECT}_{service}_1"

    def logs(self) -> str:
        """Returns the logs of all services."""
        return compose(_PROJECT, self.variables, "logs").stdout

    def models(self) -> Path:
        """The volume with the tiny model."""
        return Path(podman("volume", "inspect", "--format={{.Mountpoint}}", f"{_PROJECT}_models").stdout.strip())

    def wait(self) -> None:
        """Waits until the gateway's health check says that every service has answered.

        Raises:
            TimeoutError: A service has not answered.
        """
        deadline = time.monotonic() + _LOADED_MACHINE_S / 2
        while time.monotonic() < deadline:
            with grpc.insecure_channel(self.grpc) as channel, contextlib.suppress(grpc.RpcError):
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(2)
        raise TimeoutError("a service has not answered the gateway")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raises pytest's time limit, because compose has its own."""
    for item in items:
        if _FOLDER in item.path.parents:
            item.add_marker(pytest.mark.timeout(_LOADED_MACHINE_S))


@pytest.fixture(scope="package")
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    """All services, ready; their volumes are removed afterwards."""
    if reason := missing():
        pytest.skip(f"no images: {reason}")
    if absent := [image for image in images() if not exists(image)]:
        pytest.skip(f"{', '.join(absent)} not built: python -m deploy.images build")
    rest, grpc_port = free_ports(2)
    key = f"tml-{secrets.token_hex(32)}"
    variables = {"FOVEA_PORT": str(rest), "FOVEA_GRPC_PORT": str(grpc_port), "TINKER_API_KEY": key}
    variables |= {"FOVEA_SERVICE_SECRET": secrets.token_hex(32)}
    running = Running(variables, f"127.0.0.1:{rest}", f"127.0.0.1:{grpc_port}")
    try:
        compose(_PROJECT, variables, "up", "--detach", "--no-build")
        with logs_with_failures(request.session, "containers", running.logs):
            running.wait()
            yield running
    finally:
        compose(_PROJECT, variables, "down", "--volumes")


def client(running: Running, example: str) -> str:
    """Runs an example of the README with the model's volume mounted for its tokenizer; returns its output."""
    root, place = _FOLDER.parents[1], Path("/models")
    is_ours = not place.exists()
    mounted = f'mount --bind {running.models()} {place} && exec "$@"'
    variables = {
        "TINKER_BASE_URL": f"http://{running.rest}",
        "TINKER_API_KEY": running.variables["TINKER_API_KEY"],
        "TINKER_TELEMETRY": "0",
        "FOVEA_GRPC": running.grpc,
    }
    command = ["unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, str(root / "examples" / example)]
    place.mkdir(exist_ok=True)
    try:
        done = subprocess.run(
            command, cwd=root, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=900
        )
    finally:
        if is_ours:
            place.rmdir()
    assert done.returncode == 0, done.stderr
    return done.stdout
