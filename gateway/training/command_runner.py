"""Training commands in their turn: a queue for each model, and what runs the command that is in turn."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from fovea.wire.errors import FoveaError, ModelLost, NotFound, Unavailable
from gateway.futures.future import Done, Kind, Outcome, Pending, State, Submission, run_to_outcome
from gateway.futures.futures import Futures
from gateway.replicas.trainer_link import TrainerLink
from gateway.training.models import Model, Models, ModelState
from gateway.training.step_commands import BATCH_KINDS, Batches

logger = logging.getLogger(__name__)

_CHANGING = (Kind.OPTIM_STEP, Kind.LOAD_STATE)
"""Commands after which the weights are others: if what came of one cannot be learned, the model is lost."""


class CommandQueue:
    """The commands of one model: run one after another, strictly by seq_id, whatever order they arrive in.

    Args:
        model_id: For logs.
        next_seq_id: The first command in turn.
        run: Runs one command and ends its future, well or badly; never raises.
        refuse: Ends the future of a command that can no longer run.
        skip: Notes that a range of seq ids never arrived.
        gap_timeout_s: How long later commands wait for a missing one, counted from the last arrival.
    """

    def __init__(
        self,
        model_id: str,
        next_seq_id: int,
        run: Callable[[Pending], Awaitable[None]],
        refuse: Callable[[Pending, FoveaError | None], Awaitable[None]],
        skip: Callable[[int, int], None],
        gap_timeout_s: float,
    ) -> None:
        self._model_id = model_id
        self._next = next_seq_id
        self._run, self._refuse, self._skip = run, refuse, skip
        self._gap_timeout_s = gap_timeout_s
        self._waiting: dict[int, Pending] = {}
        self._late: deque[Pending] = deque()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed_by: FoveaError | None = None
        self._is_paused = False

    @property
    def in_turn(self) -> int:
        """The seq_id that runs now, or runs next once it has arrived."""
        return self._next

    def add(self, pending: Pending) -> None:
        """Takes a command; returns at once."""
        if pending.submission.seq_id < self._next:
            self._late.append(pending)
        else:
            self._waiting[pending.submission.seq_id] = pending
            if pending.submission.seq_id != self._next:
                pending.progress.queue(self._describe)
        self._arrived.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name=f"commands of {self._model_id}")

    async def close(self, error: FoveaError) -> None:
        """Refuses what waits and what is to come; the running command ends first."""
        self._closed_by = error
        self._arrived.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def stop(self) -> None:
        """Stops at once, for the end of the process: what waits stays in the database."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def pause(self) -> asyncio.Task[None] | None:
        """Starts nothing more; returns the task to wait for if a command runs now."""
        self._is_paused = True
        self._arrived.set()
        return None if self._task is None or self._task.done() else self._task

    async def _work(self) -> None:
        while (self._waiting or self._late) and not self._is_paused:
            while self._late:
                await self._refuse(self._late.popleft(), self._closed_by)
            if self._closed_by is not None:
                for pending in sorted(self._waiting.values(), key=lambda pending: pending.submission.seq_id):
                    await self._refuse(self._waiting.pop(pending.submission.seq_id), self._closed_by)
            elif self._next in self._waiting:
                await self._run(self._waiting.pop(self._next))
                self._next += 1
            elif self._waiting:
                await self._wait_for_missing()

    def _describe(self) -> str:
        return f"waiting for request {self._next} of this model"

    async def _wait_for_missing(self) -> None:
        self._arrived.clear()
        try:
            await asyncio.wait_for(self._arrived.wait(), self._gap_timeout_s)
        except TimeoutError:
            first = min(self._waiting)
            logger.warning("%s: requests %d to %d never arrived", self._model_id, self._next, first - 1)
            self._skip(self._next, first - 1)
            self._next = first


Command = Callable[[Model, Pending, bytes], Awaitable[Done]]


class CommandRunner:
    """Runs training commands: the model must be there, the outcome is kept, a failure has consequences.

    Args:
        commands: What is done for each kind.
        patience_s: How long a command that was sent before this process began waits for a trainer that restarts.
    """

    def __init__(
        self,
        futures: Futures,
        models: Models,
        trainer: TrainerLink,
        batches: Batches,
        commands: Mapping[Kind, Command],
        patience_s: float,
    ) -> None:
        self._futures, self._models, self._trainer, self._batches = futures, models, trainer, batches
        self._commands, self._patience_s = commands, patience_s

    async def run(self, pending: Pending) -> None:
        """Runs a command and ends its future, together with what must be remembered of its model. Never raises."""
        model = await self._models.load(pending.submission.scope)
        done, outcome = await run_to_outcome(pending, self._attempt(model, pending))
        await self._end(model, pending, done, outcome)

    async def refuse(self, pending: Pending, error: FoveaError | None) -> None:
        """Ends a command that can no longer run: too late, or its session is over."""
        submission = pending.submission
        error = error or NotFound(f"request {submission.seq_id} came after later ones had stopped waiting for it")
        logger.warning("%s of %s is refused: %s", submission.kind, submission.future_id, error)
        model = await self._models.load(submission.scope)
        await self._end(model, pending, Done(), Outcome(submission.kind, b"", error))

    def skip(self, model: Model, first: int, last: int) -> None:
        """Notes that requests never arrived: they may have been gradients, so the next step must not be taken."""
        if model.failed_seq_id is None:
            model.failed_seq_id, model.failed_reason = first, f"requests {first} to {last} never arrived"

    async def _attempt(self, model: Model, pending: Pending) -> Done:
        submission = pending.submission
        if submission.kind is Kind.FORWARD_BACKWARD:
            _begin_afresh(model, submission)
        if submission.rejection is not None:
            raise submission.rejection
        if submission.kind is not Kind.CREATE_MODEL:
            await self._models.check_ready(model)
            await self._check_trainer(model, pending)
        if submission.kind is Kind.SAVE_FOR_SAMPLER:
            model.next_snapshot += 1
        pending.begin()
        pending.progress.wait_on("running")
        await self._futures.set_running(pending, [self._models.saving(model)])
        blob = await self._futures.request_of(pending)
        try:
            return await self._commands[submission.kind](model, pending, blob)
        except Unavailable as error:
            raise await self._explain(model, pending, error) from None

    async def _check_trainer(self, model: Model, pending: Pending) -> None:
        # An earlier gateway had sent it: whoever does not learn now what came of it never will.
        was_sent = pending.state is State.RUNNING
        try:
            info = await self._trainer.require(self._patience_s if was_sent else 0.0)
        except Unavailable as error:
            raise await self._unreachable(model, pending, error.message, was_sent) from None
        if info.instance_id != model.trainer_instance:
            raise await self._models.mark_lost(model, self._trainer.address)

    async def _explain(self, model: Model, pending: Pending, error: Unavailable) -> FoveaError:
        """A call broke off: says whether the trainer restarted, went away, or merely did not answer."""
        instance = await self._trainer.look_again()
        if isinstance(error, ModelLost) or model.state is not ModelState.READY:
            return error
        if instance and instance != model.trainer_instance:
            return await self._models.mark_lost(model, self._trainer.address)
        reason = (
            f"the trainer at {self._trainer.address} broke off during this {pending.submission.kind} ({error.message})"
        )
        if not instance or pending.submission.kind in _CHANGING:
            return await self._unreachable(model, pending, reason, was_sent=True)
        return Unavailable(f"{reason} but still holds the model, unchanged: send this again")

    async def _unreachable(self, model: Model, pending: Pending, reason: str, was_sent: bool) -> FoveaError:
        if was_sent and pending.submission.kind in _CHANGING:
            model.state, model.state_reason = ModelState.LOST, reason
        return await self._models.lost_error(model, reason)

    async def _end(self, model: Model, pending: Pending, done: Done, outcome: Outcome) -> None:
        submission = pending.submission
        _note_end(model, submission, outcome.error)
        if submission.kind in BATCH_KINDS:
            self._batches.drop(pending)
        model.next_seq_id = max(model.next_seq_id, submission.seq_id + 1)
        try:
            await self._futures.finish(pending, outcome, [*done.effects, self._models.saving(model)])
            for step in done.afterwards:
                await step()
        except Exception:
            logger.exception("the outcome of %s could not be kept", submission.future_id)


def _note_end(model: Model, submission: Submission, error: FoveaError | None) -> None:
    """What a model must remember of how a command ended."""
    kind = submission.kind
    if error is None:
        logger.info("%s of %s done in %.2f s", kind, submission.future_id, time.time() - submission.created_at)
        if kind is Kind.FORWARD_BACKWARD:
            model.is_accumulating = True
        if kind is Kind.LOAD_STATE:
            model.is_accumulating, model.failed_seq_id, model.failed_reason = False, None, ""
    else:
        if kind is Kind.FORWARD_BACKWARD and model.failed_seq_id is None:
            model.failed_seq_id, model.failed_reason = submission.seq_id, error.message
        if kind is Kind.CREATE_MODEL and model.state is ModelState.CREATING:
            model.state, model.state_reason = ModelState.FAILED, error.message
    if kind is Kind.OPTIM_STEP:
        model.is_accumulating = False


def _begin_afresh(model: Model, submission: Submission) -> None:
    """Forgets a failed forward_backward if nothing else was accumulated and the caller knew when it sent this one."""
    if (
        model.failed_seq_id is not None
        and submission.known_failure == model.failed_seq_id
        and not model.is_accumulating
    ):
        model.failed_seq_id, model.failed_reason = None, ""
