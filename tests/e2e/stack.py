"""A running Fovea for tests: the state that `fovea up` wrote, and clients that point at it."""

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
    """What `up.json` says.

    Attributes:
        state: Its contents.
        model: The model's directory.
        log: Everything that the services printed.
    """

    state: dict[str, Any]
    model: pathlib.Path
    log: pathlib.Path

    @property
    def base_url(self) -> str:
        """Of the REST shim."""
        return str(self.state["base_url"])

    @property
    def model_name(self) -> str:
        """To be used as `base_model`."""
        return str(self.state["model_name"])

    @property
    def secret(self) -> str:
        """What its services share."""
        return str(self.state["service_secret"])

    def address(self, service: str) -> str:
        """host:port of a service's gRPC server."""
        return str(self.state["services"][service]["address"])

    def processes(self, service: str) -> list[psutil.Process]:
        """A service's process and everything below it."""
        for child in psutil.Process(self.state["pid"]).children():
            with suppress(psutil.NoSuchProcess):  # killed a moment ago
                if {f"fovea_{service}"} & set(child.cmdline()):
                    return [child, *child.children(recursive=True)]
        return []

    def rank(self, number: int) -> psutil.Process | None:
        """A rank of the trainer that runs, or the launcher of all (-1)."""
        found = self.processes("trainer")
        if number < 0:
            return found[0] if found else None
        return next((one for one in found if one.name() == f"trainer-rank{number}"), None)

    def kill(self, victim: str) -> None:
        """Ends the gateway, a rank or the launcher (-1) as it is now, once it is there."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = self.processes("gateway")[:1] if victim == "gateway" else [self.rank(int(victim))]
            if found and found[0] is not None:
                found[0].kill()
                return
            time.sleep(0.1)
        raise AssertionError(f"{victim} did not come back")

    def service_client(self) -> tinker.ServiceClient:
        """The official SDK, pointed here; close it to free its models."""
        return tinker.ServiceClient(base_url=self.base_url, api_key=API_KEY)


@contextmanager
def running_stack(model: pathlib.Path, *arguments: str) -> Iterator[Stack]:
    """Starts `fovea up` on free ports with a fresh state folder; Ctrl-C ends it, and no process may be left."""
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
