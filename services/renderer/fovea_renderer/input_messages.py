"""Converts protobuf messages of model inputs into chunks, and spliced inputs into protobuf messages."""

from collections.abc import Sequence
from dataclasses import dataclass

from fovea.api.v1 import model_input_pb2
from fovea.vision.vision_family import TokenIds
from fovea.wire import tensors
from fovea.wire.errors import InvalidInput
from fovea_renderer.image_header import ImageFormat, chunk_field
from fovea_renderer.image_sources import Feature

_FORMATS: dict[int, ImageFormat] = {
    model_input_pb2.IMAGE_FORMAT_PNG: "PNG",
    model_input_pb2.IMAGE_FORMAT_JPEG: "JPEG",
}


@dataclass(frozen=True)
class UploadedImage:
    """An image that a client has uploaded with PutImage."""

    sha256: str


@dataclass(frozen=True)
class RemoteImage:
    """An image at a URL."""

    uri: str


@dataclass(frozen=True)
class ImageChunk:
    """One image of an input.

    Attributes:
        source: The encoded file, or a reference to it.
        format: The format that the client has declared.
        expected_token_count: The number of ids that the client expects; None if it has sent none.
        max_side: The most pixels of the longer side; a larger image is shrunk. 0 keeps the size.
    """

    source: bytes | UploadedImage | RemoteImage
    format: ImageFormat
    expected_token_count: int | None
    max_side: int = 0


Chunk = TokenIds | ImageChunk
"""Text, as token ids int32 [N], or an image."""


@dataclass(frozen=True)
class PlacedImage:
    """One image in the spliced tokens.

    Attributes:
        offset: The position of the first id of the image.
        length: The number of ids of the image.
        embedding_mask: One byte for each id, 1 if an embedding replaces the id; empty if all are 1.
        feature: The tensors of the image.
    """

    offset: int
    length: int
    embedding_mask: bytes
    feature: Feature


@dataclass(frozen=True)
class Rendered:
    """A spliced input.

    Attributes:
        tokens: The ids, int32 [N].
        images: The images, in ascending order of their offset.
        positions: The rotary positions, int32 [rows, N]; None if the input has no images or the family has no
            positions.
    """

    tokens: TokenIds
    images: tuple[PlacedImage, ...]
    positions: TokenIds | None


def decode(model_input: model_input_pb2.ModelInput) -> list[Chunk]:
    """Returns the chunks of a message. Raises InvalidInput for an incomplete or unknown chunk; the error names it."""
    return [_decode_chunk(chunk, chunk_field(index)) for index, chunk in enumerate(model_input.chunks)]


def encode(rendered: Rendered, source: str) -> model_input_pb2.RenderedInput:
    """Returns the message of a spliced input. `source` is the address from which consumers fetch the tensors."""
    return model_input_pb2.RenderedInput(
        tokens=rendered.tokens.tobytes(),
        spans=_spans(rendered.images, source),
        positions=None if rendered.positions is None else tensors.encode(rendered.positions),
    )


def _decode_chunk(chunk: model_input_pb2.Chunk, field: str) -> Chunk:
    kind = chunk.WhichOneof("kind")
    if kind == "tokens":
        return tensors.decode_tokens(chunk.tokens.tokens, f"{field}.tokens")
    if kind == "image":
        return _image(chunk.image.data, chunk.image, field)
    if kind == "image_reference":
        reference = chunk.image_reference
        return _image(_location(reference, field), reference, field)
    raise InvalidInput(
        f"{field}: the chunk is empty or of a kind that this renderer does not know; send tokens, image or"
        " image_reference",
        field=field,
        cause="chunk",
    )


def _image(
    source: bytes | UploadedImage | RemoteImage,
    message: model_input_pb2.ImageChunk | model_input_pb2.ImageReference,
    field: str,
) -> ImageChunk:
    if message.max_side < 0:
        raise InvalidInput(
            f"{field}: max_side is {message.max_side}; send the most pixels of the longer side, or 0 to keep the size",
            field=field,
            cause="chunk",
        )
    return ImageChunk(source, _format(message.format, field), _expected(message), message.max_side)


def _location(reference: model_input_pb2.ImageReference, field: str) -> UploadedImage | RemoteImage:
    location = reference.WhichOneof("location")
    if location == "sha256":
        return UploadedImage(reference.sha256)
    if location == "uri":
        return RemoteImage(reference.uri)
    raise InvalidInput(f"{field}: the image reference has neither sha256 nor uri", field=field, cause="chunk")


def _format(value: int, field: str) -> ImageFormat:
    if value not in _FORMATS:
        raise InvalidInput(
            f"{field}: image format {value} is not supported; declare IMAGE_FORMAT_PNG or IMAGE_FORMAT_JPEG",
            field=field,
            cause="unknown_format",
        )
    return _FORMATS[value]


def _expected(image: model_input_pb2.ImageChunk | model_input_pb2.ImageReference) -> int | None:
    return image.expected_token_count if image.HasField("expected_token_count") else None


def _spans(images: Sequence[PlacedImage], source: str) -> list[model_input_pb2.VisionSpan]:
    return [
        model_input_pb2.VisionSpan(
            offset=image.offset,
            length=image.length,
            feature=model_input_pb2.VisionFeature(
                digest=image.feature.digest,
                token_count=image.length,
                size_bytes=image.feature.size_bytes,
                source=source,
                tensors_sha256=image.feature.tensors_sha256,
                embedding_mask=image.embedding_mask,
            ),
        )
        for image in images
    ]
