"""Where the replicas of one service are, now and from now on: at addresses given, or under a name that has all."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Iterable
from typing import Protocol

from fovea.wire.errors import InvalidInput

logger = logging.getLogger(__name__)

_NO_ADDRESS = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
"""A headless service without a ready pod answers so: nobody is there. Other failures say nothing."""

Addresses = frozenset[str]
"""host:port of each replica that takes requests; [host]:port for IPv6."""


class Discovery(Protocol):
    """Finds the replicas of one service."""

    def watch(self) -> AsyncGenerator[Addresses, None]:
        """Yields all addresses as soon as they are known, then again whenever they change.

        A source that fails is asked again, with growing pauses; meanwhile what was last yielded holds. It ends only if
        nothing can change any more. An address that is missing from a later set leaves: it ends what it has begun and
        is sent nothing new.
        """
        ...


class StaticDiscovery:
    """Addresses that never change."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncGenerator[Addresses, None]:
        yield self._addresses


class DnsDiscovery:
    """Resolves a name again and again.

    Args:
        address: name:port; the port is the same on all replicas.
        interval_s: Pause between two look-ups.

    Raises InvalidInput if `address` has no number for a port.
    """

    def __init__(self, address: str, interval_s: float = 2.0) -> None:
        self._name, port = split_address(address, "address")
        if not port.isdecimal():
            raise InvalidInput(f"port {port!r} of {address!r} is no number, and DNS knows no names of ports")
        self._port, self._interval_s = int(port), interval_s

    async def watch(self) -> AsyncGenerator[Addresses, None]:
        """Yields the addresses whenever they differ from the last ones."""
        known: Addresses | None = None
        problem = ""
        while True:
            try:
                found = await self._resolve()
            except socket.gaierror as error:
                if str(error) != problem:
                    logger.warning("%s cannot be resolved, what is known holds: %s", self._name, error)
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
    """Host and port of `host:port`. Raises InvalidInput naming `field`."""
    host, _, port = address.rpartition(":")
    if not host or not port:
        raise InvalidInput(f"{field} is {address!r}; write it as name:port", field=field)
    return host.strip("[]"), port


def join_address(host: str, port: int | str) -> str:
    """host:port as gRPC reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
