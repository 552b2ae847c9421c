"""What was done last to each model, so that a command which is asked for twice is done once.

The caller's numbers (`seq_id`) rise from one command of a model to the next. Lives in the event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fovea.wire.errors import Expired, FailedPrecondition, FeatureEvicted

Answer = TypeVar("Answer")

KEPT_BYTES = 256 * 2**20


@dataclass
class _Entry:
    """The last command of a model; `work` is None if it did nothing, `size_bytes` that of its kept answer."""

    seq_id: int
    work: Awaitable[Any] | None
    size_bytes: int = 0


class ReplyCache:
    """The last numbered command of each model, running or done, with its answer.

    Args:
        kept_bytes: Of all kept answers together; above, the oldest are dropped, the commands stay known.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def once(
        self,
        model_id: str,
        seq_id: int,
        run: Callable[[], Coroutine[Any, Any, Answer]],
        size_of: Callable[[Answer], int] = lambda answer: 0,
    ) -> Answer:
        """Runs command `seq_id` of a model, or waits for it if it is the last one; 0 is no number and always runs.

        A numbered command goes on if its caller leaves. Whatever it raises is its answer too, but for FeatureEvicted:
        then nothing was done.

        Raises:
            FailedPrecondition: A later command has begun.
            Expired: It was done, and its answer has been dropped.
        """
        if not seq_id:
            return await run()
        entry = self._entries.get(model_id)
        if entry is not None and entry.seq_id > seq_id:
            raise FailedPrecondition(
                f"seq_id {seq_id} of model {model_id!r} comes after {entry.seq_id}: it is not done any more",
                field="seq_id",
            )
        if entry is None or entry.seq_id < seq_id or entry.work is None:
            work = asyncio.create_task(run(), name=f"command {seq_id} of {model_id}")
            entry = self._entries[model_id] = _Entry(seq_id, work)
            self._entries.move_to_end(model_id)
            work.add_done_callback(partial(self._note, entry, size_of))
        assert entry.work is not None
        answer: Answer = await asyncio.shield(entry.work)
        return answer

    async def last(self, model_id: str) -> int:
        """The number of the last command that was done to a model; waits for one that runs. 0 if there is none."""
        entry = self._entries.get(model_id)
        while entry is not None and isinstance(entry.work, asyncio.Task) and not entry.work.done():
            await asyncio.wait([entry.work])
            entry = self._entries.get(model_id)
        if entry is None:
            return 0
        return entry.seq_id if entry.work is not None else entry.seq_id - 1

    def seed(self, model_id: str, seq_id: int, answer: Any) -> None:
        """Takes note of the last command of a model that was restored, and of its answer."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(answer)
        self._entries[model_id] = _Entry(seq_id, done)

    def forget(self, model_id: str) -> None:
        """Drops what is known of a model that is gone."""
        self._entries.pop(model_id, None)

    def _note(self, entry: _Entry, size_of: Callable[[Answer], int], done: asyncio.Task[Answer]) -> None:
        if done.cancelled() or isinstance(done.exception(), FeatureEvicted):
            entry.work = None
        elif done.exception() is None:
            entry.size_bytes = size_of(done.result())
            self._trim()

    def _trim(self) -> None:
        total = sum(entry.size_bytes for entry in self._entries.values())
        for model_id, entry in self._entries.items():
            if total <= self._kept_bytes:
                return
            total -= entry.size_bytes
            if entry.size_bytes:
                entry.work, entry.size_bytes = _dropped(model_id, entry.seq_id), 0


def _dropped(model_id: str, seq_id: int) -> Awaitable[Any]:
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    done.set_exception(Expired(f"command {seq_id} of model {model_id!r} was done, but its answer is no longer kept"))
    done.exception()  # nobody may ever ask
    return done
