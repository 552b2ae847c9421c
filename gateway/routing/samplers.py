"""Samplers: which are up, how busy they are, what they hold."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from fovea.api.v1 import model_input_pb2, sampler_pb2
from fovea.client import SamplerClient
from fovea.wire.errors import DeadlineExceeded, FoveaError, Unavailable
from gateway.discovery.discovery import Discovery
from gateway.routing.affinity import Affinity, prefix_keys
from gateway.routing.residency import Residency

logger = logging.getLogger(__name__)

_POLL_S = 2.0
_POLL_DOWN_S = 0.3


class Sampler:
    """One sampler as the gateway knows it.

    Attributes:
        adapters: Snapshots that it holds as adapters.
        residency: Guards the full weights in place.
        slots: Bounds the requests inside.
    """

    def __init__(
        self,
        address: str,
        concurrency: int,
        change: Callable[["Sampler", str], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        self._on_change = on_change
        self.address = address
        self.client = SamplerClient(address)
        self.info: sampler_pb2.GetSamplerInfoResponse | None = None
        self.up = asyncio.Event()
        self._is_reported_down = False
        self.adapters: set[str] = set()
        self.slots = asyncio.Semaphore(concurrency)
        self.queued = 0
        self.residency = Residency(lambda wanted: change(self, wanted))

    @property
    def instance_id(self) -> str:
        """Of its engine, another one after a restart; empty before it first answered."""
        return self.info.instance_id if self.info is not None else ""

    async def refresh(self) -> None:
        """Asks the sampler what it holds."""
        try:
            info = await self.client.info(timeout_s=5.0)
        except DeadlineExceeded:
            # Busy is not dead: a peer that is gone breaks the connection, which keepalive notices.
            logger.warning("sampler %s is slow to answer", self.address)
            return
        except FoveaError as error:
            self.mark_down(str(error))
            return
        is_new = self.info is None or self.info.instance_id != info.instance_id
        self.info = info
        if is_new:
            logger.info("sampler %s is up, instance %s", self.address, info.instance_id)
            self.adapters = set(info.adapter_snapshot_ids)
            self.residency.reset(info.resident_snapshot_id)
        elif not self.up.is_set():
            logger.info("sampler %s is up again, same instance", self.address)
        self._is_reported_down = False
        self.up.set()
        self._on_change()

    def mark_down(self, reason: str) -> None:
        """Notes that calls fail; it is asked again soon."""
        if not self._is_reported_down:
            logger.warning("sampler %s does not answer: %s", self.address, reason)
        self._is_reported_down = True
        self.up.clear()
        self._on_change()


class Samplers:
    """All samplers. Call `start` before use.

    Args:
        discovery: Where they are.
        concurrency: Requests inside one sampler at once.
        change: Puts full weights in place in one sampler.
    """

    def __init__(
        self, discovery: Discovery, concurrency: int, change: Callable[[Sampler, str], Awaitable[None]]
    ) -> None:
        self._discovery = discovery
        self._concurrency = concurrency
        self._change = change
        self._samplers: dict[str, Sampler] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._any_up = asyncio.Event()
        self._affinity = Affinity()

    async def start(self) -> None:
        """Begins to watch every sampler."""
        for address in await self._discovery.samplers():
            sampler = self._samplers[address] = Sampler(address, self._concurrency, self._change, self._note)
            self._watches[address] = asyncio.create_task(_watch_forever(sampler), name=f"watch {address}")
        await asyncio.gather(*(sampler.refresh() for sampler in self._samplers.values()))

    async def close(self) -> None:
        """Stops watching and closes the channels."""
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        await asyncio.gather(*(sampler.client.close() for sampler in self._samplers.values()))

    @property
    def up(self) -> list[Sampler]:
        """Samplers that answer."""
        return [sampler for sampler in self._samplers.values() if sampler.up.is_set()]

    @property
    def info(self) -> sampler_pb2.GetSamplerInfoResponse | None:
        """What a sampler serves: they are all alike. None before one was ever seen."""
        return next((sampler.info for sampler in self._samplers.values() if sampler.info is not None), None)

    async def wait_up(self, timeout_s: float) -> None:
        """Returns once a sampler answers, or after `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._any_up.wait(), max(timeout_s, 0.0))

    def pick(self, snapshot_id: str, prompt: model_input_pb2.RenderedInput) -> Sampler:
        """A sampler that holds the snapshot if possible: the one that has seen most of the prompt, or the least busy.

        Raises Unavailable if none is up.
        """
        if not self.up:
            raise Unavailable("no sampler answers")
        holders = [s for s in self.up if snapshot_id in s.adapters or snapshot_id == s.residency.resident]
        least = min(self.up, key=_queued)
        best = min(holders, key=_queued, default=least)
        # A holder is preferred until it is much busier: then loading the snapshot elsewhere pays.
        if best.queued > 2 * least.queued + 8:
            best = least
        keys = prefix_keys(snapshot_id, prompt)
        seen = self._affinity.longest(keys)
        affine = min((s for s in holders if s.instance_id in seen), key=_queued, default=best)
        # A cached prefix is soon computed again: it is worth a short wait only.
        if affine.queued <= 1.25 * least.queued + 4:
            best = affine
        self._affinity.note(keys, best.instance_id)
        return best

    def _note(self) -> None:
        if self.up:
            self._any_up.set()
        else:
            self._any_up.clear()


def _queued(sampler: Sampler) -> int:
    return sampler.queued


async def _watch_forever(sampler: Sampler) -> None:
    while True:
        await asyncio.sleep(_POLL_S if sampler.up.is_set() else _POLL_DOWN_S)
        await sampler.refresh()
