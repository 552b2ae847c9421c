"""A wrong server address is an error at once, with a hint."""

import asyncio
import http.server
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fovea.client import gateway
from fovea.client.gateway import NotConnected, check_server
from fovea.wire.errors import FailedPrecondition


class _Health(http.server.BaseHTTPRequestHandler):
    """A server's health check, only below /api/v1."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/v1/healthz" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Health) as server:
        running = threading.Thread(target=server.serve_forever)
        running.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        running.join()


def test_a_right_address_passes(served: str) -> None:
    check_server(f"http://{served}")
    check_server(f"http://{served}/")


@pytest.mark.parametrize(
    "wrong", ["http://{}/v1", "http://{}/api/v1", "https://{}", "https://{}/v1/", "http://{}/page"]
)
def test_the_address_that_was_meant_is_named(served: str, wrong: str) -> None:
    with pytest.raises(FailedPrecondition, match=f"one responds at http://{served}: use that address") as refused:
        check_server(wrong.format(served))
    assert refused.value.field == "base_url"


@pytest.mark.parametrize("wrong", ["{}", "localhost", "//{}", "ftp://{}", "", "http://", "http://[::1"])
def test_an_address_without_a_scheme_is_refused(served: str, wrong: str) -> None:
    with pytest.raises(FailedPrecondition, match=r"no http:// or https:// address: write http://[l1]"):
        check_server(wrong.format(served))


def test_a_grpc_port_is_recognized() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(FailedPrecondition, match=r"does not speak HTTP/1\.1; a gRPC port does not"):
            check_server(f"http://127.0.0.1:{port}")
    finally:
        server.stop(None)


def test_a_server_that_is_down_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_REST_PORT", 1)  # another Fovea may run on this machine
    with pytest.raises(FailedPrecondition, match=r"no server responds at http://127\.0\.0\.1:1 .*: start one with"):
        check_server("http://127.0.0.1:1")


class _Elsewhere(http.server.BaseHTTPRequestHandler):
    """A server that redirects its API, or only the part that needs a key, to another one that notes the keys."""

    to: str
    only: str
    keys: list[str | None]

    def do_GET(self) -> None:
        self.keys.append(self.headers.get("X-API-Key"))
        self.send_response(307 if self.to and self.only in self.path else 200)
        self.send_header("Location", f"{self.to}{self.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.mark.parametrize("only", ["/api/v1", "/get_server_capabilities"])
def test_no_key_follows_a_redirect(only: str) -> None:
    keys: list[str | None] = []
    other = type("Other", (_Elsewhere,), {"to": "", "only": only, "keys": keys})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), other) as there:
        target = f"http://127.0.0.1:{there.server_port}"
        near = type("Near", (_Elsewhere,), {"to": target, "only": only, "keys": []})
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), near) as here:
            running = [threading.Thread(target=one.serve_forever) for one in (there, here)]
            for thread in running:
                thread.start()
            try:
                with pytest.raises(NotConnected, match=f"the address .*redirects to {target}[^0-9].*give that address"):
                    check_server(f"http://127.0.0.1:{here.server_port}", "tml-secret")
                assert keys == []
                check_server(target, "tml-secret")
                assert keys == [None, "tml-secret"], "the other server notes the keys that it gets"
            finally:
                for server in (there, here):
                    server.shutdown()
                for thread in running:
                    thread.join()


async def test_a_wrong_address_in_a_task_leaves_the_others_running() -> None:
    async def connect() -> None:
        check_server("nowhere")

    async def other() -> str:
        await asyncio.sleep(0)
        return "done"

    refused, done = await asyncio.gather(connect(), other(), return_exceptions=True)
    assert isinstance(refused, NotConnected)
    assert done == "done"
