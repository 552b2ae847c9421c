"""Pictures for tests: smooth, coloured, different for each seed, in any encoding."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Returns an RGB picture with structure at many scales, so that a wrong resize or patch order shows."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [np.sin(x / rng.uniform(3, 40) + y / rng.uniform(3, 40) + rng.uniform(0, 6)) for _ in range(3)]
    pixels = 127.5 + 100 * np.stack(waves, axis=-1) + rng.normal(0, 8, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    """Returns the file bytes of a picture."""
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Returns a PNG of `picture`."""
    return encoded(picture(width, height, seed))


def pixels_of(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Returns the pixels as uint8 [height, width, channels]."""
    return np.asarray(image)
