"""The error of an invalid chunk, with a cause for the metrics and a message for the client."""

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
    """An image or another chunk cannot be rendered. `at` adds the position of the chunk in a request.

    Args:
        cause: The label in the metric of refused inputs.
        message: The problem and the fix, for the client.
    """

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(cause, message)
        self.cause: Cause = cause
        self.message = message

    def at(self, chunk_index: int) -> InvalidInput:
        """Returns the error for the client, which names the chunk."""
        field = chunk_field(chunk_index)
        return InvalidInput(f"{field}: {self.message}", field=field, cause=self.cause)


def chunk_field(index: int) -> str:
    """Returns the path of a chunk in error messages."""
    return f"chunks[{index}]"
