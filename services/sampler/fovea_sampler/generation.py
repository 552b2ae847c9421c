"""Runs sample requests: holds their weights, fetches their images, and draws their sequences concurrently."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from fovea.api.v1 import model_input_pb2
from fovea.client.inference import FeatureCache, RendererClient
from fovea.runtime import tracing
from fovea.runtime.tasks import BackgroundTasks, SingleFlight, run_to_end
from fovea.vision.vision_family import VisionFamily
from fovea.wire.errors import (
    DeadlineExceeded,
    FeatureEvicted,
    InvalidInput,
    NotFinite,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from fovea.wire.rendered_input import ImageSpan
from fovea.wire.tensors import FeatureTensors, check_feature
from fovea_sampler import sampler_metrics
from fovea_sampler.engine_api import AdapterName, Delta, Event, PromptResult, SampleEngine, SampleSpec
from fovea_sampler.weight_store import WeightStore

logger = logging.getLogger(__name__)

_DONE = None
Queue = asyncio.Queue[Event | BaseException | None]
_MOST_RENDERERS = 256
_SPANS_FIELD = "prompt.spans"


class ImageFetcher:
    """A fetcher and cache of vision tensors from renderers. Concurrent requests for one image share one fetch.

    Args:
        vision: Declares the tensors that an image must have; None for a text model.
        limit_bytes: The most bytes of cached tensors; the least recently used are evicted first.
        default_source: The host:port of the renderer to ask when a request names none.
        timeout_s: Seconds that a renderer may take to answer.
    """

    def __init__(
        self, vision: VisionFamily | None, limit_bytes: int, default_source: str, timeout_s: float = 60.0
    ) -> None:
        self._timeout_s = timeout_s
        self._kept = FeatureCache(vision, limit_bytes, default_source)
        self._fetches: SingleFlight[tuple[str, str], FeatureTensors] = SingleFlight()
        self._clients: OrderedDict[str, RendererClient] = OrderedDict()
        self._closing = BackgroundTasks()

    async def fetch(self, spans: Sequence[ImageSpan]) -> list[FeatureTensors]:
        """Returns the tensors of each span, in order.

        Raises FeatureEvicted if the renderer no longer holds an image or does not answer, InvalidInput if an image's
        tensors do not fit the request, Internal if they do not have the digest that the request gives.
        """
        return list(await asyncio.gather(*(self._fetch_one(span) for span in spans)))

    async def close(self) -> None:
        """Cancels the running fetches and closes all channels."""
        await self._fetches.cancel()
        await self._closing.cancel()
        for client in self._clients.values():
            await client.close()

    async def _fetch_one(self, span: ImageSpan) -> FeatureTensors:
        feature = span.feature
        tensors = self._kept.get(feature)
        if tensors is not None:
            sampler_metrics.FEATURES.labels("hit").inc()
        else:
            sampler_metrics.FEATURES.labels("miss").inc()
            key = (feature.digest, feature.tensors_sha256)
            tensors = await self._fetches.run(key, lambda: self._ask_renderer(feature))
        self._kept.check(span, tensors, _SPANS_FIELD)
        return tensors

    async def _ask_renderer(self, feature: model_input_pb2.VisionFeature) -> FeatureTensors:
        source = self._kept.source_of(feature, f"{_SPANS_FIELD}[].feature")
        try:
            fetched = await self._client(source).fetch_features([feature.digest], self._timeout_s)
        except (NotFound, Unavailable, DeadlineExceeded) as error:
            # A renderer that is gone has lost its images too. UNAVAILABLE would make clients blame this sampler.
            raise FeatureEvicted(
                f"the renderer at {source} did not return image {feature.digest}; render it again: {error.message}",
                digest=feature.digest,
            ) from error
        tensors = check_feature(feature, fetched.get(feature.digest))
        self._kept.put(feature, tensors)
        sampler_metrics.FEATURE_BYTES.set(self._kept.used_bytes)
        return tensors

    def _client(self, source: str) -> RendererClient:
        if source not in self._clients:
            try:
                self._clients[source] = RendererClient(source)
            except (grpc.RpcError, ValueError) as error:
                raise InvalidInput(
                    f"the renderer's address {source!r} is not host:port: {error}", field=_SPANS_FIELD
                ) from error
            if len(self._clients) > _MOST_RENDERERS:  # Renderers come and go: those not asked for longest may be gone.
                address, client = self._clients.popitem(last=False)
                self._closing.start(client.channel.close(self._timeout_s), f"closing the channel to {address}")
        self._clients.move_to_end(source)
        return self._clients[source]


class Generation:
    """The execution of sample requests.

    Args:
        engine: Draws the tokens.
        weights: Keeps a request's snapshot loaded while the request samples from it.
        images: Fetches the vision tensors of a request's images.
        max_requests: The most requests in flight; further requests are refused.
        keeps_cache: Whether the engine keeps the KV cache of requests that continue with newer weights.
    """

    def __init__(
        self,
        engine: SampleEngine,
        weights: WeightStore,
        images: ImageFetcher,
        max_requests: int,
        keeps_cache: bool = False,
    ) -> None:
        self._engine = engine
        self._keeps_cache = keeps_cache
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
            queue, snapshot_id = Queue(), spec.request.snapshot_id
            async with (
                self._weights.use(snapshot_id, queue.put_nowait if self._follows(spec) else None) as adapter,
                aclosing(self._draw_all(spec, self._engine.prompt(spec, images), adapter, queue)) as events,
            ):
                try:
                    async for event in events:
                        _count(spec, event)
                        yield event
                except NotFinite as error:
                    if adapter is None:  # newer weights may have replaced those that the request names
                        snapshot_id = self._weights.resident_snapshot_id or snapshot_id
                    logger.warning("refusing snapshot %r from now on: %s", snapshot_id, error)
                    raise self._weights.quarantine(snapshot_id, error.message) from error
        finally:
            self._in_flight -= 1
            sampler_metrics.IN_FLIGHT.dec()

    def _follows(self, spec: SampleSpec) -> bool:
        """Returns whether a request continues with newer weights. With a kept cache, scores of a prompt would mix."""
        return spec.request.follow_updates and not (self._keeps_cache and spec.scores_prompt)

    async def _draw_all(
        self, spec: SampleSpec, prompt: Any, adapter: AdapterName | None, queue: Queue
    ) -> AsyncGenerator[Event]:
        """Merges the events of all sequences. Deltas that arrive before the PromptResult wait for it."""
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
        queue: Queue,
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
