"""Work that must not stop in the middle, whoever waits for it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def settled(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs `work` to its end even if the caller is cancelled; then the cancellation goes on.

    Plain `asyncio.shield` would let the caller leave, and release its locks, while the work still runs.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception:
            break  # the task's own failure, raised below
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller gets
        raise cancelled
    return task.result()
