"""Bounds of what travels, in one place. Settings may lower them, never raise what gRPC itself enforces."""

MESSAGE_BYTES = 4 * 2**20
"""gRPC's own receive limit. Larger things are streamed as records or pieces."""

PIECE_BYTES = 2**20
"""Size of one piece of a streamed object; measured fastest between 256 KiB and 1 MiB."""

INLINE_IMAGE_BYTES = 2**20
"""Encoded images up to this size, in all, ride inside a request; larger ones are put first and referred to."""

MAX_IMAGE_BYTES = 32 * 2**20
"""The largest encoded image."""

MAX_IMAGE_PIXELS = 64 * 10**6
"""The most pixels an image may declare; read from its header, before anything is decoded."""

MAX_IMAGE_ASPECT_RATIO = 200
"""The largest ratio of the longer to the shorter side; the Qwen-VL processors refuse more."""
