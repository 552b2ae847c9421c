"""Ports that stay free until they are used, and paths of sockets."""

import pathlib
import random
import socket
import subprocess
import sys

import pytest

from fovea.runtime import hosts


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
    assert hosts.free_ports(1) == [theirs]  # a killed process leaves no claim


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


def test_a_path_at_which_no_socket_can_be_is_refused_with_its_reason(tmp_path: pathlib.Path) -> None:
    own = tmp_path / "own"
    hosts.check_socket_path(str(own))
    longest = f"{tmp_path}/".ljust(107, "x")
    hosts.check_socket_path(longest)
    for path in (longest, str(own)):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)  # the kernel agrees
    hosts.check_socket_path(str(own))
    with pytest.raises(ValueError, match=r"x has 108 bytes, but a socket's path has at most 107"):
        hosts.check_socket_path(f"{longest}x")
    with pytest.raises(ValueError, match=f"the folder {tmp_path}/none does not exist"):
        hosts.check_socket_path(f"{tmp_path}/none/base")
    (tmp_path / "notes").touch()
    with pytest.raises(ValueError, match="notes exists and is not a socket"):
        hosts.check_socket_path(str(tmp_path / "notes"))
