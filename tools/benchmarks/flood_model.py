"""Simulates a flood of samples next to another tenant: `python -m benchmarks.flood_model`.

Uses the gateway's own queue and a virtual clock. An engine step takes a base time plus a time per sequence in its
batch. The result shows the effect of the queue's order on devices of any speed, identically on every machine, without
the other load of a machine.
"""

import asyncio
import itertools
import math
import random
import selectors
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.figure import emit, quantile
from fovea_gateway.access.fair_queue import FairQueue, Turn

_FLOOD = 1000
"""Sequences that the flooding tenant has in flight."""
_PROMPT_TOKENS, _LEAST_TOKENS, _MOST_TOKENS = 32, 16, 64
_SENT_S, _RETURNED_S = 0.02, 0.01
"""Seconds from the client to the queue, and from the sampler back."""
_SETTLE_S, _WINDOW_S = 2.0, 5.0
_SAMPLES = 60
_QUIET, _LOUD = "quiet", "flood"


class _Clock(selectors.SelectSelector):
    """A selector that advances the virtual time when nothing can run."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        self.now += 0.0 if ready else timeout or 0.0
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with that clock."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


@dataclass(frozen=True)
class Device:
    """Milliseconds of an engine step, and the number of sequences in a step."""

    name: str
    step_ms: float
    sequence_ms: float
    batch: int


DEVICES = (
    # From benchmarks/results for 4B: 0.476 s for 128 tokens of one sequence, 0.812 s for each of 64, 2.24 s for each of
    # 256.
    Device("H200", 3.7, 0.042, 64),
    Device("H200", 3.7, 0.054, 256),
    # The tiny model, on two cores shared with clients and the gateway.
    Device("two cores", 3.0, 0.085, 64),
)


@dataclass(frozen=True)
class Found:
    """Result of one simulation.

    Attributes:
        alone: Seconds of the quiet tenant's sequential samples.
        beside: The same next to the flood.
        flood_alone: Tokens/s of the flood.
        flood_beside: The same next to those samples.
        share: The quiet tenant's share of all tokens when it sends many samples.
        total: Tokens/s of both then.
    """

    alone: list[float]
    beside: list[float]
    flood_alone: float
    flood_beside: float
    share: float
    total: float


class World:
    """An engine behind a fair queue, and its tenants.

    Args:
        beside: Value of the setting `sampler_beside`, except that 0 means all slots.
        samples: Samples per request of the flood.
    """

    def __init__(self, device: Device, beside: int, samples: int = 1) -> None:
        self._device, self._samples = device, samples
        self._queue = FairQueue(math.ceil(1.25 * device.batch), lambda owner: 1.0, beside=beside)
        self._random = random.Random(1)
        self._sent: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._any_sent = asyncio.Event()
        self._tokens: Counter[str] = Counter()

    async def measure(self, asked: int) -> Found:
        """Returns all figures. The quiet tenant has `asked` samples in flight for the share."""
        async with self._running(_LOUD, _FLOOD // self._samples):
            flood_alone = (await self._rates())[_LOUD]
        alone = [await self._request(_QUIET) for _ in range(_SAMPLES)]
        async with self._running(_LOUD, _FLOOD // self._samples):
            begun, before = asyncio.get_running_loop().time(), self._tokens[_LOUD]
            beside = [await self._request(_QUIET) for _ in range(_SAMPLES)]
            flood_beside = (self._tokens[_LOUD] - before) / (asyncio.get_running_loop().time() - begun)
            async with self._running(_QUIET, asked):
                rates = await self._rates()
        total = rates[_QUIET] + rates[_LOUD]
        return Found(alone, beside, flood_alone, flood_beside, rates[_QUIET] / total, total)

    @asynccontextmanager
    async def _running(self, owner: str, requests: int) -> AsyncIterator[None]:
        """Keeps a number of an owner's requests in flight; all are finished at the end."""
        stopping = asyncio.Event()
        tasks = [asyncio.create_task(self._keep(owner, stopping)) for _ in range(requests)]
        await asyncio.sleep(_SETTLE_S)
        yield
        stopping.set()
        await asyncio.gather(*tasks)

    async def _rates(self) -> dict[str, float]:
        before = self._tokens.copy()
        await asyncio.sleep(_WINDOW_S)
        return {owner: (self._tokens[owner] - before[owner]) / _WINDOW_S for owner in (_QUIET, _LOUD)}

    async def _keep(self, owner: str, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            await self._request(owner, self._samples if owner == _LOUD else 1)

    async def _request(self, owner: str, samples: int = 1) -> float:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        lengths = [self._random.randint(_LEAST_TOKENS, _MOST_TOKENS) for _ in range(samples)]
        turn = Turn(owner, _PROMPT_TOKENS + sum(lengths), size=samples)

        async def draw(length: int) -> None:
            ended = loop.create_future()
            self._sent.append((length, ended))
            self._any_sent.set()
            await ended
            self._queue.free(turn, 1)

        await asyncio.sleep(_SENT_S)
        async with self._queue.place(turn):
            await asyncio.gather(*map(draw, lengths))
        await asyncio.sleep(_RETURNED_S)
        self._tokens[owner] += _PROMPT_TOKENS + sum(lengths)
        return loop.time() - begun

    async def run_engine(self) -> None:
        """Runs engine steps forever."""
        device = self._device
        batch: list[tuple[int, asyncio.Future[None]]] = []
        while True:
            while self._sent and len(batch) < device.batch:
                batch.append(self._sent.popleft())
            if not batch:
                self._any_sent.clear()
                await self._any_sent.wait()
                continue
            await asyncio.sleep((device.step_ms + device.sequence_ms * len(batch)) / 1000)
            for left, ended in batch:
                if left == 1:
                    ended.set_result(None)
            batch = [(left - 1, ended) for left, ended in batch if left > 1]


def measure(device: Device, beside: int = 0, samples: int = 1, asked: int = 400) -> Found:
    """Returns the result of a flood on this device."""

    async def begin() -> Found:
        world = World(device, beside, samples)
        engine = asyncio.create_task(world.run_engine())
        found = await world.measure(asked)
        engine.cancel()
        return found

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(begin())


def main() -> None:
    """Prints the figures."""
    for device, samples, part in itertools.product(DEVICES, (1, 16), (0, 1, 2, 4)):
        beside = device.batch // part if part else 0
        found, few = measure(device, beside, samples), measure(device, beside, samples, asked=16)
        sizes: dict[str, Any] = {"device": device.name, "batch": device.batch, "beside": beside, "samples": samples}
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            times = [[quantile(some, share)] for some in (found.beside, found.alone)]
            emit(f"flood_model.samples.{name}", times[0], "s", times[1], **sizes)
        emit("flood_model.flood", [found.flood_beside], "tokens/s", [found.flood_alone], **sizes)
        for asked, one in ((16, few), (400, found)):
            emit("flood_model.share", [one.share], "of the tokens", asked=asked, **sizes)
            emit("flood_model.total", [one.total], "tokens/s", [one.flood_alone], asked=asked, **sizes)


if __name__ == "__main__":
    main()
