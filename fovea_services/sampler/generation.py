"""How one sample request runs: weights held, images fetched, its sequences drawn side by side."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fovea.runtime import tracing
from fovea.runtime.tasks import run_to_end
from fovea.wire.errors import NotFinite, ResourceExhausted
from fovea_services.sampler import sampler_metrics
from fovea_services.sampler.engine_api import AdapterName, Delta, Event, PromptResult, SampleEngine, SampleSpec
from fovea_services.sampler.image_fetching import ImageFetcher
from fovea_services.sampler.weight_store import WeightStore

logger = logging.getLogger(__name__)

_DONE = None


class Generation:
    """Runs sample requests.

    Args:
        engine: Draws tokens.
        snapshots: Hands out the weights.
        features: Hands out the images.
        max_requests: Requests in flight before further ones are refused.
    """

    def __init__(self, engine: SampleEngine, weights: WeightStore, images: ImageFetcher, max_requests: int) -> None:
        self._engine = engine
        self._weights = weights
        self._images = images
        self._max_requests = max_requests
        self._in_flight = 0

    async def run(self, spec: SampleSpec) -> AsyncGenerator[Event]:
        """PromptResult, then Deltas of all sequences as they come. Closing it aborts all of them.

        Raises SnapshotNotLoaded, FeatureEvicted, InvalidInput, ResourceExhausted, Unavailable; NotFinite if the
        snapshot's log-probabilities are not finite, now or in an earlier request.
        """
        if self._in_flight >= self._max_requests:
            raise ResourceExhausted(f"{self._max_requests} requests are in flight; try again later")
        self._in_flight += 1
        sampler_metrics.IN_FLIGHT.inc()
        try:
            # Asked before the images are fetched, so that a push can begin at once; asked again when they are there.
            self._weights.require(spec.request.snapshot_id)
            images = await self._images.fetch(spec.spans)
            async with (
                self._weights.use(spec.request.snapshot_id) as adapter,
                aclosing(self._draw_all(spec, self._engine.prompt(spec, images), adapter)) as events,
            ):
                try:
                    async for event in events:
                        _count(spec, event)
                        yield event
                except NotFinite as error:
                    logger.warning("snapshot %r is refused from now on: %s", spec.request.snapshot_id, error)
                    raise self._weights.quarantine(spec.request.snapshot_id, error.message) from error
        finally:
            self._in_flight -= 1
            sampler_metrics.IN_FLIGHT.dec()

    async def _draw_all(self, spec: SampleSpec, prompt: Any, adapter: AdapterName | None) -> AsyncGenerator[Event]:
        """Merges the sequences; whatever comes before the prompt's facts waits for them."""
        queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._draw_one(spec, index, prompt, adapter, queue))
            for index in range(spec.request.sample_count)
        ]
        early: list[Event] | None = []
        running = len(tasks)
        try:
            while running:
                item = await queue.get()
                if item is _DONE:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                elif isinstance(item, PromptResult):
                    yield item
                    for event in early or ():
                        yield event
                    early = None
                elif early is not None:
                    early.append(item)
                else:
                    yield item
        finally:
            # To the end, whoever cancels again: an adapter must stay until the engine was told of every abort.
            await run_to_end(_cancel(tasks))

    async def _draw_one(
        self,
        spec: SampleSpec,
        index: int,
        prompt: Any,
        adapter: AdapterName | None,
        queue: asyncio.Queue[Event | BaseException | None],
    ) -> None:
        try:
            with tracing.span("engine", sequence=index, prompt_token_count=len(spec.tokens)):
                async with aclosing(self._engine.sample(spec, index, prompt, adapter)) as events:
                    async for event in events:
                        # The prompt is one; sequence 0 speaks for it.
                        if isinstance(event, Delta) or index == 0:
                            queue.put_nowait(event)
            queue.put_nowait(_DONE)
        except Exception as error:  # handed on: `_draw_all` raises it to the caller
            queue.put_nowait(error)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _count(spec: SampleSpec, event: Event) -> None:
    if isinstance(event, PromptResult):
        sampler_metrics.TOKENS.labels("prompt").inc(len(spec.tokens))
        sampler_metrics.TOKENS.labels("prompt_cached").inc(event.cached_token_count)
    else:
        sampler_metrics.TOKENS.labels("sampled").inc(len(event.tokens))
