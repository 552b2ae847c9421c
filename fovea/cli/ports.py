"""Ports for services that bind them seconds later."""

import pathlib
import random
import socket
from contextlib import suppress

_RANGE_FILE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_LEAST_CHOICE = 1_000


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on, and that nobody gets by chance before they are used.

    The kernel gives ports of one range to outgoing connections and to whoever binds port 0: a port of that range may be
    taken while a service still imports its libraries. These lie below it, if there is room below it.
    """
    first_given = _first_given()
    if first_given - _LOWEST < _LEAST_CHOICE:
        return _given_ports(count)
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(_LOWEST, first_given)
        if port not in found and _is_free(port):
            found.append(port)
    return found


def _first_given() -> int:
    with suppress(FileNotFoundError):
        return int(_RANGE_FILE.read_text().split()[0])
    return 49152  # where other systems begin, by RFC 6335


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _given_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
