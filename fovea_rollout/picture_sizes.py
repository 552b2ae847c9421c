"""How many tokens pictures take: the server is asked once a picture size."""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable

from fovea.wire.errors import InvalidInput
from fovea_rollout.messages import Picture
from fovea_rollout.shared_calls import SharedCalls

_ORIENTATION = 0x0112
_TURNED_BY_A_QUARTER = (5, 6, 7, 8)

Size = tuple[int, int]


def picture_size(picture: Picture) -> Size:
    """Width and height in pixels as shown, read from the file's header. Raises InvalidInput if there is none."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(picture.data)) as image:
            width, height = image.size
            is_turned = image.getexif().get(_ORIENTATION) in _TURNED_BY_A_QUARTER
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise InvalidInput(f"the {picture.format} picture {picture.digest[:12]} cannot be read: {error}") from error
    return (height, width) if is_turned else (width, height)


class PictureSizes:
    """Token counts by size.

    Args:
        ask: Asks the server for the tokens of one picture.
    """

    def __init__(self, ask: Callable[[Picture], Awaitable[int]]) -> None:
        self._ask = ask
        self._by_size: SharedCalls[Size, int] = SharedCalls()

    async def token_count(self, picture: Picture) -> int:
        """Placeholder tokens of a picture. Raises what asking raises; then the next one asks again."""
        return await self._by_size.get(picture_size(picture), lambda: self._ask(picture))
