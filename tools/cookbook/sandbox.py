"""A local sandbox for the recipe `code_rl`: the one call of SandboxFusion's server that the cookbook makes.

A program runs in a folder of its own, with limits on time, memory and the size of files, and without a network if the
system allows that. It is for programs of a tiny model: it does not protect the machine from hostile ones.
"""

import base64
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_LIMITS = ["prlimit", "--cpu=60", f"--as={4 * 2**30}", f"--fsize={16 * 2**20}", "--core=0"]
_NO_NETWORK = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]
"""Its end also ends every process of the program, those in sessions of their own included."""


@contextmanager
def running() -> Iterator[str]:
    """Yields the URL at which programs can be run, for SANDBOX_URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/run_code"
        finally:
            server.shutdown()
            thread.join()


def execute(request: dict[str, Any]) -> dict[str, Any]:
    """Runs a program beside its files. Returns the answer that SandboxFusion would give."""
    with tempfile.TemporaryDirectory(prefix="fovea-sandbox-") as name:
        folder = Path(name)
        for file, content in request["files"].items():
            (folder / Path(file).name).write_bytes(base64.b64decode(content))
        (folder / "main.py").write_text(request["code"])
        process = subprocess.Popen(
            [*_LIMITS, *_isolation(), sys.executable, "main.py"],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=request["run_timeout"])
            code = process.returncode
        except subprocess.TimeoutExpired:
            said, code = b"", -1
        finally:
            _end(process)
    result = {"return_code": code, "stdout": said.decode(errors="replace")}
    return {"status": "Failed" if code else "Success", "run_result": result}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a program and its processes; without isolation not those in sessions of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None
    process.stdout.close()
    process.wait()


@functools.cache
def _isolation() -> list[str]:
    """Returns the command that runs a program without network; nothing where the system forbids it."""
    done = subprocess.run([*_NO_NETWORK, "true"], capture_output=True, check=False)
    return _NO_NETWORK if done.returncode == 0 else []


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Answers one program."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(execute(request)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        """Writes nothing."""
