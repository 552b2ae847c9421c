"""Finding the replicas of one service: at fixed addresses, or under a name that resolves to all of them."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Iterable
from typing import Protocol

from fovea.wire.errors import InvalidInput

logger = logging.getLogger(__name__)

_NO_ADDRESS = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
"""The answers for a headless service without a ready pod, which has no replicas. Other failures tell nothing about
replicas.
"""

Addresses = frozenset[str]
"""host:port of each replica that accepts requests; [host]:port for IPv6."""


class Discovery(Protocol):
    """The source of one service's addresses."""

    def watch(self) -> AsyncGenerator[Addresses, None]:
        """Yields all addresses as soon as they are known, and again whenever they change.

        After a failure the source is asked again with growing pauses; meanwhile the last yielded set remains valid. The
        generator ends only if nothing can change any more. A replica that is missing from a later set is leaving: it
        finishes its current requests and receives no new ones.
        """
        ...


class StaticDiscovery:
    """Addresses that never change."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncGenerator[Addresses, None]:
        yield self._addresses


class DnsDiscovery:
    """Resolves a DNS name periodically.

    Args:
        address: name:port; the port is the same on all replicas.
        interval_s: Pause between two look-ups.

    Raises InvalidInput if the port of `address` is not a number.
    """

    def __init__(self, address: str, interval_s: float = 2.0) -> None:
        self._name, port = split_address(address, "address")
        if not port.isdecimal():
            raise InvalidInput(f"port {port!r} of {address!r} must be a number, because DNS has no port names")
        self._port, self._interval_s = int(port), interval_s

    async def watch(self) -> AsyncGenerator[Addresses, None]:
        """Yields the addresses whenever they change."""
        known: Addresses | None = None
        problem = ""
        while True:
            try:
                found = await self._resolve()
            except socket.gaierror as error:
                if str(error) != problem:
                    logger.warning("%s cannot be resolved, so the known addresses remain in use: %s", self._name, error)
                problem = str(error)
            else:
                problem = ""
                if found != known:
                    known = found
                    yield found
            await asyncio.sleep(self._interval_s)

    async def _resolve(self) -> Addresses:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in _NO_ADDRESS:
                return frozenset()
            raise
        # A replica with both kinds of address counts once.
        hosts = [str(address[0]) for family, *_, address in found if family == socket.AF_INET]
        hosts = hosts or [str(address[0]) for _, *_, address in found]
        return frozenset(join_address(host, self._port) for host in hosts)


def split_address(address: str, field: str) -> tuple[str, str]:
    """Returns host and port of `host:port`. Raises InvalidInput that names `field`."""
    host, _, port = address.rpartition(":")
    if not host or not port:
        raise InvalidInput(f"{field} is {address!r}; write it as name:port", field=field)
    return host.strip("[]"), port


def join_address(host: str, port: int | str) -> str:
    """Returns host:port in the format of gRPC."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
