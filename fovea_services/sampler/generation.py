"""Runs sample requests: holds their weights, fetches their images, and draws their sequences concurrently."""

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
        engine: Draws the tokens.
        weights: Holds a request's snapshot in place while the request samples from it.
        images: Fetches the vision tensors of a request's images.
        max_requests: Requests in flight above which further requests are refused.
    """

    def __init__(self, engine: SampleEngine, weights: WeightStore, images: ImageFetcher, max_requests: int) -> None:
        self._engine = engine
        self._weights = weights
        self._images = images
        self._max_requests = max_requests
        self._in_flight = 0

    async def run(self, spec: SampleSpec) -> AsyncGenerator[Event]:
        """Yields a PromptResult, then the Deltas of all sequences as they arrive. Closing it aborts all sequences.

        Raises SnapshotNotLoaded, FeatureEvicted, InvalidInput, ResourceExhausted, Unavailable; NotFinite if the
        snapshot's log-probabilities are not finite, in this request or in an earlier one.
        """
        if self._in_flight >= self._max_requests:
            raise ResourceExhausted(f"{self._max_requests} requests are in flight; try again later")
        self._in_flight += 1
        sampler_metrics.IN_FLIGHT.inc()
        try:
            # Checked before the images are fetched, so that the client can push a missing snapshot at once. `use` below
            # checks again, because the snapshot may have been dropped meanwhile.
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
                    logger.warning("refusing snapshot %r from now on: %s", spec.request.snapshot_id, error)
                    raise self._weights.quarantine(spec.request.snapshot_id, error.message) from error
        finally:
            self._in_flight -= 1
            sampler_metrics.IN_FLIGHT.dec()

    async def _draw_all(self, spec: SampleSpec, prompt: Any, adapter: AdapterName | None) -> AsyncGenerator[Event]:
        """Merges the events of all sequences. Deltas that arrive before the PromptResult wait for it."""
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
            # Runs to its end even if this task is cancelled again: the adapter must stay in the engine until the engine
            # has aborted every sequence that uses it.
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
                        # All sequences share one prompt: only sequence 0's PromptResult is passed on.
                        if isinstance(event, Delta) or index == 0:
                            queue.put_nowait(event)
            queue.put_nowait(_DONE)
        except Exception as error:  # `_draw_all` raises it to the caller
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
