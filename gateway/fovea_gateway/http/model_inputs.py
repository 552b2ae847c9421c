"""Conversion of Tinker's chunks (JSON or protobuf) and LoRA configurations into Fovea's protobuf messages.

A field that Fovea does not support raises an error that names it.
"""

import base64
from typing import Annotated, Literal

from pydantic import Field

from fovea.api.v1 import model_input_pb2, weights_pb2
from fovea.tinker.v1 import tinker_pb2
from fovea.wire import tensors
from fovea.wire.conventions import MAX_IMAGE_BYTES
from fovea.wire.errors import InvalidInput, Unimplemented
from fovea_gateway.http.request_body import Body, LongList

_MOST_IMAGE_TEXT = 4 * (MAX_IMAGE_BYTES + 2) // 3
_FORMATS = {"png": model_input_pb2.IMAGE_FORMAT_PNG, "jpeg": model_input_pb2.IMAGE_FORMAT_JPEG}


class EncodedTextChunk(Body):
    """Token ids."""

    type: Literal["encoded_text"]
    tokens: LongList[int]


class ImageChunk(Body):
    """An encoded image in base64."""

    type: Literal["image"]
    data: str
    format: str
    expected_tokens: int | None = None


class ImageAssetPointerChunk(Body):
    """An image that is stored elsewhere."""

    type: Literal["image_asset_pointer"]
    location: str
    format: str
    expected_tokens: int | None = None


class DmelChunk(Body):
    """Audio."""

    type: Literal["dmel"]
    dmel: str


Chunk = Annotated[EncodedTextChunk | ImageChunk | ImageAssetPointerChunk | DmelChunk, Field(discriminator="type")]


class ModelInput(Body):
    """A prompt."""

    chunks: LongList[Chunk]


def image_format(name: str, field: str) -> "model_input_pb2.ImageFormat":
    """Returns the image format with this name in Tinker's API. Raises InvalidInput for an unknown name."""
    if name not in _FORMATS:
        raise InvalidInput(f"{field} is {name!r}; it must be 'png' or 'jpeg'", field=field)
    return _FORMATS[name]


def input_from_json(prompt: ModelInput, field: str = "prompt") -> model_input_pb2.ModelInput:
    """Returns the prompt of a JSON body. Raises InvalidInput or Unimplemented, which name the chunk."""
    whole = model_input_pb2.ModelInput()
    for index, chunk in enumerate(prompt.chunks):
        _json_chunk(chunk, whole.chunks.add(), f"{field}.chunks[{index}]")
    return whole


def _json_chunk(chunk: Chunk, message: model_input_pb2.Chunk, field: str) -> None:
    match chunk:
        case EncodedTextChunk():
            message.tokens.tokens = _token_bytes(chunk.tokens, field)
        case ImageChunk():
            message.image.data = decode_image(chunk.data, f"{field}.data")
            message.image.format = image_format(chunk.format, f"{field}.format")
            if chunk.expected_tokens is not None:
                message.image.expected_token_count = _count(chunk.expected_tokens, field)
        case ImageAssetPointerChunk():
            message.image_reference.uri = chunk.location
            message.image_reference.format = image_format(chunk.format, f"{field}.format")
            if chunk.expected_tokens is not None:
                message.image_reference.expected_token_count = _count(chunk.expected_tokens, field)
        case DmelChunk():
            raise _no_dmel(field)


def decode_image(text: str, field: str) -> bytes:
    """Decodes an image from base64. Raises InvalidInput if the text is not base64 or the image is too large."""
    if len(text) > _MOST_IMAGE_TEXT:  # checked before decoding: 100 MiB would block all threads for a second
        raise InvalidInput(
            f"{field} has {len(text)} characters; an image may have {MAX_IMAGE_BYTES} bytes", field=field
        )
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidInput(f"{field} is not base64: {error}", field=field) from None


def _token_bytes(ids: list[int], field: str) -> bytes:
    try:
        return tensors.encode_tokens(ids)
    except OverflowError:
        raise InvalidInput(f"{field}.tokens has an id that does not fit in 32 bits", field=f"{field}.tokens") from None


def _count(expected_tokens: int, field: str) -> int:
    if not 0 < expected_tokens < 2**31:
        raise InvalidInput(f"{field}.expected_tokens is {expected_tokens}", field=f"{field}.expected_tokens")
    return expected_tokens


def fill_chunk(chunk: tinker_pb2.Chunk, message: model_input_pb2.Chunk, field: str) -> None:
    """Converts a chunk of a protobuf body. Raises InvalidInput or Unimplemented, which name the field."""
    match chunk.WhichOneof("chunk"):
        case "encoded_text":
            tensors.decode_tokens(chunk.encoded_text.tokens, f"{field}.tokens")
            message.tokens.tokens = chunk.encoded_text.tokens
        case "image":
            if chunk.image.HasField("override_dimensions"):
                raise Unimplemented(f"{field}.override_dimensions is not supported", field=field)
            message.image.data = chunk.image.data
            message.image.format = image_format(chunk.image.format, f"{field}.format")
            if chunk.image.HasField("expected_tokens"):
                message.image.expected_token_count = _count(chunk.image.expected_tokens, field)
        case "dmel":
            raise _no_dmel(field)
        case _:
            raise InvalidInput(f"{field} is neither text nor an image", field=field)


def _no_dmel(field: str) -> Unimplemented:
    return Unimplemented(f"{field} is a dmel (audio) chunk; this model supports only text and images", field=field)


class LoraConfig(Body):
    """The shape of an adapter; rank 0 trains all parameters."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


def lora_message(config: LoraConfig, alpha: float, train_vision: bool) -> weights_pb2.LoraConfig:
    """Returns the configuration as a protobuf message. Raises InvalidInput for numbers that do not fit into it.

    Args:
        alpha: The LoRA alpha, which the JSON does not contain.
        train_vision: Whether the vision tower is adapted in addition to the language layers.
    """
    if not -(2**31) <= config.rank < 2**31 or (config.seed is not None and not -(2**63) <= config.seed < 2**63):
        raise InvalidInput("lora_config.rank or seed is out of range", field="lora_config")
    return weights_pb2.LoraConfig(
        rank=config.rank,
        alpha=alpha,
        seed=config.seed or 0,
        train_attention=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembedding=config.train_unembed,
        # The option extends these two to the vision tower. An adapter of only the unembedding has no layers there.
        train_vision=train_vision and (config.train_attn or config.train_mlp),
    )
