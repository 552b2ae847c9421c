"""A process that the gateway calls: asked for its health, it fails and comes back."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from fovea.client.channel import ServiceClient
from fovea.wire.errors import DeadlineExceeded, FoveaError

logger = logging.getLogger(__name__)

_POLL_S = 2.0
_POLL_DOWN_S = 0.3


class Peer(ABC):
    """One process as the gateway knows it.

    Attributes:
        address: host:port.
        answers: Whether it answered when it was last asked or called.
        up: Whether it answers and takes requests.
        on_change: Called when `up` may have changed.
    """

    def __init__(self, service: str, address: str) -> None:
        self.service, self.address = service, address
        self.answers = self.up = False
        self.on_change: Callable[[], None] = lambda: None
        self._is_reported_down = False

    @property
    @abstractmethod
    def client(self) -> ServiceClient:
        """Its channel."""

    @abstractmethod
    async def ask(self) -> None:
        """Asks what it serves and holds. Raises FoveaError."""

    async def prepare(self) -> bool:
        """Called whenever it answers and is not up, before it takes requests; False to be called again later."""
        return True

    async def refresh(self, is_first: bool = False) -> None:
        """Asks it, and lets it take requests if it answers; `is_first` at the gateway's start, as it is."""
        try:
            await self.ask()
        except DeadlineExceeded:
            # Busy is not dead: a peer that is gone breaks the connection, which keepalive notices.
            logger.warning("%s %s is slow to answer", self.service, self.address)
            return
        except FoveaError as error:
            self.mark_down(str(error))
            return
        self.answers, self._is_reported_down = True, False
        if not self.up and (is_first or await self.prepare()):
            logger.info("%s %s is up", self.service, self.address)
            self.up = True
            self.on_change()

    def mark_down(self, reason: str) -> None:
        """Notes that calls fail; it is asked again soon."""
        if not self._is_reported_down:
            logger.warning("%s %s does not answer: %s", self.service, self.address, reason)
        self._is_reported_down = True
        self.answers = self.up = False
        self.on_change()

    async def watch(self) -> None:
        """Asks it again and again, until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:
                logger.exception("%s %s could not be looked at; it is tried again", self.service, self.address)
            await asyncio.sleep(_POLL_S if self.answers else _POLL_DOWN_S)
