"""Vision tensors by digest: each image is processed once, however many ask for it and however often."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property

from fovea.runtime.byte_lru import ByteLru
from fovea.wire.errors import FeatureEvicted, ResourceExhausted
from fovea.wire.features import FeatureTensors, size_bytes
from services.renderer import metrics
from services.renderer.families.base import Grid
from services.renderer.worker_process import ProcessedImage


@dataclass(frozen=True)
class Feature:
    """The rendered tensors of one image, under the digest of its bytes and of the processor's fingerprint."""

    digest: str
    tensors: FeatureTensors
    tensors_sha256: str
    size_bytes: int

    @cached_property
    def grid(self) -> Grid:
        """The patch grid before merging."""
        time, height, width = (int(extent) for extent in self.tensors["image_grid_thw"].reshape(3))
        return time, height, width


@dataclass
class _Flight:
    """An image that is being processed, and how many wait for it."""

    task: asyncio.Task[Feature]
    waiter_count: int = 0


class FeatureStore:
    """Holds up to `limit_bytes` of tensors, the longest unused going first."""

    def __init__(self, limit_bytes: int) -> None:
        self._held: ByteLru[Feature] = ByteLru(limit_bytes)
        self._flights: dict[str, _Flight] = {}

    @property
    def limit_bytes(self) -> int:
        """The most bytes of tensors that are held."""
        return self._held.limit_bytes

    def held(self, digest: str) -> Feature:
        """The feature of a digest. Raises FeatureEvicted if it is not held (any more)."""
        feature = self._held.get(digest)
        if feature is None:
            raise FeatureEvicted(f"the tensors of image {digest} are not held; render the image again", digest=digest)
        return feature

    async def get(self, digest: str, process: Callable[[], Awaitable[ProcessedImage]]) -> Feature:
        """The feature of a digest; `process` is called unless it is held or being processed already.

        Everybody who waits gets the same result or the same error. The work is dropped when the last one gives up.
        """
        feature = self._held.get(digest)
        if feature is not None:
            metrics.FEATURE_LOOKUPS.labels("hit").inc()
            return feature
        flight = self._flights.get(digest)
        metrics.FEATURE_LOOKUPS.labels("joined" if flight else "miss").inc()
        if flight is None:
            flight = _Flight(asyncio.create_task(self._make(digest, process)))
            self._flights[digest] = flight
        flight.waiter_count += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiter_count -= 1
            if flight.waiter_count == 0:
                flight.task.cancel()
                if self._flights.get(digest) is flight:
                    del self._flights[digest]

    async def _make(self, digest: str, process: Callable[[], Awaitable[ProcessedImage]]) -> Feature:
        processed = await process()
        feature = Feature(digest, processed.tensors, processed.tensors_sha256, size_bytes(processed.tensors))
        try:
            self._held.put(digest, feature, feature.size_bytes)
        except ValueError:
            raise ResourceExhausted(
                f"the tensors of one image have {feature.size_bytes} bytes, above the {self.limit_bytes} bytes"
                " that the renderer may hold (setting feature_cache_bytes)"
            ) from None
        metrics.IMAGES_RENDERED.inc()
        metrics.IMAGE_SECONDS.observe(processed.seconds)
        metrics.FEATURE_BYTES.inc(feature.size_bytes)
        metrics.HELD_BYTES.labels("features").set(self._held.used_bytes)
        return feature
