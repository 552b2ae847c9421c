"""An S3 server for tests: moto in its own process, with storage in memory."""

import os
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import fsspec
import pytest

from fovea.runtime.hosts import free_ports

_START_S = 60


@pytest.fixture(scope="session")
def new_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Creates buckets and returns their URLs. Processes that are started meanwhile reach them, too."""
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    access = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    log = tmp_path_factory.mktemp("s3") / "log"
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            _wait(endpoint, process, log)
            with mock.patch.dict(os.environ, access | {"AWS_DEFAULT_REGION": "us-east-1"}):
                yield _make
        finally:
            process.kill()


def _make() -> str:
    name = f"fovea-{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}"


def _wait(endpoint: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    give_up_at = time.monotonic() + _START_S
    while True:
        try:
            urllib.request.urlopen(endpoint, timeout=5).close()
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up_at, log.read_text()
        time.sleep(0.1)
