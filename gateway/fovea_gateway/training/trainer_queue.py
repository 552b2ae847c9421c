"""The queue of commands that wait for one trainer. It detects a command that makes the trainer die repeatedly."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from cachetools import LRUCache

from fovea.wire.errors import EndsTrainer, Unavailable
from fovea_gateway.access.fair_queue import FairQueue, Turn
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.sessions.future import Kind, Pending, QueueState, Submission, future_id, stage
from fovea_gateway.sessions.futures import Futures

_FIRST_S, _FIRST_TOKEN_S = 0.05, 0.0005
"""Initial estimates, in seconds, for one command of a kind and for one token, until a command has been measured."""
_NEWEST = 0.5
"""The weight of the newest measurement in the moving average."""
_KNOWN = 4096
TRAINER_SLOTS = 16
"""A command that needs the trainer for itself occupies all slots, a small one its part of the tokens of a shared pass.
"""
_MOST_DEATHS, _MOST_DEATHS_AGAIN = 2, 5
"""The number of trainer deaths after which a command fails: of one that has never run, and of one that runs again to
restore a model, which is lost without it.
"""


class TrainerQueue:
    """The queue of commands for one trainer, which divides the trainer's time fairly among owners.

    A command is admitted with an estimate of its seconds. When it succeeds or fails, its measured seconds replace the
    estimate. Once admitted, a command must wait only for the trainer.

    When the trainer process dies, each command that it was running is a suspect and runs alone the next time. If the
    trainer dies again, that command fails, because it would also end each new trainer.

    Args:
        queue: The fair queue, with as many slots as keep the trainer busy.
        is_wanted: Returns whether a client may still wait for the queued commands of a session.
    """

    def __init__(
        self, futures: Futures, trainer: TrainerLink, queue: FairQueue, is_wanted: Callable[[str], bool]
    ) -> None:
        self._futures, self._trainer, self._queue, self._is_wanted = futures, trainer, queue, is_wanted
        # Seconds by owner and kind: per token for commands with a batch, per command otherwise.
        self._paces: LRUCache[tuple[str, Kind], float] = LRUCache(_KNOWN)
        # By future and kind: the trainer instance that may have died in the command, and the number of deaths.
        self._suspects: LRUCache[tuple[str, Kind], str] = LRUCache(_KNOWN)
        self._deaths: LRUCache[tuple[str, Kind], int] = LRUCache(_KNOWN)
        self._inside = self._isolated = 0  # Commands at the trainer; suspects that run or wait to run alone.
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def admit(
        self, pending: Pending, doing: str, tokens: int = 0, is_again: bool = False, shares: bool = False
    ) -> AsyncIterator[Turn]:
        """Waits until the command may go to the trainer, and occupies slots until the block ends. The block sets
        `measured` of the turn to the seconds that the trainer reports.

        Args:
            doing: A description of the work, for the client's progress report.
            tokens: The number of tokens in its batch; 0 for a command without a batch.
            is_again: Whether the command has run before and runs again to restore a model.
            shares: Whether the trainer may compute the command together with those of other models.

        Raises EndsTrainer if the trainer died too often during this command.
        """
        submission = pending.submission
        self._check_deaths(submission, _MOST_DEATHS_AGAIN if is_again else _MOST_DEATHS)
        key, units = (submission.owner, submission.kind), max(tokens, 1)
        pace = self._paces.get(key, _FIRST_TOKEN_S if tokens else _FIRST_S)
        following = future_id(submission.scope, submission.seq_id + 1)
        turn = Turn(
            submission.owner, 1000 * pace * units, size=self._size(units) if shares else TRAINER_SLOTS, is_timed=True,
            is_followed=lambda: self._futures.unfinished_kind(following) is not None,
            is_wanted=lambda: is_again or self._is_wanted(submission.session_id),
        )  # fmt: skip
        kind = submission.kind.value
        pending.progress.queue(lambda: f"waiting for the trainer: {self._queue.describe(turn)}", QueueState.PAUSED)
        try:
            async with AsyncExitStack() as held:
                with stage("turn", kind):
                    await held.enter_async_context(self._queue.place(turn))
                pending.progress.wait_on(doing)
                with stage("train", kind):
                    async with self._watching(submission):
                        yield turn
        finally:
            if turn.used is not None and turn.seconds:
                self._paces[key] = _NEWEST * turn.seconds / units + (1 - _NEWEST) * pace
            devices = self._trainer.info.world_size if self._trainer.info is not None else 1
            pending.usage.gpu_seconds += turn.seconds * max(devices, 1)

    def _size(self, tokens: int) -> int:
        """Returns the slots of a command that may share a pass."""
        most = self._trainer.info.shared_tokens if self._trainer.info is not None else 0
        return min(-(-TRAINER_SLOTS * tokens // most), TRAINER_SLOTS) if most else TRAINER_SLOTS

    @asynccontextmanager
    async def beside(self, pending: Pending, doing: str) -> AsyncIterator[None]:
        """Admits a save at once, without a slot: the trainer only copies the weights, and computes while it writes."""
        self._check_deaths(pending.submission, _MOST_DEATHS)
        pending.progress.wait_on(doing)
        async with self._watching(pending.submission):
            yield

    @asynccontextmanager
    async def _watching(self, submission: Submission) -> AsyncIterator[None]:
        """Records whether the trainer may have died during a command. A command with an earlier death runs alone."""
        key = (submission.future_id, submission.kind)
        async with self._admitted(is_alone=key in self._deaths):
            asked = self._trainer.instance_id
            try:
                yield
            except Unavailable:
                self._suspects[key] = asked
                await self._trainer.look_again()
                raise
            self._suspects.pop(key, None)
            self._deaths.pop(key, None)

    @asynccontextmanager
    async def _admitted(self, is_alone: bool) -> AsyncIterator[None]:
        """Delays a command while a suspect runs or waits, and a suspect until no other command is at the trainer."""
        self._isolated += is_alone
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._inside == 0 if is_alone else self._isolated == 0)
                self._inside += 1
            try:
                yield
            finally:
                self._inside -= 1
        finally:
            self._isolated -= is_alone
            async with self._changed:
                self._changed.notify_all()

    def _check_deaths(self, submission: Submission, most: int) -> None:
        key = (submission.future_id, submission.kind)
        if self._suspects.get(key, self._trainer.instance_id) != self._trainer.instance_id:
            del self._suspects[key]
            self._deaths[key] = self._deaths.get(key, 0) + 1
        if (count := self._deaths.get(key, 0)) >= most:
            raise EndsTrainer(
                f"the trainer ended {count} times while it ran request {submission.seq_id} ({submission.kind}) of "
                f"model {submission.scope}, so the request will not run again. The trainer's log may show the cause; "
                "send less at once"
            )
