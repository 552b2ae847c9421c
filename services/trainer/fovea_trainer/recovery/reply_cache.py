"""Replies to the last command of each model, so that a command that is sent twice runs once.

Callers number the commands of a model in ascending order (`seq_id`). The cache runs on the event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fovea.wire.errors import Expired, FailedPrecondition, FeatureEvicted, StorageBehind

Answer = TypeVar("Answer")

MAX_BYTES = 256 * 2**20

_WITHOUT_EFFECT = (FeatureEvicted, StorageBehind)
"""Errors of commands that had no effect, so that they may run again."""


@dataclass
class _Entry:
    """The last command of a model.

    Args:
        seq_id: Its number.
        work: Its answer; None if the command had no effect.
        size_bytes: Size of the retained answer.
    """

    seq_id: int
    work: Awaitable[Any] | None
    size_bytes: int = 0


class ReplyCache:
    """The last numbered command of each model, running or finished, with its answer.

    Args:
        max_bytes: Size limit of all answers. Above it the oldest answers are dropped, but their commands stay known.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def once(
        self,
        model_id: str,
        seq_id: int,
        run: Callable[[], Coroutine[Any, Any, Answer]],
        size_of: Callable[[Answer], int] = lambda answer: 0,
    ) -> Answer:
        """Runs command `seq_id` of a model, or returns the answer if it is the model's last command.

        A numbered command continues if its caller is cancelled. An exception is retained as its answer, except
        FeatureEvicted and StorageBehind: that command had no effect and may run again. A command with a `seq_id` of 0
        has no number and always runs.

        Args:
            model_id: Id of the model.
            seq_id: Number of the command.
            run: Runs the command.
            size_of: Returns the size of an answer in bytes.

        Raises:
            FailedPrecondition: A later command has started.
            Expired: The command was done, and its answer has been dropped.
        """
        if not seq_id:
            return await run()
        entry = self._entries.get(model_id)
        if entry is not None and entry.seq_id > seq_id:
            raise FailedPrecondition(
                f"seq_id {seq_id} of model {model_id!r} comes after {entry.seq_id}: a later command has already run",
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
        """Returns the number of the last command that had an effect, or 0. Waits for a running command."""
        entry = self._entries.get(model_id)
        while entry is not None and isinstance(entry.work, asyncio.Task) and not entry.work.done():
            await asyncio.wait([entry.work])
            entry = self._entries.get(model_id)
        if entry is None:
            return 0
        return entry.seq_id if entry.work is not None else entry.seq_id - 1

    def seed(self, model_id: str, seq_id: int, answer: Any) -> None:
        """Records the last command of a restored model, and its answer."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(answer)
        self._entries[model_id] = _Entry(seq_id, done)

    def forget(self, model_id: str) -> None:
        """Drops the entry of a model that was freed."""
        self._entries.pop(model_id, None)

    def _note(self, entry: _Entry, size_of: Callable[[Answer], int], done: asyncio.Task[Answer]) -> None:
        if done.cancelled() or isinstance(done.exception(), _WITHOUT_EFFECT):
            entry.work = None
        elif done.exception() is None:
            entry.size_bytes = size_of(done.result())
            self._trim()

    def _trim(self) -> None:
        total = sum(entry.size_bytes for entry in self._entries.values())
        for model_id, entry in self._entries.items():
            if total <= self._max_bytes:
                return
            total -= entry.size_bytes
            if entry.size_bytes:
                entry.work, entry.size_bytes = _dropped(model_id, entry.seq_id), 0


def _dropped(model_id: str, seq_id: int) -> Awaitable[Any]:
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    done.set_exception(Expired(f"command {seq_id} of model {model_id!r} was done, but its answer has been dropped"))
    done.exception()  # marks it as retrieved, because possibly no caller ever awaits it
    return done
