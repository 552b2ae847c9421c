"""Pictures for tests of the data library, and an encoder that counts their tokens."""

import io
import pathlib
from typing import Any

import numpy as np
from PIL import Image

from fovea_data import PictureTokens
from fovea_data.encoder import Encoder
from tests.unit.fovea_rollout.chat_templates import tokenizer

TOKENS = 4
"""Number of tokens of every picture in these tests."""


def image(red: int, size: tuple[int, int] = (12, 8)) -> Image.Image:
    """Returns a red rectangle."""
    return Image.fromarray(np.full((size[1], size[0], 3), (red, 0, 0), np.uint8))


def encoded(kind: str, red: int = 200, size: tuple[int, int] = (12, 8), **arguments: Any) -> bytes:
    """Encodes a picture in a format of Pillow."""
    buffer = io.BytesIO()
    image(red, size).save(buffer, kind, **arguments)
    return buffer.getvalue()


def write(path: pathlib.Path, data: bytes) -> pathlib.Path:
    """Writes a file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def encoder(template: str = "tiny/qwen3_vl", **arguments: Any) -> Encoder:
    """Returns an encoder with the tiny model's tokenizer and a chat template of `chat_templates.NAMES`."""
    return Encoder(tokenizer(template), PictureTokens(lambda width, height: TOKENS), **arguments)
