"""Which adapters the engine holds, who uses them, and which one goes when there is no room."""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fovea.wire.errors import ResourceExhausted
from services.sampler import sampler_metrics
from services.sampler.engine_api import AdapterName


@dataclass(eq=False)
class HeldAdapter:
    """One adapter version in the engine."""

    snapshot_id: str
    engine_name: AdapterName
    digest: str
    size_bytes: int
    user_count: int = 0
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def in_use(self) -> Iterator[AdapterName]:
        """Keeps the adapter in the engine."""
        self.user_count += 1
        self.drained.clear()
        try:
            yield self.engine_name
        finally:
            self.user_count -= 1
            if not self.user_count:
                self.drained.set()


class AdapterShelf:
    """The held adapters, least recently used first. Knows nothing of the engine: callers tell it what leaves.

    Args:
        max_count: The most adapters.
        max_bytes: The most memory of all of them.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, HeldAdapter] = OrderedDict()
        self._arriving: list[int] = []
        self._numbers = itertools.count(1)

    def snapshot_ids(self) -> list[str]:
        """What is held."""
        return list(self._held)

    def find(self, snapshot_id: str) -> HeldAdapter | None:
        """The adapter, which is now the one used last, or None."""
        held = self._held.get(snapshot_id)
        if held is not None:
            self._held.move_to_end(snapshot_id)
        return held

    def name_anew(self, snapshot_id: str) -> AdapterName:
        """A name for the engine that was never used."""
        number = next(self._numbers)
        return AdapterName(f"{snapshot_id}#{number}", number)

    def leaving_for(self, size_bytes: int) -> list[HeldAdapter]:
        """The idle adapters, least recently used first, that must leave before one more of this size fits.

        Raises ResourceExhausted if that is not enough: adapters in use never leave, nor do those on their way.
        """
        leaving: list[HeldAdapter] = []
        count = len(self._held) + len(self._arriving)
        used_bytes = sum(held.size_bytes for held in self._held.values()) + sum(self._arriving)
        for held in self._held.values():
            if count < self._max_count and used_bytes + size_bytes <= self._max_bytes:
                break
            if not held.user_count:
                leaving.append(held)
                count, used_bytes = count - 1, used_bytes - held.size_bytes
        if count >= self._max_count or used_bytes + size_bytes > self._max_bytes:
            raise ResourceExhausted(
                f"no room for an adapter of {size_bytes} bytes: {count} adapters of {used_bytes} bytes are in use or "
                f"arriving, the limits are {self._max_count} adapters and {self._max_bytes} bytes"
            )
        return leaving

    @contextmanager
    def room_for(self, size_bytes: int) -> Iterator[list[HeldAdapter]]:
        """Keeps room for one more adapter; gives those that leave for it, which no request can use from now on.

        Raises ResourceExhausted as `leaving_for` does.
        """
        leaving = self.leaving_for(size_bytes)
        for held in leaving:  # all before anybody else runs: an idle one may be asked for the next moment
            self.take_out(held.snapshot_id)
        self._arriving.append(size_bytes)
        try:
            yield leaving
        finally:
            self._arriving.remove(size_bytes)

    def add(self, held: HeldAdapter) -> None:
        """Puts an adapter in, as the one used last."""
        self._held[held.snapshot_id] = held
        sampler_metrics.ADAPTERS.set(len(self._held))

    def take_out(self, snapshot_id: str) -> HeldAdapter | None:
        """Makes an adapter unknown to new requests; those that use it go on."""
        held = self._held.pop(snapshot_id, None)
        sampler_metrics.ADAPTERS.set(len(self._held))
        return held
