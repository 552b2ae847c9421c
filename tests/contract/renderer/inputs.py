"""Model inputs as messages."""

import numpy as np

from fovea.api.v1 import model_input_pb2
from fovea.wire import tensors

FORMATS = {"PNG": model_input_pb2.IMAGE_FORMAT_PNG, "JPEG": model_input_pb2.IMAGE_FORMAT_JPEG}


def text(*ids: int) -> model_input_pb2.Chunk:
    """Returns a text chunk of token ids."""
    return model_input_pb2.Chunk(tokens=model_input_pb2.TokenChunk(tokens=tensors.encode_tokens(ids)))


def image(
    data: bytes, image_format: str = "PNG", expected: int | None = None, max_side: int = 0
) -> model_input_pb2.Chunk:
    """Returns an image chunk with the encoded bytes."""
    return model_input_pb2.Chunk(
        image=model_input_pb2.ImageChunk(
            data=data, format=FORMATS[image_format], expected_token_count=expected, max_side=max_side
        )
    )


def reference(image_format: str = "PNG", expected: int | None = None, **location: str) -> model_input_pb2.Chunk:
    """Returns an image chunk that refers to an image by `sha256` or `uri`."""
    return model_input_pb2.Chunk(
        image_reference=model_input_pb2.ImageReference(
            format=FORMATS[image_format], expected_token_count=expected, **location
        )
    )


def model_input(*chunks: model_input_pb2.Chunk) -> model_input_pb2.ModelInput:
    """Returns a whole input."""
    return model_input_pb2.ModelInput(chunks=chunks)


def token_ids(rendered: model_input_pb2.RenderedInput) -> list[int]:
    """Returns the token ids of a rendered input."""
    return tensors.decode_tokens(rendered.tokens).tolist()


def positions(rendered: model_input_pb2.RenderedInput) -> np.ndarray:
    """Returns the positions of a rendered input, int32 [3, N]."""
    return tensors.decode(rendered.positions)
