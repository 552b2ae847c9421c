"""A running Fovea for tests: the state file of `fovea up`, and clients of its services."""

import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import tinker

from fovea_demo.up import running_fovea
from tests.processes import is_gone, survivors

API_KEY = "tml-local"


@dataclass(frozen=True)
class Stack:
    """The contents of `up.json`.

    Attributes:
        state: The parsed file.
        model: The model's directory.
        log: The output of all services.
    """

    state: dict[str, Any]
    model: pathlib.Path
    log: pathlib.Path

    @property
    def base_url(self) -> str:
        """Base URL of the REST API."""
        return str(self.state["base_url"])

    @property
    def model_name(self) -> str:
        """The value for `base_model`."""
        return str(self.state["model_name"])

    @property
    def secret(self) -> str:
        """The secret that its services share."""
        return str(self.state["service_secret"])

    def address(self, service: str) -> str:
        """host:port of a service's gRPC server."""
        return str(self.state["services"][service]["address"])

    def processes(self, service: str) -> list[psutil.Process]:
        """Returns a service's process and its descendants."""
        for child in psutil.Process(self.state["pid"]).children():
            with suppress(psutil.NoSuchProcess):  # killed a moment ago
                if {f"fovea_{service}"} & set(child.cmdline()):
                    return [child, *child.children(recursive=True)]
        return []

    def rank(self, number: int) -> psutil.Process | None:
        """Returns the process of a running rank of the trainer, or the launcher (-1)."""
        found = self.processes("trainer")
        if number < 0:
            return found[0] if found else None
        return next((one for one in found if one.name() == f"trainer-rank{number}"), None)

    def kill(self, victim: str) -> None:
        """Kills the gateway, a rank or the launcher (-1), once it is running."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = self.processes("gateway")[:1] if victim == "gateway" else [self.rank(int(victim))]
            if found and found[0] is not None:
                found[0].kill()
                return
            time.sleep(0.1)
        raise AssertionError(f"{victim} did not come back")

    def service_client(self) -> tinker.ServiceClient:
        """Creates a client of the official SDK; close it to free its models."""
        return tinker.ServiceClient(base_url=self.base_url, api_key=API_KEY)


@contextmanager
def running_stack(model: pathlib.Path, *arguments: str) -> Iterator[Stack]:
    """Starts `fovea up` on free ports with a fresh state folder. Ctrl-C ends it, and no process may remain."""
    os.environ["TINKER_TELEMETRY"] = "0"
    with tempfile.TemporaryDirectory(prefix="fovea-e2e-") as folder:
        path = pathlib.Path(folder)
        with running_fovea(path, model, "--port", "0", "--grpc-port", "0", *arguments) as state:
            supervisor, log = psutil.Process(state["pid"]), path / "up.log"
            yield Stack(state, model, log)
            is_killed = is_gone(supervisor)
            processes = [] if is_killed else [supervisor, *supervisor.children(recursive=True)]
        assert [process.cmdline() for process in survivors(processes, 60)] == []
        assert is_killed or "all services have stopped" in log.read_text()
