"""The local sandbox answers the cookbook's client as SandboxFusion does."""

import base64
import json
import socket
import urllib.request
from typing import Any

import pytest

from cookbook import sandbox


def answer(code: str, timeout_s: int = 20, **files: str) -> dict[str, Any]:
    encoded = {f"{name}.py": base64.b64encode(text.encode()).decode() for name, text in files.items()}
    body = {"code": code, "language": "python", "run_timeout": timeout_s, "files": encoded}
    with sandbox.running() as url:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            found: dict[str, Any] = json.load(response)
            return found


def test_a_program_imports_its_files_and_its_end_is_the_status() -> None:
    good = answer("from solution import number\nprint(number)", solution="number = 3")
    assert (good["status"], good["run_result"]["stdout"]) == ("Success", "3\n")
    assert answer("import sys; sys.exit(1)")["status"] == "Failed"
    assert "MemoryError" in answer("bytearray(2**33)")["run_result"]["stdout"]


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])",
        "import subprocess; subprocess.run(['setsid', 'sleep', '60'])",
    ],
)
def test_a_program_that_does_not_end_is_ended(code: str) -> None:
    assert answer(code, timeout_s=1)["status"] == "Failed"


def test_a_program_has_no_network_where_the_system_can_take_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = answer(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5).close()")
    assert told["status"] == ("Failed" if sandbox._isolation() else "Success")
