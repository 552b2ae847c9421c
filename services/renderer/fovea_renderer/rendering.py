"""Renders a model input: splices chunks of text and images into one sequence of tokens with vision features.

The cheap checks of all chunks come first: ids, headers, counts, length. Pixels are decoded only if all checks succeed.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from fovea.vision.vision_family import ImageAt, Replacement, TokenCounter, TokenIds, VisionFamily
from fovea.wire.errors import ContextOverflow, Internal, InvalidInput, ResourceExhausted
from fovea_renderer import image_header, renderer_metrics
from fovea_renderer.image_header import ImageHeader, InvalidChunk, chunk_field
from fovea_renderer.image_sources import Feature, FeatureCache, ImageCache, ImageFetcher
from fovea_renderer.input_messages import Chunk, ImageChunk, PlacedImage, RemoteImage, Rendered, UploadedImage
from fovea_renderer.worker_pool import ProcessedImage

Result = TypeVar("Result")

ProcessImage = Callable[[ImageHeader, bytes, int], Awaitable[ProcessedImage]]
"""Processes an image, given its header, the encoded file, and the most pixels of its longer side (0 keeps the size)."""

# Passing fewer bytes than this to a thread takes longer than hashing them.
_HASH_INLINE_BYTES = 256 * 1024


@dataclass(frozen=True)
class ImageSupport:
    """The image processing of a vision-language model.

    Args:
        family: The model's vision family, bound to the checkpoint.
        token_count: Returns the number of ids that replace an image of (width, height) pixels; None if the number is
            only known after processing.
        process: Converts one image into tensors.
        fingerprint: The identity of the image processor, a SHA-256 in hexadecimal.
    """

    family: VisionFamily
    token_count: TokenCounter | None
    process: ProcessImage
    fingerprint: str


@dataclass(frozen=True)
class ServedModel:
    """The served model: its name in the settings, the limits of its inputs, and its image support, None for text."""

    name: str
    model_type: str
    vocabulary_size: int
    max_context_length: int
    image_support: ImageSupport | None
    files: Mapping[str, str] = field(default_factory=dict)
    """The fingerprints of the model's files; see `model_files.fingerprints`."""


@dataclass(frozen=True)
class _CheckedImage:
    """An image with a checked header. If its token count is known before processing, that is checked as well.

    Attributes:
        index: The index of its chunk.
        chunk: Its chunk.
        data: The encoded file.
        header: Its header.
        max_side: The length of the longer side after shrinking, in pixels; 0 for an image that keeps its size.
        token_count: The number of ids; None if it is known only after processing, as for an image that is shrunk.
    """

    index: int
    chunk: ImageChunk
    data: bytes
    header: ImageHeader
    max_side: int
    token_count: int | None

    def check_expected(self, token_count: int) -> None:
        """Raises InvalidChunk if the client expects another number of ids than `token_count`."""
        expected = self.chunk.expected_token_count
        if expected not in (None, token_count):
            raise InvalidChunk(
                "expected_tokens",
                f"expected_tokens is {expected} but the image takes {token_count} tokens"
                f" ({self.header.width}x{self.header.height} pixels); send {token_count} or leave it out",
            )


class _ProcessedImage(NamedTuple):
    """The tensors of an image, and the ids that replace it."""

    feature: Feature
    replacement: Replacement


class Renderer:
    """Splices model inputs for one model.

    Args:
        model: The served model.
        features: The cache of vision tensors.
        images: The cache of uploaded images.
        fetcher: Fetches images by URL.
        source: host:port from which consumers fetch the tensors.
    """

    def __init__(
        self, model: ServedModel, features: FeatureCache, images: ImageCache, fetcher: ImageFetcher, source: str
    ) -> None:
        self.model = model
        self.features = features
        self.images = images
        self.source = source
        self._fetcher = fetcher
        reserved_ids = model.image_support.family.reserved_ids if model.image_support else ()
        self._first_reserved_id = min(reserved_ids, default=model.vocabulary_size)

    async def render(self, chunks: Sequence[Chunk]) -> Rendered:
        """Splices one input.

        Raises InvalidInput with the chunk and the fix, ContextOverflow for an input that is too long, and NotFound for
        an uploaded image that is not cached. Raises ResourceExhausted if too many images wait for a worker, or if an
        image needs more memory than a worker or the cache has. The other errors of `WorkerPool.process` are passed on.
        """
        previous_id = -1
        for index, chunk in enumerate(chunks):
            if isinstance(chunk, ImageChunk):
                previous_id = -1
            elif chunk.size:
                self._check_text(index, chunk, previous_id)
                previous_id = int(chunk[-1])
        images = await _first_error(
            [self._check_image(index, chunk) for index, chunk in enumerate(chunks) if isinstance(chunk, ImageChunk)]
        )
        # An image with an unknown count has at least one id. The exact length is checked after processing.
        self._check_length(chunks, [image.token_count or 1 for image in images])
        processed = await _first_error([self._process(image) for image in images])
        self._check_length(chunks, [len(image.replacement.ids) for image in processed])
        self._check_room([image.feature for image in processed])
        return self._splice(chunks, processed)

    def _check_text(self, index: int, ids: TokenIds, previous_id: int) -> None:
        """Raises InvalidInput for the first id that is outside the vocabulary or represents a missing image."""
        highest = int(ids.max())
        if ids.min() < 0 or highest >= self.model.vocabulary_size:
            at = int(np.flatnonzero((ids < 0) | (ids >= self.model.vocabulary_size))[0])
            raise InvalidChunk(
                "vocabulary",
                f"token {at} is {ids[at]}, outside the vocabulary; ids lie in 0..{self.model.vocabulary_size - 1}",
            ).at(index)
        if highest < self._first_reserved_id:
            return
        family = self._image_support().family
        lost = family.find_lost_image(ids, previous_id)
        if lost is not None:
            name = family.reserved_ids[int(ids[lost])]
            raise InvalidChunk(
                "reserved_token",
                f"token {lost} is {ids[lost]} ({name}), which stands for an image that text does not carry;"
                " leave it out and send the image as a chunk of its own",
            ).at(index)

    async def _check_image(self, index: int, chunk: ImageChunk) -> _CheckedImage:
        try:
            image_support = self._image_support()
            data = await self._bytes(index, chunk.source)
            header = image_header.read(data, chunk.format)
            max_side = chunk.max_side if chunk.max_side < max(header.width, header.height) else 0
            count = image_support.token_count
            token_count = None if count is None or max_side else count(header.width, header.height)
            image = _CheckedImage(index, chunk, data, header, max_side, token_count)
            if token_count is not None:
                image.check_expected(token_count)
            return image
        except InvalidChunk as error:
            raise error.at(index) from error

    def _image_support(self) -> ImageSupport:
        if self.model.image_support is None:
            raise InvalidChunk(
                "no_images",
                f"{self.model.name} ({self.model.model_type}) is a text-only model and takes no images;"
                " send text only or serve a vision-language model",
            )
        return self.model.image_support

    async def _bytes(self, index: int, source: bytes | UploadedImage | RemoteImage) -> bytes:
        if isinstance(source, UploadedImage):
            return self.images.held(source.sha256, chunk_field(index))
        if isinstance(source, RemoteImage):
            return await self._fetcher.fetch(source.uri)
        return source

    def _check_length(self, chunks: Sequence[Chunk], image_lengths: Sequence[int]) -> None:
        text_length = sum(len(chunk) for chunk in chunks if not isinstance(chunk, ImageChunk))
        image_length = sum(image_lengths)
        length, limit = text_length + image_length, self.model.max_context_length
        if length == 0:
            raise InvalidInput("the input has no tokens; send at least one", field="chunks", cause="empty_input")
        if length > limit:
            raise ContextOverflow(
                f"the input has {length} tokens ({text_length} of text, {image_length} of images), above the context of"
                f" {limit}; shorten it or send smaller images",
                field="chunks",
                cause="context",
            )

    async def _process(self, image: _CheckedImage) -> _ProcessedImage:
        image_support = self._image_support()
        digest = await _digest(image_support.fingerprint, image.max_side, image.data)

        def process() -> Awaitable[ProcessedImage]:
            renderer_metrics.IMAGE_BYTES.inc(len(image.data))
            return image_support.process(image.header, image.data, image.max_side)

        try:
            feature = await self.features.get(digest, process)
            replacement = image_support.family.replacement(feature.tensors)
            found = len(replacement.ids)
            if image.token_count is None:
                image.check_expected(found)
        except InvalidChunk as error:
            raise error.at(image.index) from error
        if image.token_count not in (None, found):
            raise Internal(
                f"{chunk_field(image.index)}: geometry says {image.token_count} tokens for {image.header.width}x"
                f"{image.header.height} pixels, the image processor made {found}"
            )
        return _ProcessedImage(feature, replacement)

    def _check_room(self, features: Sequence[Feature]) -> None:
        """Raises ResourceExhausted if the tensors of an input exceed the cache.

        Consumers could never fetch such an input, because its last image would evict its first.
        """
        needed = sum({feature.digest: feature.size_bytes for feature in features}.values())
        if needed > self.features.limit_bytes:
            raise ResourceExhausted(
                f"the tensors of the input's images have {needed} bytes, above the {self.features.limit_bytes} bytes"
                " that the renderer may hold (setting feature_cache_bytes)"
            )

    def _splice(self, chunks: Sequence[Chunk], processed: Sequence[_ProcessedImage]) -> Rendered:
        parts: list[TokenIds] = []
        images: list[PlacedImage] = []
        offset, remaining = 0, iter(processed)
        for chunk in chunks:
            if isinstance(chunk, ImageChunk):
                feature, (part, is_embedding) = next(remaining)
                mask = b"" if is_embedding.all() else is_embedding.tobytes()
                images.append(PlacedImage(offset, len(part), mask, feature))
            else:
                part = chunk
            parts.append(part)
            offset += len(part)
        placed = [ImageAt(image.offset, image.feature.tensors) for image in images]
        positions = self._image_support().family.positions(offset, placed) if placed else None
        return Rendered(np.concatenate(parts), tuple(images), positions)


async def _digest(fingerprint: str, max_side: int, data: bytes) -> str:
    """Returns the identity of an image's tensors: SHA-256 of the processor's fingerprint (32 bytes) and the image.

    For an image that is shrunk, `max_side` is inserted between them as 8 bytes. No PNG or JPEG begins with the first of
    these bytes, so the digest cannot collide with that of another image.
    """
    digest = hashlib.sha256(bytes.fromhex(fingerprint) + (max_side.to_bytes(8, "big") if max_side else b""))
    if len(data) > _HASH_INLINE_BYTES:
        await asyncio.to_thread(digest.update, data)
    else:
        digest.update(data)
    return digest.hexdigest()


async def _first_error(jobs: Sequence[Awaitable[Result]]) -> list[Result]:
    """Runs all jobs and returns their results. If jobs fail, raises the error of the first of them in `jobs`.

    It raises only after all jobs have ended, so an input with several errors always gets the same error.
    """
    if len(jobs) <= 1:
        return [await job for job in jobs]  # a task would cost more than looking up a cached image
    results = await asyncio.gather(*jobs, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
