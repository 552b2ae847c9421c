"""Hosts that servers are told to listen on."""

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

WILDCARDS = ("0.0.0.0", "::")
"""Those that stand for all addresses of a machine: nothing can be reached under them."""

_SIOCGIFADDR = 0x8915


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
