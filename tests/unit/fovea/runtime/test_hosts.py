"""Ports that stay free until they are used, and wrong addresses of servers."""

import http.server
import pathlib
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fovea.runtime import hosts
from fovea.wire.errors import FailedPrecondition


def test_they_are_free_all_different_and_not_given_to_others_by_chance() -> None:
    found = hosts.free_ports(50)
    assert len(set(found)) == 50
    first_given = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < port < first_given for port in found)


def test_a_port_in_use_or_given_before_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    before, *free = hosts.free_ports(3)
    _unclaim(free)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        drawn = iter([taken.getsockname()[1], before, free[0], free[0], free[1]])
        monkeypatch.setattr(hosts._draw, "randrange", lambda low, high: next(drawn))
        assert hosts.free_ports(2) == free


def test_a_port_that_another_process_found_and_does_not_use_yet_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    free = hosts.free_ports(1)
    finder = "from fovea.runtime.hosts import free_ports; print(*free_ports(1), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", finder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        theirs = int(other.stdout.readline())
        _unclaim(free)
        drawn = iter([theirs, *free])
        monkeypatch.setattr(hosts._draw, "randrange", lambda low, high: next(drawn))
        assert hosts.free_ports(1) == free
        other.kill()
    _unclaim(free)
    drawn = iter([theirs, *free])
    assert hosts.free_ports(1) == [theirs]  # a process that is killed leaves no claim


def _unclaim(ports: list[int]) -> None:
    for port in ports:
        hosts._claims.pop(port).close()


def test_tests_that_seed_alike_find_others() -> None:
    random.seed(1)
    first = hosts.free_ports(4)
    random.seed(1)
    assert not set(first).intersection(hosts.free_ports(4))


def test_without_room_below_they_come_from_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    given = tmp_path / "range"
    given.write_text("1024\t65535\n")
    monkeypatch.setattr(hosts, "_PORT_RANGE_FILE", given)
    assert len(set(hosts.free_ports(3))) == 3


class _Health(http.server.BaseHTTPRequestHandler):
    """A server's health check, below /api/v1 alone."""

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
    hosts.check_server(f"http://{served}")
    hosts.check_server(f"http://{served}/")


@pytest.mark.parametrize(
    "wrong", ["http://{}/v1", "http://{}/api/v1", "https://{}", "https://{}/v1/", "http://{}/page"]
)
def test_the_address_that_was_meant_is_named(served: str, wrong: str) -> None:
    with pytest.raises(FailedPrecondition, match=f"one responds at http://{served}: use that address") as refused:
        hosts.check_server(wrong.format(served))
    assert refused.value.field == "base_url"


@pytest.mark.parametrize("wrong", ["{}", "localhost", "//{}", "ftp://{}", "", "http://", "http://[::1"])
def test_an_address_without_a_scheme_is_refused(served: str, wrong: str) -> None:
    with pytest.raises(FailedPrecondition, match=r"no http:// or https:// address: write http://[l1]"):
        hosts.check_server(wrong.format(served))


def test_a_grpc_port_is_recognized() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(FailedPrecondition, match=r"does not speak HTTP/1\.1; a gRPC port does not"):
            hosts.check_server(f"http://127.0.0.1:{port}")
    finally:
        server.stop(None)


def test_a_server_that_is_down_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_REST_PORT", 1)  # another Fovea may run on this machine
    with pytest.raises(FailedPrecondition, match=r"no server responds at http://127\.0\.0\.1:1 .*: start one with"):
        hosts.check_server("http://127.0.0.1:1")
