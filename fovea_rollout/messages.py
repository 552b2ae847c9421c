"""Messages in OpenAI's shape, and what they consist of: text and pictures."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fovea.wire.errors import InvalidInput

Role = Literal["system", "user", "assistant", "tool"]
PictureFormat = Literal["png", "jpeg"]

_EXIF_ORIENTATION = 0x0112
_QUARTER_TURNS = (5, 6, 7, 8)
"""Values of the EXIF orientation at which width and height change places."""

_SIGNATURES: dict[bytes, PictureFormat] = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}


@dataclass(frozen=True)
class Picture:
    """An encoded picture. Conversations share it by reference: a history never copies its bytes.

    Attributes:
        data: The file.
        format: What it is encoded as.
    """

    data: bytes = field(repr=False)
    format: PictureFormat

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels as shown, from the file's header. Raises InvalidInput if it cannot be read."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(self.data)) as image:
                width, height = image.size
                is_turned = image.getexif().get(_EXIF_ORIENTATION) in _QUARTER_TURNS
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
            raise InvalidInput(f"the {self.format} picture {self.digest[:12]} cannot be read: {error}") from error
        return (height, width) if is_turned else (width, height)

    @classmethod
    def of_bytes(cls, data: bytes, where: str = "image") -> Picture:
        """From a PNG, JPEG or WebP file; the API takes the first two, so WebP becomes a PNG with the same pixels.

        Raises:
            InvalidInput: Naming `where`, for anything else and for a WebP file that cannot be read.
        """
        for signature, kind in _SIGNATURES.items():
            if data.startswith(signature):
                return cls(data, kind)
        if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            return cls(_png_of_webp(data, where), "png")
        raise InvalidInput(
            f"{where} is neither a PNG nor a JPEG nor a WebP file: encode it as one of them", field=where
        )

    @classmethod
    def of_pixels(cls, pixels: npt.NDArray[np.uint8]) -> Picture:
        """From uint8 [height, width, 3], as a PNG."""
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        return cls(buffer.getvalue(), "png")

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """uint8 [height, width, 3], as the file has them: not turned by its EXIF orientation."""
        from PIL import Image

        with Image.open(io.BytesIO(self.data)) as image:
            return np.asarray(image.convert("RGB"))

    @property
    def data_uri(self) -> str:
        """As `image_url` has it."""
        return f"data:image/{self.format};base64,{base64.b64encode(self.data).decode()}"


Part = str | Picture


@dataclass(frozen=True)
class Message:
    """What somebody other than the sampled model says.

    Attributes:
        parts: Texts and pictures in order.
        name: Who speaks, or which tool answers, for templates that write it; empty for none.
        tool_call_id: Which call a tool answers, for templates that write it; empty for none.
        has_markup: Whether `<tool_response>`, `<think>` and other markup in its texts are the model's tokens, for what
            an environment writes itself. False for what others typed: their markup stays text. Special tokens such as
            `<|im_end|>` stay text either way.
    """

    role: Role
    parts: tuple[Part, ...]
    name: str = ""
    tool_call_id: str = ""
    has_markup: bool = False

    @property
    def text(self) -> str:
        """Its texts, joined."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Its pictures."""
        return tuple(part for part in self.parts if isinstance(part, Picture))


MessageLike = Message | Mapping[str, Any]
_NAMES = ("name", "tool_call_id")


def parse_message(message: MessageLike, where: str = "message") -> Message:
    """Reads `{"role": ..., "content": text or parts}`, parts being `{"type": "text", "text": ...}` and
    `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`; `name` and `tool_call_id` may stand
    beside them.

    Raises:
        InvalidInput: Naming the field. URLs that are not data URIs are refused: fetch the picture first.
    """
    if isinstance(message, Message):
        return message
    _refuse_unknown(message, {"role", "content", *_NAMES}, where)
    if message.get("role") not in get_args(Role):
        seen = message.get("role")
        raise InvalidInput(f"{where}.role is {seen!r}; use one of {get_args(Role)}", field=f"{where}.role")
    role: Role = message["role"]
    names = {key: message[key] for key in _NAMES if key in message}
    for key, value in names.items():
        if not isinstance(value, str):
            raise InvalidInput(f"{where}.{key} is {value!r}; it must be a text", field=f"{where}.{key}")
    content = message.get("content")
    if isinstance(content, str):
        return Message(role, (content,), **names)
    if not isinstance(content, Sequence) or not content:
        raise InvalidInput(f"{where}.content must be a text or a list of parts", field=f"{where}.content")
    parts = tuple(_parse_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    return Message(role, parts, **names)


def parse_messages(messages: Sequence[MessageLike], where: str = "messages") -> tuple[Message, ...]:
    """`parse_message` of each."""
    return tuple(parse_message(message, f"{where}[{index}]") for index, message in enumerate(messages))


def _parse_part(part: Any, where: str) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        _refuse_unknown(part, {"type", "text"}, where)
        return str(part["text"])
    if kind != "image_url":
        raise InvalidInput(f"{where}.type is {kind!r}; use 'text' or 'image_url'", field=f"{where}.type")
    _refuse_unknown(part, {"type", "image_url"}, where)
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    where = f"{where}.image_url.url"
    if not isinstance(url, str) or not url.startswith("data:image/"):
        raise InvalidInput(f"{where} must be a data URI, data:image/png;base64,...", field=where)
    header, comma, encoded = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise InvalidInput(f"{where} must be base64, data:image/png;base64,...", field=where)
    try:
        data = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise InvalidInput(f"{where} is not base64: {error}", field=where) from None
    return Picture.of_bytes(data, where)


def _png_of_webp(data: bytes, where: str) -> bytes:
    from PIL import Image, ImageOps, UnidentifiedImageError

    buffer = io.BytesIO()
    try:
        with Image.open(io.BytesIO(data), formats=["WEBP"]) as image:
            if (frames := getattr(image, "n_frames", 1)) != 1:
                raise InvalidInput(f"{where} is a film of {frames} pictures: send the one that is meant", field=where)
            ImageOps.exif_transpose(image).save(buffer, "PNG")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidInput(f"{where} is a WebP file that cannot be read: {error}", field=where) from error
    return buffer.getvalue()


def _refuse_unknown(found: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(found) - known):
        raise InvalidInput(f"{where} has the unknown field {unknown[0]!r}; known are {sorted(known)}", field=where)
