"""Requests to this machine never use a proxy of the environment; those to other hosts do."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

CHANNELS = """
import asyncio, sys
from grpc_health.v1 import health_pb2, health_pb2_grpc
from fovea.client.channel import OPTIONS, ServiceClient, open_blocking_channel, open_channel
async def ask(address):
    check = health_pb2.HealthCheckRequest()
    channel = open_channel(address, OPTIONS)
    print((await health_pb2_grpc.HealthStub(channel).Check(check, timeout=10)).status)
    await channel.close()
    for internal in (True, False):
        async with ServiceClient(address, internal=internal) as client:
            print(int(await client.is_serving(timeout_s=10.0)))
asyncio.run(ask(sys.argv[1]))
with open_blocking_channel(sys.argv[1]) as blocking:
    print(health_pb2_grpc.HealthStub(blocking).Check(health_pb2.HealthCheckRequest(), timeout=10).status)
"""
SDK = """
import sys
from fovea_data.connection import Server
print(Server(sys.argv[1], "tml-key").model(None).model_name)
"""
CHILD = """
import subprocess, sys
import fovea
program = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).status)"
print(subprocess.run([sys.executable, "-c", program, sys.argv[1]], capture_output=True, text=True).stdout.strip())
"""
ELSEWHERE = """
import asyncio, urllib.error, urllib.request
from fovea.client.channel import ServiceClient
async def ask():
    async with ServiceClient("service.invalid:4000") as client:
        await client.is_serving(timeout_s=10.0)
asyncio.run(ask())
try:
    urllib.request.urlopen("http://service.invalid:4001/", timeout=10)
except OSError:
    pass
"""


class CountingProxy:
    """Listens at the proxy's address; records the first line of each connection and refuses it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(1000).decode(errors="replace").partition("\r\n")[0])
                connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")


class Answers(BaseHTTPRequestHandler):
    """The two answers of a gateway that these commands need."""

    def do_GET(self) -> None:
        models = [{"model_name": "here", "trainable": True}]
        body = json.dumps({"checkpoints": [], "supported_models": models}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def proxy() -> Iterator[CountingProxy]:
    made = CountingProxy()
    yield made
    made.close()


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0)


def run(proxy: CountingProxy, *arguments: str, no_proxy: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs Python in an environment that names the proxy for every scheme."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
        environment |= {name: proxy.url, name.upper(): proxy.url}
    if no_proxy:
        environment["no_proxy"] = no_proxy
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("no_proxy", ["", "intranet.invalid", "*"])
def test_channels_to_this_machine_take_no_proxy(proxy: CountingProxy, address: str, no_proxy: str) -> None:
    """A lone * exempts every host for HTTP clients, but gRPC does not support it."""
    for place in (address, address.replace("127.0.0.1", "localhost")):
        ran = run(proxy, "-c", CHANNELS, place, no_proxy=no_proxy)
        assert ran.stdout.split() == ["1"] * 4, ran.stderr
    assert proxy.asked == []


@pytest.mark.slow
def test_commands_and_the_sdk_take_no_proxy_to_this_machine(proxy: CountingProxy, url: str) -> None:
    listed = run(proxy, "-m", "fovea.cli.main", "checkpoints", "list", "--base-url", url)
    assert (listed.returncode, listed.stderr.strip()[:14]) == (0, "no checkpoints"), listed.stderr
    asked = run(proxy, "-c", SDK, url)
    assert asked.stdout.split() == ["here"], asked.stderr
    assert proxy.asked == []


def test_child_processes_inherit_it(proxy: CountingProxy, url: str) -> None:
    assert run(proxy, "-c", CHILD, url).stdout.split() == ["200"]
    assert proxy.asked == []


def test_another_host_is_still_asked_through_the_proxy(proxy: CountingProxy) -> None:
    assert run(proxy, "-c", ELSEWHERE).returncode == 0
    assert any(line.startswith("CONNECT service.invalid:4000") for line in proxy.asked), proxy.asked
    assert any(line.startswith("GET http://service.invalid:4001/") for line in proxy.asked), proxy.asked
