"""The caches of the renderer: vision tensors by digest, and encoded images that clients have uploaded."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from cachetools import LRUCache

from fovea.runtime.tasks import SingleFlight
from fovea.wire.conventions import MAX_IMAGE_BYTES
from fovea.wire.errors import FeatureEvicted, InvalidInput, NotFound, ResourceExhausted
from fovea.wire.features import FeatureTensors, size_bytes
from fovea_services.renderer import renderer_metrics
from fovea_services.renderer.worker_pool import ProcessedImage

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Feature:
    """The vision tensors of one image. `digest` identifies its bytes and the processor's fingerprint."""

    digest: str
    tensors: FeatureTensors
    tensors_sha256: str
    size_bytes: int


class FeatureCache:
    """Caches up to `limit_bytes` of vision tensors and evicts the least recently used. Each image is processed once."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held: LRUCache[str, Feature] = LRUCache(limit_bytes, getsizeof=lambda feature: feature.size_bytes)
        self._making: SingleFlight[str, Feature] = SingleFlight(abandon=True)

    def held(self, digest: str) -> Feature:
        """Returns the feature of a digest. Raises FeatureEvicted if it is not cached, or not any more."""
        feature = self._held.get(digest)
        if feature is None:
            raise FeatureEvicted(f"the tensors of image {digest} are not held; render the image again", digest=digest)
        return feature

    async def get(self, digest: str, process: Callable[[], Awaitable[ProcessedImage]]) -> Feature:
        """Returns the feature of a digest; calls `process` unless it is cached or already being processed.

        All concurrent callers get the same result or the same error. The work is cancelled when the last caller is.
        """
        feature = self._held.get(digest)
        if feature is not None:
            renderer_metrics.FEATURE_LOOKUPS.labels("hit").inc()
            return feature
        renderer_metrics.FEATURE_LOOKUPS.labels("joined" if digest in self._making else "miss").inc()
        return await self._making.run(digest, lambda: self._make(digest, process))

    async def _make(self, digest: str, process: Callable[[], Awaitable[ProcessedImage]]) -> Feature:
        processed = await process()
        feature = Feature(digest, processed.tensors, processed.tensors_sha256, size_bytes(processed.tensors))
        if feature.size_bytes > self.limit_bytes:
            raise ResourceExhausted(
                f"the tensors of one image have {feature.size_bytes} bytes, above the {self.limit_bytes} bytes"
                " that the renderer may hold (setting feature_cache_bytes)"
            )
        self._held[digest] = feature
        renderer_metrics.IMAGES_RENDERED.inc()
        renderer_metrics.IMAGE_SECONDS.observe(processed.seconds)
        renderer_metrics.FEATURE_BYTES.inc(feature.size_bytes)
        renderer_metrics.HELD_BYTES.labels("features").set(self._held.currsize)
        return feature


class ImageCache:
    """Caches up to `limit_bytes` of encoded images by SHA-256 and evicts the least recently used."""

    def __init__(self, limit_bytes: int) -> None:
        self._held: LRUCache[str, bytes] = LRUCache(limit_bytes, getsizeof=len)

    def held(self, sha256: str, field: str) -> bytes:
        """Returns the bytes of an image. Raises NotFound, with `field`, if it is not cached."""
        data = self._held.get(sha256)
        renderer_metrics.IMAGE_LOOKUPS.labels("miss" if data is None else "hit").inc()
        if data is None:
            raise NotFound(f"{field}: no image with SHA-256 {sha256} is held; send it by PutImage", field=field)
        return data

    async def put(self, pieces: AsyncIterator[tuple[str, bytes]]) -> int:
        """Stores an image that arrives in pieces of (sha256, bytes); returns its size in bytes.

        The first piece contains the SHA-256 of the image. Raises InvalidInput if the SHA-256 is malformed or is not
        that of the bytes, or if the image is empty or too large; ResourceExhausted if it is larger than the cache.
        """
        expected, data = "", bytearray()
        async for sha256, piece in pieces:
            if not expected:
                if not _SHA256.fullmatch(sha256):
                    raise InvalidInput(
                        f"sha256 {sha256[:80]!r} is not 64 lower-case hexadecimal digits", field="sha256"
                    )
                expected = sha256
            data += piece
            if len(data) > MAX_IMAGE_BYTES:
                raise InvalidInput(
                    f"the image has more than {MAX_IMAGE_BYTES} bytes, the limit; send a smaller one", field="data"
                )
        if not data:
            raise InvalidInput("the image has no bytes", field="data")
        found = (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()
        if found != expected:
            raise InvalidInput(f"sha256 is {expected} but the bytes have {found}; send them again", field="sha256")
        if len(data) > self._held.maxsize:
            raise ResourceExhausted(
                f"the image has {len(data)} bytes, above the {self._held.maxsize} bytes that the renderer may hold"
                " (setting image_store_bytes)"
            )
        self._held[expected] = bytes(data)
        renderer_metrics.HELD_BYTES.labels("images").set(self._held.currsize)
        return len(data)
