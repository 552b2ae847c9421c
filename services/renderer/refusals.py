"""Why an input is refused: a cause for the metrics, a message for the reader, and the chunk that it is about."""

from typing import Literal

from fovea.wire.errors import InvalidInput

Cause = Literal[
    "animated",
    "aspect_ratio",
    "chunk",
    "corrupt",
    "empty_image",
    "expected_tokens",
    "format_mismatch",
    "no_images",
    "pixels",
    "reserved_token",
    "size_bytes",
    "unknown_format",
    "uri",
    "vocabulary",
]


class Refusal(Exception):
    """An image or a chunk cannot be rendered, whichever request holds it; `invalid_input` says where it stands."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(cause, message)
        self.cause: Cause = cause
        self.message = message


def chunk_field(index: int) -> str:
    """The path of one chunk as error messages name it."""
    return f"chunks[{index}]"


def invalid_input(refusal: Refusal, chunk_index: int) -> InvalidInput:
    """The error that a client sees: `refusal`, said of the chunk that holds the image."""
    field = chunk_field(chunk_index)
    return InvalidInput(f"{field}: {refusal.message}", field=field, cause=refusal.cause)
