"""Replicas of one service: they join, are asked for their health, fail, come back, drain and leave."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Generic, TypeVar

from gateway import instruments as metrics
from gateway.discovery.discovery import Addresses, Discovery
from gateway.replicas.fair_semaphore import Places
from gateway.replicas.peer import Peer

logger = logging.getLogger(__name__)

_AGAIN_S = 2.0
_FIRST_S = 5.0
"""How long a start waits for discovery and for first answers; who comes later joins later."""


class Left(Exception):
    """A replica leaves before a request was sent to it: the request goes to another, and nothing was lost."""


class Replica(Peer):
    """One of several alike.

    Args:
        concurrency: Requests inside at once; the rest wait for a place.

    Attributes:
        queued: Requests that are bound for it, waiting or inside.
        waiting: Those of them that wait for a place.
        is_leaving: Set for good once discovery no longer names it: what runs ends, nothing new is sent.
    """

    def __init__(self, service: str, address: str, concurrency: int) -> None:
        super().__init__(service, address)
        self.queued = self.waiting = 0
        self.is_leaving = False
        self._places = Places(concurrency)
        self._idle = asyncio.Event()
        self._idle.set()

    def leave(self) -> None:
        """Notes that discovery no longer names it, and sends those who wait for it elsewhere."""
        self.is_leaving, self.up = True, False
        for _ in range(self.queued):
            self._places.release()

    def check_stays(self) -> None:
        """Raises Left if nothing new is to be sent."""
        if self.is_leaving:
            raise Left(self.address)

    def mark_down(self, reason: str) -> None:
        """As of any peer; one that leaves may fail as it likes."""
        if not self.is_leaving:
            super().mark_down(reason)

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Waits for a place, owners by turns. It is not let go before all that wait or have one have ended.

        Raises Left if it leaves.
        """
        self.queued += 1
        self._idle.clear()
        try:
            await self._wait(owner)
            try:
                self.check_stays()
                yield
            finally:
                self._places.release()
        finally:
            self.queued -= 1
            if not self.queued:
                self._idle.set()

    async def _wait(self, owner: str) -> None:
        self.waiting += 1
        try:
            await self._places.acquire(owner)
        finally:
            self.waiting -= 1

    async def drained(self) -> None:
        """Returns once no request is bound for it."""
        await self._idle.wait()


R = TypeVar("R", bound=Replica)


class Replicas(Generic[R]):
    """All replicas of a service, as discovery tells. Call `start` before use.

    Args:
        service: What they are, for logs and metrics.
        discovery: Where they are.
        make: Makes one of an address.
    """

    def __init__(self, service: str, discovery: Discovery, make: Callable[[str], R]) -> None:
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
            member = self._members[address] = self._make(address)
            member.on_change = self._note
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
        metrics.REPLICAS.labels(self._service, "known").set(len(self._members))
        metrics.REPLICAS.labels(self._service, "up").set(len(self.up))
        if self.up:
            self._any_up.set()
        else:
            self._any_up.clear()
