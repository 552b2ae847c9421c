"""The commands of one trainer: their queue, and their replay in a restarted trainer.

The queue detects a command that makes the trainer die repeatedly. A replay restores a model: its newest durable point
first, then the later commands once more.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from cachetools import LRUCache
from google.protobuf.message import Message

from fovea.api.v1 import gateway_pb2
from fovea.wire.errors import EndsTrainer, FailedPrecondition, InvalidInput, ModelLost, NotFound, Unavailable
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.access.fair_queue import FairQueue, Turn
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints
from fovea_gateway.database.database import Database
from fovea_gateway.replicas import snapshot_pushes
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.sessions.future import Kind, Pending, QueueState, Submission, future_id, stage
from fovea_gateway.sessions.futures import Futures
from fovea_gateway.training.journal import PLACE, Entry, Journal, digest_of
from fovea_gateway.training.models import Model

logger = logging.getLogger(__name__)

_FIRST_S, _FIRST_TOKEN_S = 0.05, 0.0005
"""Initial estimates, in seconds, for one command of a kind and for one token, until a command has been measured."""
_NEWEST = 0.5
"""The weight of the newest measurement in the moving average."""
_KNOWN = 4096
TRAINER_SLOTS = 16
"""A command that needs the whole trainer occupies all slots; a small one occupies slots in proportion to its tokens."""
SAVE_SLOTS = 2
"""The trainer writes one save at a time; the next one waits beside it."""
_UNORDERED = ("FlashAttention 2", "FlashAttention 4")
"""With these values of the trainer's `attention`, backward passes add in no fixed order: on an H200, none of ten
repeats with FlashAttention 4 gave the gradients of the first pass (`docs/lab/performance.md`).

No replayed command with them raises the alarm, not even one before the first replayed step: the durable point may
itself come from an earlier replay, which had other gradients than the client's run.
"""
_MOST_DEATHS, _MOST_DEATHS_AGAIN = 3, 5
"""The number of trainer deaths after which a command fails: for a new command, and for a replayed one. Two deaths can
be a coincidence, as when a node is preempted twice; from its second run on, a command runs alone. If a replayed command
fails, its model is lost.
"""


class Suspects:
    """The commands during which trainers may have died, of all trainers of a gateway: a command that ends each trainer
    must not run in one after the other.

    Attributes:
        asked: By future and kind: the trainer instance that may have died in the command.
        deaths: By future and kind: the number of deaths.
    """

    def __init__(self) -> None:
        self.asked: LRUCache[tuple[str, Kind], str] = LRUCache(_KNOWN)
        self.deaths: LRUCache[tuple[str, Kind], int] = LRUCache(_KNOWN)


class TrainerQueue:
    """The queue of commands for one trainer, which divides the trainer's time fairly among owners.

    A command is admitted with an estimate of its seconds. When it succeeds or fails, its measured seconds replace the
    estimate. Once admitted, a command must wait only for the trainer.

    When the trainer process dies, each command that it was running is a suspect and runs alone the next time. If the
    trainer dies again, that command fails, because it would also end each new trainer.

    Args:
        queue: The fair queue, with as many slots as keep the trainer busy.
        saves: The fair queue of saves, which use the trainer's storage and not its compute slots.
        is_wanted: Returns whether a client may still wait for the queued commands of a session.
        suspects: Shared by the queues of all trainers.
    """

    def __init__(
        self,
        futures: Futures,
        trainer: TrainerLink,
        queue: FairQueue,
        saves: FairQueue,
        is_wanted: Callable[[str], bool],
        suspects: Suspects,
    ) -> None:
        self._futures, self._trainer, self._queue, self._saves = futures, trainer, queue, saves
        self._turns: set[Turn] = set()
        self._is_wanted = is_wanted
        # Seconds by owner and kind: per token for commands with a batch, per command otherwise.
        self._paces: LRUCache[tuple[str, Kind], float] = LRUCache(_KNOWN)
        self._suspects, self._deaths = suspects.asked, suspects.deaths
        self._inside = self._isolated = 0  # Commands at the trainer; suspects that run or wait to run alone.
        self._changed = asyncio.Condition()

    @property
    def queued_s(self) -> float:
        """The estimated seconds of the commands that wait or run."""
        return sum(turn.price() for turn in self._turns) / 1000

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
        first = _FIRST_TOKEN_S if tokens else _FIRST_S
        following = future_id(submission.scope, submission.seq_id + 1)
        turn = Turn(
            submission.owner, estimate=lambda: 1000 * units * self._paces.get(key, first),
            size=self._size(units) if shares else TRAINER_SLOTS, is_timed=True,
            is_followed=lambda: self._futures.unfinished_kind(following) is not None,
            is_wanted=lambda: is_again or self._is_wanted(submission.session_id),
        )  # fmt: skip
        kind = submission.kind.value
        pending.progress.queue(lambda: f"waiting for the trainer: {self._queue.describe(turn)}", QueueState.PAUSED)
        self._turns.add(turn)
        try:
            async with AsyncExitStack() as held:
                with stage("turn", kind):
                    await held.enter_async_context(self._queue.place(turn))
                pending.progress.wait_on(doing)
                with stage("train", kind):
                    async with self._watching(submission):
                        yield turn
        finally:
            self._turns.discard(turn)
            if turn.used is not None and turn.seconds:
                self._paces[key] = _NEWEST * turn.seconds / units + (1 - _NEWEST) * self._paces.get(key, first)
            info = self._trainer.info
            devices, memory_kind = (info.world_size, info.memory_kind) if info is not None else (1, "")
            pending.add_seconds(turn.seconds * max(devices, 1), memory_kind)

    def _size(self, tokens: int) -> int:
        """Returns the slots of a command that may share a pass."""
        most = self._trainer.info.shared_tokens if self._trainer.info is not None else 0
        return min(-(-TRAINER_SLOTS * tokens // most), TRAINER_SLOTS) if most else TRAINER_SLOTS

    @asynccontextmanager
    async def beside(self, pending: Pending, doing: str) -> AsyncIterator[None]:
        """Waits for the save's turn among saves. It needs no compute slot: the trainer copies the weights and computes
        while it writes them.
        """
        submission = pending.submission
        self._check_deaths(submission, _MOST_DEATHS)
        turn = Turn(
            submission.owner, 1000 * _FIRST_S, is_timed=True, is_wanted=lambda: self._is_wanted(submission.session_id)
        )
        pending.progress.queue(lambda: f"waiting to save: {self._saves.describe(turn)}", QueueState.PAUSED)
        async with self._saves.place(turn):
            pending.progress.wait_on(doing)
            async with self._watching(submission):
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


class Replay:
    """The replay of a model's journal. Commands run again under their own seq_ids; if the trainer has run one already,
    it repeats its answer.

    An interrupted replay can therefore start again from the trainer's current state. If an answer differs from the one
    that the client received, the difference is counted and logged as an error. If the trainer has other numerics than
    the first one, such as another number of ranks, the difference is only counted.

    Args:
        compute: Runs a forward or forward_backward; its second argument drops existing gradients first.
        timeout_s: Deadline, in seconds, of a call to the trainer that changes no weights.
    """

    def __init__(
        self,
        journal: Journal,
        compute: Callable[[Pending, bool], Awaitable[Sequence[Message]]],
        checkpoints: Checkpoints,
        database: Database,
        trainer: TrainerLink,
        trainer_queue: TrainerQueue,
        timeout_s: float,
    ) -> None:
        self._journal, self._compute, self._checkpoints, self._database = journal, compute, checkpoints, database
        self._trainer, self._trainer_queue, self._timeout_s = trainer, trainer_queue, timeout_s
        # If all models were restored before the first commands run again, the first would be back as late as the last.
        self._restores = asyncio.Semaphore(2)

    async def restore(self, model: Model, report: Callable[[str], None]) -> int:
        """Restores a model and returns the number of repeated commands. Raises ModelLost, with the reason, if it fails.

        Raises Unavailable if the trainer restarts meanwhile; call this again then. Raises FailedPrecondition if the
        trainer's settings no longer allow such a model.

        Args:
            report: Called with a description of each stage, for clients that wait.
        """
        instance = self._trainer.instance_id
        report("other models of this trainer are restored first")
        async with self._restores:
            if self._trainer.instance_id != instance:
                raise self._restarted_again(model)
            report("the trainer restarted and is restoring this model")
            restored = await self._restore_point(model)
        entries = await self._remaining(model, *restored)
        if unlike := next(filter(None, map(self._other_numerics, entries)), ""):
            words = "model %s returns to a trainer with other numerics (%s): its results may differ in their last bits"
            logger.warning(words, model.model_id, unlike)
        for number, entry in enumerate(entries, 1):
            report(f"the trainer restarted: command {number} of {len(entries)} of this model is being run again")
            try:
                await self._run(model, entry)
            except (EndsTrainer, InvalidInput, NotFound) as error:
                if isinstance(error, NotFound) and await self._trainer.look_again() != instance:
                    raise self._restarted_again(model) from None
                raise ModelLost(
                    f"the trainer at {self._trainer.address} restarted, and request {entry.seq_id} ({entry.kind}) of "
                    f"model {model.model_id}, which is in no durable point, could not run again: {error.message}"
                ) from None
        return len(entries)

    def _restarted_again(self, model: Model) -> Unavailable:
        return Unavailable(f"the trainer {self._trainer.address} restarted again while restoring {model.model_id}")

    async def _restore_point(self, model: Model) -> tuple[int | None, str]:
        """Returns the seq_id of the last command in the restored model, or None and why nothing was restored."""
        lora = model.lora if model.lora.rank else None
        try:
            pending = _pending(model, Kind.LOAD_STATE, 0)
            async with self._trainer_queue.admit(pending, "restoring this model", is_again=True):
                restored = await self._trainer.client.restore_model(model.model_id, lora, self._timeout_s)
        except NotFound as error:
            return None, error.message
        except EndsTrainer as error:
            raise ModelLost(f"model {model.model_id} cannot be restored: {error.message}") from None
        # The trainer now reports the model's durable seq_id. 0 means its creation from a checkpoint, or nothing at all.
        await self._trainer.look_again()
        await self._journal.trim(self._trainer)
        return restored.seq_id, ""

    async def _remaining(self, model: Model, restored: int | None, problem: str) -> list[Entry]:
        entries = await self._journal.entries(model.model_id)
        if restored is None:
            if not entries or entries[0].kind is not Kind.CREATE_MODEL:
                raise ModelLost(
                    f"the trainer at {self._trainer.address} that held model {model.model_id} restarted and has no "
                    f"durable point of it ({problem})"
                )
            # Discard answers that the trainer may have recorded for a model that it did not know.
            await self._trainer.client.delete_model(model.model_id, self._timeout_s)
            return entries
        if model.journaled_since is None or model.journaled_since > restored + 1:
            raise ModelLost(
                f"the trainer at {self._trainer.address} restarted. Its durable point of model {model.model_id} is "
                f"from request {restored}, and the journal lacks later requests: either a newer point is damaged, or "
                "the journal was full"
            )
        # A model at seq_id 0 may have been created without the checkpoint that it was to load, so repeat the creation.
        return [entry for entry in entries if entry.seq_id > restored or entry.seq_id == restored == 0]

    async def _run(self, model: Model, entry: Entry) -> None:
        request = await self._journal.request_of(entry)
        pending = _pending(model, entry.kind, entry.seq_id, request)
        if entry.kind is Kind.FORWARD_BACKWARD:  # `compute` renders first and waits for the trainer afterwards.
            pending.place = entry.numerics.get(PLACE, "alone")
            self._compare(entry, await self._compute(pending, entry.drops_gradients), pending.place)
            return
        async with self._trainer_queue.admit(pending, "running again, or waiting for the trainer", is_again=True):
            await self._run_admitted(model, entry, request)

    async def _run_admitted(self, model: Model, entry: Entry, request: bytes) -> None:
        client, model_id, seq_id = self._trainer.client, model.model_id, entry.seq_id
        match entry.kind:
            case Kind.CREATE_MODEL:
                await self._create(model)
                creation = gateway_pb2.SubmitCreateModelRequest.FromString(request)
                if creation.from_path:
                    await self._load(model, creation.from_path, creation.optimizer, entry)
            case Kind.LOAD_STATE:
                load = gateway_pb2.SubmitLoadStateRequest.FromString(request)
                await self._load(model, load.path, load.optimizer, entry)
            case Kind.OPTIM_STEP if entry.drops_gradients:
                await client.clear_gradients(model_id, None, seq_id)
            case Kind.OPTIM_STEP:
                step = gateway_pb2.SubmitOptimStepRequest.FromString(request)
                answer = await client.optim_step(model_id, step.adam, None, seq_id)
                self._compare(entry, [gateway_pb2.WaitFutureResponse(metrics=answer.metrics)])
            case Kind.SAVE_FOR_SAMPLER:
                await self._freeze(model_id, entry)

    async def _create(self, model: Model) -> None:
        try:
            await self._trainer.client.create_model(
                model.model_id, model.lora if model.lora.rank else None, self._timeout_s
            )
        except InvalidInput as error:  # A start of the trainer with its former settings can still restore the model.
            raise FailedPrecondition(
                f"the trainer at {self._trainer.address} returned with other settings, with which it cannot create "
                f"model {model.model_id} again: {error.message}"
            ) from None

    async def _load(self, model: Model, path: str, optimizer: bool, entry: Entry) -> None:
        checkpoint = await self._checkpoints.find_training(model.owner, path)
        if checkpoint.uri != entry.subject:
            raise NotFound(f"{path} has been overwritten since then")
        # The load of a creation has no seq_id of its own: no client uses the model yet.
        await self._trainer.client.load_state(model.model_id, checkpoint.uri, optimizer, None, entry.seq_id)

    async def _freeze(self, model_id: str, entry: Entry) -> None:
        """Creates an unnamed snapshot again. Does nothing if its row is gone, because no client can use it then."""
        kept = await self._database.read(lambda connection: snapshot_pushes.get_row(connection, entry.subject))
        if kept is None:
            return
        frozen = await self._trainer.client.take_snapshot(model_id, entry.subject, "", self._timeout_s)
        self._note(entry, frozen.digest == kept.identity.digest)

    def _compare(self, entry: Entry, result: Sequence[Message], place: str = "") -> None:
        is_moved = bool(place) and place != entry.numerics.get(PLACE, "alone")
        self._note(entry, digest_of(result) == entry.digest, is_moved)

    def _note(self, entry: Entry, is_equal: bool, is_moved: bool = False) -> None:
        is_rounded = is_moved or bool(self._other_numerics(entry)) or entry.numerics.get("attention") in _UNORDERED
        metrics.REPLAYED.labels("equal" if is_equal else "rounded" if is_rounded else "different").inc()
        if not (is_equal or is_rounded):
            logger.error(
                "request %d (%s) of model %s gave another answer when it ran again than the one that its client "
                "received, on a trainer with the same numerics: check the trainer's kernels for nondeterminism",
                entry.seq_id,
                entry.kind,
                entry.model_id,
            )

    def _other_numerics(self, entry: Entry) -> str:
        """Describes how the trainer's numerics differ from those of the first run; empty if no difference is known."""
        now = self._trainer.info.numerics if self._trainer.info is not None else {}
        unlike = [name for name, value in entry.numerics.items() if now.get(name, value) != value]
        return ", ".join(f"{name} {now[name]} instead of {entry.numerics[name]}" for name in sorted(unlike))


def _pending(model: Model, kind: Kind, seq_id: int, request: bytes = b"") -> Pending:
    """Returns a pending command that no client waits for."""
    own_id = future_id(model.model_id, seq_id)
    submission = Submission(own_id, kind, model.owner, model.session_id, model.model_id, seq_id, traceparent="")
    return Pending(submission, request)
