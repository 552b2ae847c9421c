"""Images that gRPC clients upload before the inputs that name them. They are held in memory; the least recently used
are evicted first.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable

from cachetools import LRUCache

from fovea.api.v1 import model_input_pb2
from fovea.wire.conventions import MAX_IMAGE_BYTES
from fovea.wire.errors import InvalidInput, NotFound

_CAPACITY_BYTES = 512 * 2**20


class UploadedImages:
    """Uploaded images by owner and SHA-256. When the total is above the capacity, the owner with the most bytes loses
    images.

    An owner cannot see images of others, so that the cache does not reveal what others work on.
    """

    def __init__(self, capacity_bytes: int = _CAPACITY_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._images: defaultdict[str, LRUCache[str, bytes]] = defaultdict(lambda: LRUCache(capacity_bytes, len))

    def put(self, owner: str, sha256: str, data: bytes) -> None:
        """Stores an image. Raises InvalidInput if it is too large or does not match its digest."""
        if len(data) > MAX_IMAGE_BYTES:
            raise InvalidInput(f"the image has {len(data)} bytes; at most {MAX_IMAGE_BYTES}", field="data")
        if hashlib.sha256(data).hexdigest() != sha256:
            raise InvalidInput(f"the image that arrived does not have SHA-256 {sha256}", field="sha256")
        self._images[owner][sha256] = data
        while sum(held.currsize for held in self._images.values()) > self._capacity_bytes:
            max(self._images.values(), key=lambda held: held.currsize).popitem()

    def inline(
        self,
        owner: str,
        model_input: model_input_pb2.ModelInput,
        field: str,
        count: Callable[[int], None] = lambda size_bytes: None,
    ) -> model_input_pb2.ModelInput:
        """Returns the input with the owner's uploaded images in place of their digests, so that the result is
        self-contained.

        Args:
            owner: The owner that uploaded them.
            model_input: The input; it is not changed.
            field: Its name, for errors.
            count: Called with the size of each image before it is copied; an exception ends the call.

        Raises NotFound for an image that the owner did not upload or that was evicted.
        """
        if not any(chunk.image_reference.sha256 for chunk in model_input.chunks):
            return model_input
        whole = model_input_pb2.ModelInput()
        for index, chunk in enumerate(model_input.chunks):
            reference = chunk.image_reference
            if not reference.sha256:
                whole.chunks.append(chunk)
                continue
            data = self._images[owner].get(reference.sha256)
            if data is None:
                name = f"{field}.chunks[{index}].image_reference.sha256"
                raise NotFound(
                    f"{name} {reference.sha256} is not uploaded, or was evicted: call UploadImage and retry", field=name
                )
            count(len(data))
            image = model_input_pb2.ImageChunk(data=data, format=reference.format, max_side=reference.max_side)
            if reference.HasField("expected_token_count"):
                image.expected_token_count = reference.expected_token_count
            whole.chunks.add(image=image)
        return whole
