"""Uploads to the hub, against a local server with the hub's API."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fovea.runtime.hosts import free_ports
from fovea.wire.errors import InvalidInput, NotFound
from fovea_data.hub_upload import push_to_hub

TOKEN = "hf_right"
PUSH = """
import sys
from fovea.wire.errors import FoveaError
from fovea_data import push_to_hub
try:
    print(push_to_hub(sys.argv[1], "somebody/birds", private=False))
except FoveaError as error:
    print(type(error).__name__, error.message)
"""


class Hub(ThreadingHTTPServer):
    """Accepts files in commits, but no large files.

    Attributes:
        made: Repositories, and whether each is private.
        files: Committed files by path.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.made: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer(200, {"sha": "0" * 40, "id": "somebody/birds", "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials"})
        elif self.path.endswith("/repos/create"):
            asked = json.loads(body)
            self.server.made[f"{asked['organization']}/{asked['name']}"] = bool(asked.get("private"))
            self._answer(200, {"url": f"{self.server.url}/somebody/birds"})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            answered = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]
            self._answer(200, {"files": answered})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                value = json.loads(line)["value"]
                if "path" in value:
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
            self._answer(200, {"commitUrl": f"{self.server.url}/somebody/birds/commit/1", "commitOid": "1"})
        else:  # checks of the card's header
            self._answer(200, {"errors": [], "warnings": []})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(range(256)))
    return tmp_path


def push(folder: Path, endpoint: str, token: str) -> str:
    """Pushes in a separate process, because the hub's address is read when its library is imported."""
    settings = {"HF_ENDPOINT": endpoint, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    settings |= {"HF_HOME": str(folder / ".cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", PUSH, str(folder)]
    ran = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_a_folder_is_pushed_whole(hub: Hub, folder: Path) -> None:
    assert push(folder, hub.url, TOKEN).endswith("/somebody/birds/commit/1")
    assert hub.made == {"somebody/birds": False}
    assert hub.files["adapter_model.safetensors"] == bytes(range(256))
    assert set(hub.files) >= {"adapter_config.json", "adapter_model.safetensors"}


def test_a_token_that_may_not_is_told_how_to_log_in(hub: Hub, folder: Path) -> None:
    said = push(folder, hub.url, "hf_wrong")
    assert said.startswith("PermissionDenied the hub denies writing to somebody/birds: log in with `hf auth")
    assert hub.files == {}


def test_without_a_network_the_export_is_named(folder: Path) -> None:
    (port,) = free_ports(1)
    said = push(folder, f"http://127.0.0.1:{port}", TOKEN)
    assert said.startswith(f"Unavailable the hub at http://127.0.0.1:{port} cannot be reached")
    assert f"`hf upload somebody/birds {folder}` uploads it later" in said


def test_what_is_no_model_and_what_is_no_name_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InvalidInput, match="write OWNER/NAME"):
        push_to_hub(folder, "birds")
    with pytest.raises(NotFound, match="has no model"):
        push_to_hub(tmp_path / "nothing", "somebody/birds")
