"""The processes that the gateway calls: replicas of a service, and the trainers of a base model.

Replicas join, are checked for health, fail, recover, drain and leave. Owners divide the slots of each replica by their
weights.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Generic, TypeVar

from fovea.api.v1 import trainer_pb2
from fovea.client import TrainerClient
from fovea.client.channel import ServiceClient
from fovea.wire.errors import DeadlineExceeded, FoveaError, Unavailable
from fovea_gateway.access.fair_queue import FairQueue, Turn
from fovea_gateway.replicas.discovery import Addresses, Discovery

logger = logging.getLogger(__name__)

TrainerInfo = trainer_pb2.GetTrainerInfoResponse
WeightOf = Callable[[str], float]
CheckFiles = Callable[[str, Mapping[str, str]], None]
"""Raises FailedPrecondition if a service, named in the first argument, has other model files than ours."""


def find_unlike(own: Mapping[str, str], files: Mapping[str, str]) -> str:
    """Returns the name of a model file that two services have with different fingerprints, or an empty text."""
    return next((name for name in own if name in files and files[name] != own[name]), "")


_POLL_S, _POLL_DOWN_S, _AGAIN_S = 2.0, 0.3, 2.0
_STARTING_S, _QUIET_S = 300.0, 60.0
"""Seconds in which a process that has not answered yet counts as starting, and in which its error is not shown."""
_REPEAT_S = 60.0  # between two log lines on a process that stays down
_FIRST_S = 5.0
"""Seconds that a start waits for discovery and the first answers. Slower replicas join later."""


class Peer(ABC):
    """A process that the gateway calls, with regular health checks.

    Args:
        on_change: Called when `up` may have changed.

    Attributes:
        address: host:port.
        client: The channel to the process.
        instance_id: The id of the last instance that answered, which changes with each restart; empty until then, and
            for a renderer.
        answers: Whether it answered the last check or call.
        up: Whether it answers and accepts requests.
        has_been_up: Whether it has ever been up. If not, it may still be starting.
        reason: The error of the last call, if it failed and the process is not starting.
    """

    client: ServiceClient

    def __init__(self, service: str, address: str, on_change: Callable[[], None]) -> None:
        self.service, self.address = service, address
        self.instance_id = ""
        self.answers = self.up = False
        self._on_change = on_change
        self.has_been_up = False
        self.reason, self._reported_level, self._reported_at = "", logging.NOTSET, 0.0
        self._begun_at = time.monotonic()

    @property
    def is_starting(self) -> bool:
        """True until it is up for the first time, unless its start takes long."""
        return self._is_younger_than(_STARTING_S)

    def _is_younger_than(self, seconds: float) -> bool:
        return not self.has_been_up and time.monotonic() - self._begun_at < seconds

    @abstractmethod
    async def ask(self) -> None:
        """Asks the process for its info. Raises FoveaError."""

    async def prepare(self) -> bool:
        """Prepares a process that answers but is not up yet. Returns False if the next check should call this again."""
        return True

    async def refresh(self, is_first: bool = False) -> None:
        """Checks the process and marks it as up if it answers. `is_first`, at the start, skips `prepare`."""
        try:
            await self.ask()
        except DeadlineExceeded:
            # A slow answer does not mean death: keepalive notices when the connection of a dead process breaks.
            logger.warning("%s %s is slow to answer", self.service, self.address)
            return
        except FoveaError as error:
            # Services start in parallel and the gateway is ready first, so a wait for the others is no failure.
            level = logging.INFO if isinstance(error, Unavailable) and self.is_starting else logging.WARNING
            self.mark_down("" if level == logging.INFO and self._is_younger_than(_QUIET_S) else str(error), level)
            return
        self.answers, self.reason, self._reported_level = True, "", logging.NOTSET
        if not self.up and (is_first or await self.prepare()):
            logger.info("%s %s is up", self.service, self.address)
            self.up = self.has_been_up = True
            self._on_change()

    def mark_down(self, reason: str, level: int = logging.WARNING) -> None:
        """Records that calls fail; no reason means that the service is starting. The next check follows soon."""
        now = time.monotonic()
        if level > self._reported_level or (reason and now - self._reported_at >= _REPEAT_S):
            state = "is not used" if level > logging.INFO else "does not answer yet"
            logger.log(level, "%s %s %s: %s", self.service, self.address, state, reason or "waiting for it")
            self._reported_level, self._reported_at = level, now
        self.answers, self.up, self.reason = False, False, reason
        self._on_change()

    async def watch(self) -> None:
        """Checks the process repeatedly until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:
                logger.exception("the health check of %s %s failed and will be repeated", self.service, self.address)
            await asyncio.sleep(_POLL_S if self.answers else _POLL_DOWN_S)


class ReplicaLeft(Exception):
    """A replica leaves before a request was sent to it. The request goes to another replica; nothing is lost."""


class Replica(Peer):
    """One of several equal processes.

    Args:
        concurrency: The maximum number of requests in it at a time. Further requests wait for a slot.
        weight_of: Returns an owner's weight for the division of the slots.

    Attributes:
        queued: The number of requests that wait for a slot or have one.
        waiting: The number of requests that wait for a slot.
        tokens: The tokens of all queued requests, as estimated when they came.
        is_leaving: Set permanently when discovery no longer lists the replica. Running requests finish; no new one is
            sent.
    """

    def __init__(
        self, service: str, address: str, concurrency: int, on_change: Callable[[], None], weight_of: WeightOf
    ) -> None:
        super().__init__(service, address, on_change)
        self.queued = self.waiting = 0
        self.tokens = 0.0
        self.is_leaving = False
        self._slots = FairQueue(concurrency, weight_of)
        self._idle = asyncio.Event()
        self._idle.set()

    def leave(self) -> None:
        """Records that discovery no longer lists the replica, and sends waiting requests to other replicas."""
        self.is_leaving, self.up = True, False
        self._slots.dismiss(ReplicaLeft(self.address))

    def check_stays(self) -> None:
        """Raises ReplicaLeft if no new request may be sent."""
        if self.is_leaving:
            raise ReplicaLeft(self.address)

    def mark_down(self, reason: str, level: int = logging.WARNING) -> None:
        """Records that calls fail, unless the replica is leaving: then failures are expected."""
        if not self.is_leaving:
            super().mark_down(reason, level)

    @asynccontextmanager
    async def slot(self, turn: Turn) -> AsyncIterator[None]:
        """Waits for a slot, in fair order. A leaving replica stays open until all waiting and running requests have
        ended.

        Raises ReplicaLeft if the replica leaves.
        """
        self.check_stays()
        tokens = turn.cost
        self.queued += 1
        self.waiting += 1
        self.tokens += tokens
        self._idle.clear()
        is_waiting = True
        try:
            async with self._slots.place(turn):
                self.waiting -= 1
                is_waiting = False
                self.check_stays()
                yield
        finally:
            self.waiting -= is_waiting
            self.queued -= 1
            self.tokens = self.tokens - tokens if self.queued else 0.0
            if not self.queued:
                self._idle.set()

    def free(self, turn: Turn, slots: int) -> None:
        """Releases some of a turn's slots before the turn ends."""
        self._slots.free(turn, slots)

    def describe(self, turn: Turn) -> str:
        """Describes the queue position of a turn that waits for a slot."""
        return self._slots.describe(turn)

    async def drained(self) -> None:
        """Returns once no request waits or runs."""
        await self._idle.wait()


R = TypeVar("R", bound=Replica)


class Replicas(Generic[R]):
    """All replicas of a service, as listed by discovery. Call `start` before use.

    Args:
        service: The name of the service, for logs.
        discovery: Supplies the addresses.
        make: Creates a replica from its address and the callback for changes of its `up`.
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
        """Follows discovery. Returns once the first replicas have been checked, or after a few seconds."""
        self._following = asyncio.create_task(self._follow(), name=f"{self._service} discovery")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._began.wait(), _FIRST_S)

    async def close(self) -> None:
        """Stops the health checks and closes the channels."""
        tasks = [*self._watches.values(), *self._leaving.values()]
        tasks += [self._following] if self._following else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(member.client.close() for member in self._members.values()))

    @property
    def members(self) -> list[R]:
        """The replicas that discovery lists, up or not."""
        return list(self._members.values())

    @property
    def up(self) -> list[R]:
        """The replicas that accept requests."""
        return [member for member in self._members.values() if member.up]

    async def wait_up(self, timeout_s: float) -> None:
        """Returns once a replica is up, or after `timeout_s`."""
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
                logger.exception("the discovery of %ss failed and starts again", self._service)
                await asyncio.sleep(_AGAIN_S)

    def _apply(self, addresses: Addresses) -> None:
        for address in sorted(self._members.keys() - addresses):
            self._remove(self._members.pop(address))
        for address in sorted(addresses - self._members.keys()):
            member = self._members[address] = self._make(address, self._note)
            logger.info("%s %s joins", member.service, address)
            self._watches[address] = asyncio.create_task(self._watch(member), name=f"watch {address}")
        self._note()

    def _remove(self, member: R) -> None:
        logger.info("%s %s leaves; %d requests are still running", member.service, member.address, member.queued)
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
        # A replica that returns under the same address shares its engine with requests of its predecessor: wait for
        # them.
        if earlier := self._leaving.get(member.address):
            await asyncio.wait([earlier])
        await self._began.wait()
        await member.watch()

    def _note(self) -> None:
        if self.up:
            self._any_up.set()
        else:
            self._any_up.clear()


class TrainerLink(Peer):
    """One trainer of a base model. Call `start` before use.

    Args:
        wait_s: Seconds that a call waits for a trainer that went away.
        check: Raises FoveaError if the trainer may not be used beside the other trainers of the base model.

    Attributes:
        info: The last info that it sent; None until it has answered.
        is_draining: Whether its models move to other trainers, because an operator wants to stop it.
    """

    def __init__(self, address: str, wait_s: float, check: "Callable[[TrainerLink, TrainerInfo], None]") -> None:
        super().__init__("trainer", address, self._note)
        self.client: TrainerClient = TrainerClient(address)
        self._wait_s, self._check = wait_s, check
        self.is_draining = False
        self.info: trainer_pb2.GetTrainerInfoResponse | None = None
        self._is_up = asyncio.Event()
        self._down_since = 0.0
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Checks the trainer once and starts the regular checks."""
        self._down_since = asyncio.get_running_loop().time()
        await self.refresh(is_first=True)
        self._watch = asyncio.create_task(self.watch(), name="trainer watch")

    async def close(self) -> None:
        """Stops the checks and closes the channel."""
        if self._watch:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self.client.close()

    def set_draining(self, is_draining: bool) -> None:
        """Starts or stops draining the trainer."""
        if is_draining != self.is_draining:
            self.is_draining = is_draining
            logger.warning("trainer %s is %s", self.address, "draining" if is_draining else "in use again")

    @property
    def is_lost(self) -> bool:
        """True once it has been down for so long that commands should wait for it no longer."""
        return not self.up and asyncio.get_running_loop().time() - self._down_since >= self._wait_s

    async def ask(self) -> None:
        """Asks for the trainer's info. A new instance has no models in memory."""
        info = await self.client.info(timeout_s=5.0)
        self._check(self, info)
        if self.info is not None and info.instance_id != self.instance_id:
            logger.warning("trainer %s restarted as instance %s", self.address, info.instance_id)
        self.info, self.instance_id = info, info.instance_id

    async def require(self, patience_s: float = 0.0) -> trainer_pb2.GetTrainerInfoResponse:
        """Returns the trainer's info once it is up.

        Raises Unavailable if it is up neither `wait_s` seconds after it went down nor `patience_s` seconds after the
        call.
        """
        down_s = asyncio.get_running_loop().time() - self._down_since
        with suppress(TimeoutError):  # A call long after the failure does not wait.
            await asyncio.wait_for(self._is_up.wait(), max(self._wait_s - down_s, patience_s, 0.01))
        if not self.up or self.info is None:
            raise Unavailable(f"the trainer at {self.address} does not answer")
        return self.info

    async def look_again(self) -> str:
        """Checks the trainer after a failed call. Returns the instance that answers, or an empty text."""
        await self.refresh()
        return self.instance_id if self.up else ""

    def _note(self) -> None:
        if self.up:
            self._is_up.set()
        elif self._is_up.is_set():
            self._down_since = asyncio.get_running_loop().time()
            self._is_up.clear()
