"""Waiting for other tasks and processes."""

import asyncio
from collections.abc import Awaitable, Callable


async def eventually(holds: Callable[[], bool | Awaitable[bool]], timeout_s: float = 60.0) -> None:
    """Waits until a condition holds. Raises TimeoutError after a limit that is far above any expected time."""
    async with asyncio.timeout(timeout_s):
        while True:
            answer = holds()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.01)
