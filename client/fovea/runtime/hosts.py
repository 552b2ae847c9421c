"""Addresses and ports for servers to listen on."""

import fcntl
import ipaddress
import os
import random
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

WILDCARDS = ("0.0.0.0", "::")
"""Addresses that stand for all addresses of a machine; clients cannot connect to them."""

_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>: the address of an interface
_PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10_000
_LEAST_PORTS = 1_000
_SOCKET_PATH_BYTES = 107  # of <linux/un.h>, without the final zero
_draw = random.SystemRandom()  # two processes with the same `random` seed must not find the same ports
_claims: dict[int, socket.socket] = {}


def is_loopback(host: str) -> bool:
    """Returns whether a name or address reaches only this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(authority: str) -> str:
    """Returns the host of `host:port` or `scheme://host:port` in lower case; an empty string if there is none."""
    try:
        return urlsplit(authority if "://" in authority else f"//{authority}").hostname or ""
    except ValueError:
        return ""


def listening(host: str, port: int = 0) -> socket.socket:
    """Returns a socket that listens on `host` only, or on all addresses for 0.0.0.0 and :: (which includes IPv4).

    Raises OSError if `host` is not an address of this machine or the port is in use.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")


def check_socket_path(path: str) -> None:
    """Raises ValueError if no service can listen at a path, as at a Unix socket."""
    if (length := len(os.fsencode(path))) > _SOCKET_PATH_BYTES:
        raise ValueError(
            f"{path} has {length} bytes, but a socket's path has at most {_SOCKET_PATH_BYTES}: give a shorter path"
        )
    if not (folder := Path(path).parent).is_dir():
        raise ValueError(f"the folder {folder} does not exist: create it, or give another path")
    if os.path.lexists(path) and not Path(path).is_socket():
        raise ValueError(f"{path} exists and is not a socket: give another path")


def interface_of(address: str) -> str:
    """Returns the network interface with this IP address, such as eth0; empty if there is none."""
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
    """Returns unused ports of 127.0.0.1 that no other program will get by chance before they are used.

    The kernel assigns ports of a certain range to outgoing connections and to programs that bind port 0. A port of that
    range could be assigned while a service still imports its libraries. These ports therefore lie below the range if
    there is room; otherwise the kernel assigns them, without the following guarantees. A process never returns a port
    twice, because gRPC remembers for a while that a port did not answer. On Linux, two processes that run at the same
    time never return the same port. (Before, two of 16 Foveas that started together had picked the same one.)
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
    return 49152  # start of the dynamic range in RFC 6335, which other systems use


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _claim(port: int) -> socket.socket | None:
    """Claims a port on this machine until the process ends. Returns the claim; None if another process has one."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform == "linux":
        try:
            claim.bind(f"\0fovea-port-{port}")  # an abstract name: it leaves no file behind after a kill
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
