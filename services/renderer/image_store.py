"""Encoded images that clients uploaded ahead of a Render call, by SHA-256."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator

from fovea.runtime.byte_lru import ByteLru
from fovea.wire.errors import InvalidInput, NotFound, ResourceExhausted
from fovea.wire.limits import MAX_IMAGE_BYTES
from services.renderer import metrics

_SHA256 = re.compile(r"[0-9a-f]{64}")


class ImageStore:
    """Holds up to `limit_bytes` of encoded images, the longest unused going first."""

    def __init__(self, limit_bytes: int) -> None:
        self._held: ByteLru[bytes] = ByteLru(limit_bytes)

    def held(self, sha256: str, field: str) -> bytes:
        """The bytes of an image. Raises NotFound, naming `field`, if it is not held."""
        data = self._held.get(sha256)
        metrics.IMAGE_LOOKUPS.labels("miss" if data is None else "hit").inc()
        if data is None:
            raise NotFound(f"{field}: no image with SHA-256 {sha256} is held; send it by PutImage", field=field)
        return data

    async def put(self, pieces: AsyncIterator[tuple[str, bytes]]) -> int:
        """Takes an image in pieces of (sha256, bytes), the first of which says the SHA-256; returns its size in bytes.

        Raises InvalidInput if the SHA-256 is no such or another than that of the bytes, the image is empty, or above
        the limit; ResourceExhausted if the store is smaller than the image.
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
        try:
            self._held.put(expected, bytes(data), len(data))
        except ValueError:
            raise ResourceExhausted(
                f"the image has {len(data)} bytes, above the {self._held.limit_bytes} bytes that the renderer may hold"
                " (setting image_store_bytes)"
            ) from None
        metrics.HELD_BYTES.labels("images").set(self._held.used_bytes)
        return len(data)
