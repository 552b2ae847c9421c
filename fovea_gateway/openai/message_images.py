"""Extraction of images from OpenAI messages, since only the renderer reads images."""

from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fovea.api.v1 import model_input_pb2
from fovea.wire.errors import InvalidInput, Unimplemented
from fovea_gateway.http.model_inputs import decode_image

_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": model_input_pb2.IMAGE_FORMAT_PNG,
    b"\xff\xd8\xff": model_input_pb2.IMAGE_FORMAT_JPEG,
}
_ENDINGS = {
    ".png": model_input_pb2.IMAGE_FORMAT_PNG,
    ".jpg": model_input_pb2.IMAGE_FORMAT_JPEG,
    ".jpeg": model_input_pb2.IMAGE_FORMAT_JPEG,
}
_DETAILS = (None, "auto", "high")
"""A request cannot choose the size: the checkpoint's own limit applies, then the model's processor."""


class MessageImage(NamedTuple):
    """An image, and the field that contained it."""

    field: str
    chunk: model_input_pb2.Chunk

    def limit_side(self, max_side: int) -> None:
        """Tells the renderer to shrink the image to `max_side` pixels on its longer side; 0 leaves the size
        unchanged.
        """
        image = self.chunk.image if self.chunk.WhichOneof("kind") == "image" else self.chunk.image_reference
        image.max_side = max_side


def take_images(body: dict[str, Any]) -> list[MessageImage]:
    """Removes the images from a request's messages and returns them in order. An empty part remains in place of each.

    Raises InvalidInput or Unimplemented, which name the field, for values that are not images or cannot be fetched.
    """
    images: list[MessageImage] = []
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") == "image_url":
                field = f"messages.{index}.content.{place}.image_url"
                images.append(MessageImage(field, _read_image(part.get("image_url"), field)))
                part.clear()
                part.update(type="image_url", image_url=None, uuid="0")
    return images


def _read_image(value: Any, field: str) -> model_input_pb2.Chunk:
    url, detail = (value.get("url"), value.get("detail")) if isinstance(value, dict) else (value, None)
    if not isinstance(url, str):
        raise InvalidInput(f"{field}.url is missing; send data:image/png;base64,... there", field=f"{field}.url")
    if detail not in _DETAILS:
        raise Unimplemented(
            f"{field}.detail is {detail!r}, which is not supported: leave it out, and send a smaller image instead",
            field=f"{field}.detail",
        )
    scheme, _, rest = url.partition(":")
    if scheme == "data":
        return _read_data(rest, f"{field}.url")
    if scheme in ("http", "https"):
        return _refer(url, f"{field}.url")
    raise InvalidInput(f"{field}.url begins with {url[:20]!r}; send data:image/png;base64,...", field=f"{field}.url")


def _read_data(rest: str, field: str) -> model_input_pb2.Chunk:
    kind, _, text = rest.partition(",")
    if not kind.endswith(";base64"):
        raise InvalidInput(f"{field} is not base64; send data:image/png;base64,...", field=field)
    data = decode_image(text, field)
    found = next((image_format for start, image_format in _SIGNATURES.items() if data.startswith(start)), None)
    if found is None:
        raise InvalidInput(f"{field} ({kind.removesuffix(';base64')}) is neither PNG nor JPEG; convert it", field=field)
    return model_input_pb2.Chunk(image=model_input_pb2.ImageChunk(data=data, format=found))


def _refer(url: str, field: str) -> model_input_pb2.Chunk:
    """Returns an image by address. The renderer fetches it if its operator listed the host, and reports an error if
    not.
    """
    try:
        path = urlsplit(url).path.lower()
    except ValueError as error:
        raise InvalidInput(f"{field} is not a URL: {error}", field=field) from None
    found = next((image_format for ending, image_format in _ENDINGS.items() if path.endswith(ending)), None)
    if found is None:
        raise InvalidInput(
            f"{field} does not end with .png, .jpg or .jpeg, so its format is unknown; send the bytes, as "
            "data:image/png;base64,...",
            field=field,
        )
    return model_input_pb2.Chunk(image_reference=model_input_pb2.ImageReference(uri=url, format=found))
