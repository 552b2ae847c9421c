"""Addresses given at start."""

from collections.abc import AsyncGenerator, Iterable

from gateway.discovery.discovery import Addresses


class StaticDiscovery:
    """Addresses that never change."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncGenerator[Addresses, None]:
        """Yields them once."""
        yield self._addresses
