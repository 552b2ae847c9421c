"""The interface of discovery, and the static one: addresses given at start."""

from collections.abc import Sequence
from typing import Protocol


class Discovery(Protocol):
    """Tells the addresses (host:port) of the services as they are now; asked again every few seconds."""

    async def renderers(self) -> Sequence[str]:
        """Renderers, all alike."""
        ...

    async def samplers(self) -> Sequence[str]:
        """Samplers of one model."""
        ...

    async def trainer(self) -> str:
        """The trainer."""
        ...


class StaticDiscovery:
    """Addresses that never change."""

    def __init__(self, renderers: Sequence[str], samplers: Sequence[str], trainer: str) -> None:
        self._renderers, self._samplers, self._trainer = tuple(renderers), tuple(samplers), trainer

    async def renderers(self) -> Sequence[str]:
        """As given."""
        return self._renderers

    async def samplers(self) -> Sequence[str]:
        """As given."""
        return self._samplers

    async def trainer(self) -> str:
        """As given."""
        return self._trainer
