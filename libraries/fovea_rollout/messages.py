"""Messages in OpenAI's format, which consist of texts and pictures."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
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
"""Values of the EXIF orientation that swap width and height."""

_SIGNATURES: dict[bytes, PictureFormat] = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}


def picture_problem(error: Exception) -> str:
    """Returns the words of an error of Pillow without the address of an object in memory."""
    return re.sub(r" <_io\.BytesIO object at 0x[0-9a-f]+>", "", str(error))


@dataclass(frozen=True)
class Picture:
    """An encoded picture. Conversations share it by reference, so histories never copy its bytes.

    Attributes:
        data: The bytes of the file.
        format: Format of the file.
    """

    data: bytes = field(repr=False)
    format: PictureFormat

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels as displayed, from the file's header. Raises InvalidInput if it cannot be read."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(self.data)) as image:
                width, height = image.size
                is_turned = image.getexif().get(_EXIF_ORIENTATION) in _QUARTER_TURNS
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
            words = f"the {self.format} picture {self.digest[:12]} cannot be read: {picture_problem(error)}"
            raise InvalidInput(words) from error
        return (height, width) if is_turned else (width, height)

    @classmethod
    def of_bytes(cls, data: bytes, where: str = "image") -> Picture:
        """Makes a picture from a PNG, JPEG or WebP file.

        The API accepts PNG and JPEG, so a WebP file becomes a PNG with the same pixels.

        Raises:
            InvalidInput: The file has another format, or is a WebP file that cannot be read. The error names `where`.
        """
        for signature, kind in _SIGNATURES.items():
            if data.startswith(signature):
                return cls(data, kind)
        if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            return cls(_png_of_webp(data, where), "png")
        raise InvalidInput(f"{where} is not a PNG, JPEG or WebP file: encode it as one of them", field=where)

    @classmethod
    def of_pixels(cls, pixels: npt.NDArray[np.uint8]) -> Picture:
        """Makes a PNG from uint8 [height, width, 3]."""
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        return cls(buffer.getvalue(), "png")

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """The pixels of the file, uint8 [height, width, 3], not rotated by the EXIF orientation."""
        from PIL import Image

        with Image.open(io.BytesIO(self.data)) as image:
            return np.asarray(image.convert("RGB"))

    @property
    def data_uri(self) -> str:
        """The picture as a data URI, for `image_url`."""
        return f"data:image/{self.format};base64,{base64.b64encode(self.data).decode()}"


Part = str | Picture


@dataclass(frozen=True)
class Message:
    """A message that the sampled model did not write.

    Attributes:
        role: Role of the author.
        parts: Texts and pictures in order.
        name: Name of the author or tool, for templates that write it; may be empty.
        tool_call_id: Id of the call that a tool responds to, for templates that write it; may be empty.
        has_markup: Whether markup in the texts, such as `<tool_response>` and `<think>`, becomes the model's tokens.
            True for text that an environment writes itself. False for text of others, in which markup stays text.
            Special tokens such as `<|im_end|>` stay text in both cases.
    """

    role: Role
    parts: tuple[Part, ...]
    name: str = ""
    tool_call_id: str = ""
    has_markup: bool = False

    @property
    def text(self) -> str:
        """The texts of the message, joined."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures of the message."""
        return tuple(part for part in self.parts if isinstance(part, Picture))


MessageLike = Message | Mapping[str, Any]
_NAMES = ("name", "tool_call_id")


def parse_message(message: MessageLike, where: str = "message") -> Message:
    """Parses a message in OpenAI's format: `{"role": ..., "content": text or parts}`.

    A part is `{"type": "text", "text": ...}` or `{"type": "image_url", "image_url": {"url":
    "data:image/png;base64,..."}}`. The message may also have a `name` and a `tool_call_id`.

    Raises:
        InvalidInput: A field is wrong; the error names it. Only data URIs are accepted: download other pictures first.
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
    """Parses each message with `parse_message`. Raises InvalidInput, too, for anything but a list of messages."""
    if messages is None or isinstance(messages, (str, bytes, Mapping, Message)):
        kind = "None" if messages is None else f"a {type(messages).__name__}"
        raise InvalidInput(
            f"{where} is {kind}; give a list of messages, such as [Message('user', ('?',))]", field=where
        )
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
                raise InvalidInput(f"{where} is animated and has {frames} frames: send one frame", field=where)
            ImageOps.exif_transpose(image).save(buffer, "PNG")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidInput(f"{where} is a WebP file that cannot be read: {error}", field=where) from error
    return buffer.getvalue()


def _refuse_unknown(found: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(found) - known):
        raise InvalidInput(f"{where} has an unknown field {unknown[0]!r}; it may have {sorted(known)}", field=where)
