"""Training commands: what runs one in its turn and keeps its outcome; and those that compute, which are forward,
forward_backward and optim_step.

What changes a model has no deadline: to give it up would leave unknown what it did. The trainer knows it by its seq_id,
does it once, and says what came of it however often it is asked.
"""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from fovea.api.v1 import gateway_pb2, trainer_pb2
from fovea.client import ForwardBackwardResult
from fovea.wire.errors import FailedPrecondition, FeatureEvicted, FoveaError, ModelLost, NotFound, Unavailable
from gateway.fair_queue import FairQueue, Turn
from gateway.futures.future import Done, Kind, Outcome, Pending, QueueState, State, Submission, run_to_outcome
from gateway.futures.futures import Futures
from gateway.gateway_metrics import stage
from gateway.replicas.trainer_link import TrainerLink
from gateway.training.batches import BATCH_KINDS, Batch, Batches
from gateway.training.models import Model, Models, ModelState

logger = logging.getLogger(__name__)

_CHANGING = (Kind.OPTIM_STEP, Kind.LOAD_STATE)
"""Commands after which the weights are others: if what came of one cannot be learned, the model is lost."""

_STEP_TOKENS = 256
"""What an optim_step costs of an owner's share: about as much time as a small batch's tokens."""

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


class StepCommands:
    """Runs forward, forward_backward and optim_step, in turns that owners share by tokens.

    Args:
        turns: Lets commands to the trainer, as many at once as keep it busy. Nobody who has a turn may wait for one.
    """

    def __init__(self, batches: Batches, trainer: TrainerLink, turns: FairQueue) -> None:
        self._batches, self._trainer, self._turns = batches, trainer, turns

    async def forward_backward(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Renders the datums and has their loss computed, with gradients or without."""
        pending.progress.wait_on("rendering")
        batch = await self._batches.take(pending)
        again: list[int] = []
        portion = len(batch.datums)
        while True:
            try:
                answer = await self._compute(model, batch, pending)
                break
            except FeatureEvicted as error:  # the trainer fetches before it computes: nothing was added yet
                missing = _missing(error, len(batch.datums))
                came = len(set(again).difference(missing))
                if again and not came and portion == 1:
                    raise
                # As many as came the last time: more than renderers hold at once would push each other out.
                portion = max(1, came or portion // 4) if again else portion
                again = missing[:portion]
                pending.progress.wait_on("rendering again what the renderers no longer hold")
                batch = await self._batches.render_again(pending, batch, again)
        outputs = [gateway_pb2.WaitFutureResponse(output=output) for output in answer.outputs]
        metrics = trainer_pb2.Metrics(values=answer.metrics)
        return Done([*outputs, gateway_pb2.WaitFutureResponse(metrics=metrics)])

    async def _compute(self, model: Model, batch: Batch, pending: Pending) -> ForwardBackwardResult:
        batch.header.seq_id = pending.submission.seq_id
        batch.header.drop_gradients = not model.is_accumulating
        tokens = sum(len(datum.input.tokens) // 4 for datum in batch.datums)
        async with self._turn(pending, tokens, "computing, or waiting for the trainer"):
            answer = await self._trainer.settle(
                model.trainer_instance,
                lambda: self._trainer.client.forward_backward(batch.header, batch.datums, timeout_s=None),
            )
        if pending.submission.kind is Kind.FORWARD_BACKWARD:
            pending.usage.trained_tokens += tokens
        else:
            pending.usage.scored_tokens += tokens
        return answer

    async def optim_step(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Takes a step, unless a forward_backward since the last one failed: then gradients are partial and dropped."""
        trainer, held_by, seq_id = self._trainer, model.trainer_instance, pending.submission.seq_id
        if model.failed_seq_id is not None:
            failed, reason = model.failed_seq_id, model.failed_reason
            await trainer.settle(
                held_by,
                lambda: trainer.client.clear_gradients(model.model_id, timeout_s=None, seq_id=seq_id),
            )
            model.failed_seq_id, model.failed_reason = None, ""
            raise FailedPrecondition(
                f"this optim_step (request {seq_id}) was not taken: forward_backward request {failed} before it "
                f"failed ({reason}), so the gradients were partial. They were dropped; send the forward_backward calls "
                "again, then optim_step"
            )
        request = gateway_pb2.SubmitOptimStepRequest.FromString(blob)
        async with self._turn(pending, _STEP_TOKENS, "stepping, or waiting for the trainer"):
            answer = await trainer.settle(
                held_by,
                lambda: trainer.client.optim_step(
                    model.model_id, request.adam, timeout_s=None, seq_id=pending.submission.seq_id
                ),
            )
        return Done([gateway_pb2.WaitFutureResponse(metrics=answer.metrics)])

    @asynccontextmanager
    async def _turn(self, pending: Pending, tokens: int, doing: str) -> AsyncIterator[None]:
        """Waits until the command may go to the trainer, and is one of those there until the block ends."""
        turn, kind = Turn(pending.submission.owner, tokens), pending.submission.kind.value
        pending.progress.queue(lambda: f"waiting for the trainer: {self._turns.describe(turn)}", QueueState.PAUSED)
        try:
            async with AsyncExitStack() as held:
                with stage("turn", kind):
                    await held.enter_async_context(self._turns.place(turn))
                pending.progress.wait_on(doing)
                with stage("train", kind):
                    yield
        finally:
            devices = self._trainer.info.world_size if self._trainer.info is not None else 1
            pending.usage.gpu_seconds += turn.seconds * max(devices, 1)


def _missing(error: FeatureEvicted, count: int) -> list[int]:
    """The datums that must be rendered again; all, if the trainer does not say."""
    named = error.metadata.get("datums", "")
    return [int(index) for index in named.split(",") if int(index) < count] if named else list(range(count))
