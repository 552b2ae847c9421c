"""Replicas of one service: they join, are asked for their health, fail, come back, drain and leave. Owners
share the places of each by their weights.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Generic, TypeVar

from fovea.client.channel import ServiceClient
from fovea.wire.errors import DeadlineExceeded, FoveaError, Unavailable
from fovea_gateway.discovery.discovery import Addresses, Discovery
from fovea_gateway.fair_queue import FairQueue, Turn

logger = logging.getLogger(__name__)

WeightOf = Callable[[str], float]
CheckFiles = Callable[[str, Mapping[str, str]], None]
"""Raises FailedPrecondition if a service, named first, has other files of the model than those it works with."""


def find_unlike(own: Mapping[str, str], files: Mapping[str, str]) -> str:
    """Which of the model's files, by fingerprint, two services have both but not alike; empty if there is none."""
    return next((name for name in own if name in files and files[name] != own[name]), "")


_POLL_S = 2.0
_POLL_DOWN_S = 0.3
_AGAIN_S = 2.0
_FIRST_S = 5.0
"""How long a start waits for discovery and for first answers; who comes later joins later."""


class Peer(ABC):
    """A process that the gateway calls: asked for its health, it fails and comes back.

    Args:
        on_change: Called when `up` may have changed.

    Attributes:
        address: host:port.
        answers: Whether it answered when it was last asked or called.
        up: Whether it answers and takes requests.
        has_been_up: Whether it did before; else it may be starting still.
    """

    def __init__(self, service: str, address: str, on_change: Callable[[], None]) -> None:
        self.service, self.address = service, address
        self.answers = self.up = False
        self._on_change = on_change
        self.has_been_up = False
        self._reported_level = logging.NOTSET

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
            # Services start side by side, and the gateway is soonest there: to wait for the others is no warning.
            is_starting = isinstance(error, Unavailable) and not self.has_been_up
            self.mark_down(str(error), logging.INFO if is_starting else logging.WARNING)
            return
        self.answers, self._reported_level = True, logging.NOTSET
        if not self.up and (is_first or await self.prepare()):
            logger.info("%s %s is up", self.service, self.address)
            self.up = self.has_been_up = True
            self._on_change()

    def mark_down(self, reason: str, level: int = logging.WARNING) -> None:
        """Notes that calls fail; it is asked again soon."""
        if level > self._reported_level:
            logger.log(level, "%s %s is not used: %s", self.service, self.address, reason)
            self._reported_level = level
        self.answers = self.up = False
        self._on_change()

    async def watch(self) -> None:
        """Asks it again and again, until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:
                logger.exception("%s %s could not be looked at; it is tried again", self.service, self.address)
            await asyncio.sleep(_POLL_S if self.answers else _POLL_DOWN_S)


class ReplicaLeft(Exception):
    """A replica leaves before a request was sent to it: the request goes to another, and nothing was lost."""


class Replica(Peer):
    """One of several alike.

    Args:
        concurrency: Requests inside at once; the rest wait for a place.
        weight_of: An owner's share of the places.

    Attributes:
        queued: Requests that are bound for it, waiting or inside.
        waiting: Those of them that wait for a place.
        is_leaving: Set for good once discovery no longer names it: what runs ends, nothing new is sent.
    """

    def __init__(
        self, service: str, address: str, concurrency: int, on_change: Callable[[], None], weight_of: WeightOf
    ) -> None:
        super().__init__(service, address, on_change)
        self.queued = self.waiting = 0
        self.is_leaving = False
        self._places = FairQueue(concurrency, weight_of)
        self._idle = asyncio.Event()
        self._idle.set()

    def leave(self) -> None:
        """Notes that discovery no longer names it, and sends those who wait for it elsewhere."""
        self.is_leaving, self.up = True, False
        self._places.dismiss(ReplicaLeft(self.address))

    def check_stays(self) -> None:
        """Raises ReplicaLeft if nothing new is to be sent."""
        if self.is_leaving:
            raise ReplicaLeft(self.address)

    def mark_down(self, reason: str, level: int = logging.WARNING) -> None:
        """As of any peer; one that leaves may fail as it likes."""
        if not self.is_leaving:
            super().mark_down(reason, level)

    @asynccontextmanager
    async def place(self, turn: Turn) -> AsyncIterator[None]:
        """Waits for a place, in its turn. It is not let go before all that wait or have one have ended.

        Raises ReplicaLeft if it leaves.
        """
        self.check_stays()
        self.queued += 1
        self.waiting += 1
        self._idle.clear()
        is_waiting = True
        try:
            async with self._places.place(turn):
                self.waiting -= 1
                is_waiting = False
                self.check_stays()
                yield
        finally:
            self.waiting -= is_waiting
            self.queued -= 1
            if not self.queued:
                self._idle.set()

    def free(self, turn: Turn, places: int) -> None:
        """Lets others have some of a turn's places before it ends."""
        self._places.free(turn, places)

    def describe(self, turn: Turn) -> str:
        """Where a turn stands that waits for a place here."""
        return self._places.describe(turn)

    async def drained(self) -> None:
        """Returns once no request is bound for it."""
        await self._idle.wait()


R = TypeVar("R", bound=Replica)


class Replicas(Generic[R]):
    """All replicas of a service, as discovery tells. Call `start` before use.

    Args:
        service: What they are, for logs.
        discovery: Where they are.
        make: Makes one of an address, and of what it is to call when it comes up or goes down.
    """

    def __init__(self, service: str, discovery: Discovery, make: Callable[[str, Callable[[], None]], R]) -> None:
        self._service, self._discovery = service, discovery
        self._make = make
        self._members: dict[str, R] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self._began = asyncio.Event()
        self._any_up = asyncio.Event()

    async def start(self) -> None:
        """Follows discovery; returns once those that are there were asked, or after a few seconds."""
        self._following = asyncio.create_task(self._follow(), name=f"{self._service} discovery")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._began.wait(), _FIRST_S)

    async def close(self) -> None:
        """Stops watching and closes the channels."""
        tasks = [*self._watches.values(), *self._leaving.values()]
        tasks += [self._following] if self._following else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(member.client.close() for member in self._members.values()))

    @property
    def members(self) -> list[R]:
        """Those that discovery names, up or not."""
        return list(self._members.values())

    @property
    def up(self) -> list[R]:
        """Those that take requests."""
        return [member for member in self._members.values() if member.up]

    async def wait_up(self, timeout_s: float) -> None:
        """Returns once one is up, or after `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._any_up.wait(), max(timeout_s, 0.0))

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self._discovery.watch()) as changes:
                    async for addresses in changes:
                        self._apply(addresses)
                        if not self._began.is_set():
                            await asyncio.gather(*(member.refresh(is_first=True) for member in self.members))
                            self._began.set()
                return
            except Exception:
                logger.exception("discovery of %ss failed; it begins anew", self._service)
                await asyncio.sleep(_AGAIN_S)

    def _apply(self, addresses: Addresses) -> None:
        for address in sorted(self._members.keys() - addresses):
            self._let_go(self._members.pop(address))
        for address in sorted(addresses - self._members.keys()):
            member = self._members[address] = self._make(address, self._note)
            logger.info("%s %s joins", member.service, address)
            self._watches[address] = asyncio.create_task(self._watch(member), name=f"watch {address}")
        self._note()

    def _let_go(self, member: R) -> None:
        logger.info("%s %s leaves, %d requests run on", member.service, member.address, member.queued)
        member.leave()
        self._watches.pop(member.address).cancel()
        earlier = self._leaving.get(member.address)
        task = asyncio.create_task(self._drain(member, earlier), name=f"drain {member.address}")
        self._leaving[member.address] = task
        task.add_done_callback(lambda done: self._forget(member.address, done))

    def _forget(self, address: str, drain: asyncio.Task[None]) -> None:
        if self._leaving.get(address) is drain:
            del self._leaving[address]

    async def _drain(self, member: R, earlier: asyncio.Task[None] | None) -> None:
        try:
            await member.drained()
            if earlier:
                await asyncio.wait([earlier])
        finally:
            await member.client.close()
        logger.info("%s %s has left", member.service, member.address)

    async def _watch(self, member: R) -> None:
        # Whoever comes back under the same address shares an engine with what still runs there: that ends first.
        if earlier := self._leaving.get(member.address):
            await asyncio.wait([earlier])
        await self._began.wait()
        await member.watch()

    def _note(self) -> None:
        if self.up:
            self._any_up.set()
        else:
            self._any_up.clear()
