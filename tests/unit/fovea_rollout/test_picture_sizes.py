"""Token counts are asked once a size, whoever asks and whoever gives up."""

import asyncio
import io

import numpy as np
import pytest
from PIL import Image

from fovea.wire.errors import InvalidInput
from fovea_rollout.messages import Picture
from fovea_rollout.picture_sizes import PictureSizes, picture_size


def picture(width: int, height: int, value: int = 0) -> Picture:
    return Picture.of_pixels(np.full((height, width, 3), value, np.uint8))


class Asked:
    """Answers with the width, once the gate is open."""

    def __init__(self) -> None:
        self.asked: list[Picture] = []
        self.gate = asyncio.Event()
        self.failures = 0

    async def __call__(self, one: Picture) -> int:
        self.asked.append(one)
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise ConnectionError("gone")
        return picture_size(one)[0]


async def test_concurrent_askers_wait_for_one_call() -> None:
    ask = Asked()
    sizes = PictureSizes(ask)
    pictures = [picture(8, 4), picture(8, 4, 1), picture(4, 8)]
    tasks = [asyncio.create_task(sizes.token_count(one)) for one in pictures * 10]
    await asyncio.sleep(0.01)
    tasks[0].cancel()  # it began the call; the others get their answer nevertheless
    await asyncio.sleep(0)
    ask.gate.set()
    assert await asyncio.gather(*tasks[1:]) == ([8, 8, 4] * 10)[1:]
    assert ask.asked == [pictures[0], pictures[2]]
    assert await sizes.token_count(picture(8, 4, 2)) == 8
    assert len(ask.asked) == 2


async def test_a_call_that_failed_is_made_again() -> None:
    ask = Asked()
    ask.gate.set()
    ask.failures = 1
    sizes = PictureSizes(ask)
    with pytest.raises(ConnectionError):
        await sizes.token_count(picture(8, 4))
    assert await sizes.token_count(picture(8, 4)) == 8


def test_a_jpeg_that_is_shown_turned_counts_as_shown() -> None:
    image = Image.new("RGB", (8, 4))
    exif = image.getexif()
    sizes = []
    for orientation in (1, 6):
        exif[0x0112] = orientation
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", exif=exif)
        sizes.append(picture_size(Picture.of_bytes(buffer.getvalue())))
    assert sizes == [(8, 4), (4, 8)]


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\nnothing", picture(4, 4).data[:20]])
def test_a_file_without_a_header_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        picture_size(Picture(data, "png"))
