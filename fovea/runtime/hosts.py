"""Hosts and ports that servers are told to listen on."""

import fcntl
import ipaddress
import random
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

WILDCARDS = ("0.0.0.0", "::")
"""Those that stand for all addresses of a machine: nothing can be reached under them."""

_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>: the address of an interface
_PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10_000
_LEAST_PORTS = 1_000
_draw = random.SystemRandom()  # two processes that seed `random` alike must not find the same ports
_claims: dict[int, socket.socket] = {}


def is_loopback(host: str) -> bool:
    """Returns whether a name or an address leads to this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(authority: str) -> str:
    """Returns the host of `host:port` or `scheme://host:port`, in lower case; an empty text if there is none."""
    try:
        return urlsplit(authority if "://" in authority else f"//{authority}").hostname or ""
    except ValueError:
        return ""


def listening(host: str, port: int = 0) -> socket.socket:
    """A listening socket on `host` alone; on all addresses for 0.0.0.0 and ::, which takes IPv4 too.

    Raises OSError if `host` is no address of this machine, or the port is taken.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")


def interface_of(address: str) -> str:
    """The network interface that has this IP address, such as eth0; empty if none does."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        with suppress(FileNotFoundError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                digits, *_, name = line.split()
                if int(digits, 16) == int(wanted):
                    return name
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # interfaces without an IPv4 address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == str(wanted):
                    return name
    return ""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on, and that nobody gets by chance before they are used.

    The kernel gives ports of one range to outgoing connections and to whoever binds port 0: a port of that range may be
    taken while a service still imports its libraries. These lie below it, if there is room below it; none is found
    twice in a process, where gRPC goes on to remember for a while that nobody listens on a port, nor (on Linux) by two
    processes of a machine that live at once: of 16 Foveas that started together, two had drawn the same port.
    """
    first_given = _first_given()
    if first_given - _LOWEST_PORT < _LEAST_PORTS:
        return _given_ports(count)
    found: list[int] = []
    while len(found) < count:
        port = _draw.randrange(_LOWEST_PORT, first_given)
        if port not in _claims and _is_free(port) and (claim := _claim(port)):
            _claims[port] = claim
            found.append(port)
    return found


def _first_given() -> int:
    with suppress(FileNotFoundError):
        return int(_PORT_RANGE_FILE.read_text().split()[0])
    return 49152  # where other systems begin, by RFC 6335


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _claim(port: int) -> socket.socket | None:
    """What a process holds, until it ends, of a port that it found; None if another holds it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform == "linux":
        try:
            claim.bind(f"\0fovea-port-{port}")  # a name without a file: nothing is left behind by a kill
        except OSError:
            claim.close()
            return None
    return claim


def _given_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
