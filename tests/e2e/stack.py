"""A running Fovea for tests: the state that `fovea up` wrote, and clients that point at it."""

import os
import pathlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import tinker

from demo.up import running_fovea
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
