"""An invalid chunk: a cause for the metrics, a message for the client, and the chunk that it is about."""

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
    "processor",
    "reserved_token",
    "scans",
    "size_bytes",
    "unknown_format",
    "uri",
    "vocabulary",
]


class InvalidChunk(Exception):
    """An image or a chunk cannot be rendered, whichever request holds it; `at` says where it stands.

    Args:
        cause: Label of the metric of refused inputs.
        message: What is wrong and what to do, for the client.
    """

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(cause, message)
        self.cause: Cause = cause
        self.message = message

    def at(self, chunk_index: int) -> InvalidInput:
        """The error that a client sees: this one, said of the chunk that holds the image."""
        field = chunk_field(chunk_index)
        return InvalidInput(f"{field}: {self.message}", field=field, cause=self.cause)


def chunk_field(index: int) -> str:
    """The path of one chunk as error messages name it."""
    return f"chunks[{index}]"
