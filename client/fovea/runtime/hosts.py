"""Addresses and ports: those that servers listen on, and the base URL of the server that a program uses."""

import fcntl
import ipaddress
import random
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from fovea.wire.errors import FailedPrecondition

WILDCARDS = ("0.0.0.0", "::")
"""Addresses that stand for all addresses of a machine; clients cannot connect to them."""

_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>: the address of an interface
_PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10_000
_LEAST_PORTS = 1_000
_draw = random.SystemRandom()  # two processes with the same `random` seed must not find the same ports
_claims: dict[int, socket.socket] = {}

_API = "/api/v1"
_ANSWER_S, _GUESS_S = 10.0, 2.0
_REST_PORT = 8000
_NOT_FOUND = (404, 405)
_NOT_SERVED = (301, 302, 307, 308, *_NOT_FOUND, 502, 503, 504)
"""Statuses of another program, of another path, or of a proxy without a server behind it."""


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


def check_server(base_url: str) -> None:
    """Checks in seconds that a Tinker server answers at a base URL. The SDK would retry for minutes without a word.

    Raises:
        FailedPrecondition: No Tinker server answers there. The message says what to change.
    """
    url = base_url.rstrip("/")
    if host_of(url) == "" or not url.startswith(("http://", "https://")):
        meant = (base_url.partition("://")[2] if "://" in base_url else base_url).strip("/")
        raise FailedPrecondition(
            f"base_url is {base_url!r}, which is no http:// or https:// address: write"
            f" http://{meant if host_of(meant) else f'127.0.0.1:{_REST_PORT}'}",
            field="base_url",
        )
    seen = _unserved(url, _ANSWER_S)
    if not seen:
        return
    better = "" if "timed out" in seen else next((one for one in _variants(url) if not _unserved(one, _GUESS_S)), "")
    if better:
        fix = f"; one responds at {better}: use that address"
    elif "CERTIFICATE_VERIFY" in seen:
        fix = ": set SSL_CERT_FILE to the certificate of the authority that signed the server's"
    else:
        fix = ": start one with `fovea up`, or give the address of a running one"
    raise FailedPrecondition(
        f"no server responds at {url} ({seen}){fix} (base_url, --base-url or TINKER_BASE_URL)", field="base_url"
    )


def _variants(url: str) -> list[str]:
    """Returns addresses that were probably meant: without the path, with the other scheme, with the REST port."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    found = [
        f"{scheme}://{authority}{path}"
        for authority in (parts.netloc, f"{host}:{_REST_PORT}")
        for scheme in (parts.scheme, "http" if parts.scheme == "https" else "https")
        for path in (parts.path, parts.path.removesuffix("/v1").removesuffix("/api"), "")
    ]
    return list(dict.fromkeys(found))[1:]


def _unserved(url: str, timeout_s: float) -> str:
    """Returns the reason why no Tinker server is at a base URL; empty if one answers, even with a refusal."""
    import httpx

    try:
        answer = httpx.get(f"{url}{_API}/healthz", timeout=timeout_s)
        if answer.status_code in _NOT_FOUND:  # some servers have no health check
            answer = httpx.get(f"{url}{_API}/get_server_capabilities", timeout=timeout_s)
    except httpx.RemoteProtocolError:
        return "the port does not speak HTTP/1.1; a gRPC port does not"
    except (httpx.TransportError, httpx.InvalidURL, OSError) as error:
        return f"{error or type(error).__name__}"
    if answer.status_code in _NOT_SERVED:
        return f"it answers {answer.status_code}, so it is no Tinker server or none is behind it"
    return ""
