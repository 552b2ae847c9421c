"""Runs training commands and stores their outcomes; contains the commands that compute.

A command that changes a model has no deadline: if the gateway gave up, it would not know what the command has done. The
trainer identifies such a command by its seq_id, runs it once, and returns the same outcome however often the gateway
asks.
"""

import logging
import time

from google.protobuf.message import Message

from fovea.api.v1 import gateway_pb2, trainer_pb2
from fovea.client import ForwardBackwardResult
from fovea.runtime.tasks import Backoff
from fovea.wire.errors import (
    DiskFull,
    FailedPrecondition,
    FeatureEvicted,
    FoveaError,
    NotFound,
    StorageBehind,
    Unavailable,
)
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.sessions.future import Done, Kind, Outcome, Pending, QueueState, Submission, run_to_outcome
from fovea_gateway.sessions.futures import Futures
from fovea_gateway.training.batches import BATCH_KINDS, Batch, Batches, LossRequest
from fovea_gateway.training.journal import Journal
from fovea_gateway.training.models import Model, Models, ModelState
from fovea_gateway.training.residency import HandedOver, Residency, TrainerSide
from fovea_gateway.training.trainer_pool import TrainerPool
from fovea_gateway.training.trainer_queue import TrainerQueue

logger = logging.getLogger(__name__)

_FIRST_LOOK_S, _LONGEST_LOOK_S = 1.0, 30.0
"""The shortest and the longest pause between two attempts to save on a full disk. Each attempt writes what fits."""

_BEHIND_S = 0.5
"""The pause before a retry of a command that waits for durable points. The trainer remembers its queue position."""


class CommandRunner:
    """The runner of the training commands of one base model.

    Before a command, it makes sure that the model's trainer holds the model. Afterwards it stores the outcome and
    updates the state of the model. If the model moves meanwhile, the command runs in the next trainer.

    Args:
        pool: The trainers of this base model.
        disk_wait_s: Seconds that a saving command waits for space on a full disk.
    """

    def __init__(
        self,
        futures: Futures,
        models: Models,
        pool: TrainerPool,
        journal: Journal,
        batches: Batches,
        disk_wait_s: float,
    ) -> None:
        self._futures, self._models, self._pool, self._journal = futures, models, pool, journal
        self._batches, self._disk_wait_s = batches, disk_wait_s

    def begin(self, pending: Pending, decoded: LossRequest | None) -> None:
        """Starts the preparation of a command's batch before the command's turn."""
        if pending.submission.kind in BATCH_KINDS:
            self._batches.begin(pending, decoded)

    async def free(self, model: Model) -> None:
        """Makes the trainer free a model that has ended."""
        try:
            await self._pool.side_of(model).link.client.delete_model(model.model_id)
        except FoveaError as error:
            logger.warning("the trainer could not free model %s: %s", model.model_id, error)

    async def run(self, pending: Pending) -> None:
        """Runs a command, then stores its outcome and the new state of its model in one transaction. Never raises."""
        model = await self._models.load(pending.submission.scope)
        with self._pool.running(model):
            done, outcome = await run_to_outcome(pending, self._attempt(model, pending))
            await self._end(model, pending, done, outcome)

    async def refuse(self, pending: Pending, error: FoveaError | None) -> None:
        """Fails a command that can no longer run because it came too late or because its session has ended."""
        submission = pending.submission
        error = error or NotFound(f"request {submission.seq_id} arrived too late: the model went on without it")
        logger.warning("refused %s of %s: %s", submission.kind, submission.future_id, error)
        model = await self._models.load(submission.scope)
        await self._end(model, pending, Done(), Outcome(submission.kind, b"", error))

    def skip(self, model: Model, first: int, last: int) -> None:
        """Records that requests never arrived. They may have carried gradients, so the next optim_step must fail."""
        if model.failed_seq_id is None:
            model.failed_seq_id, model.failed_reason = first, f"requests {first} to {last} never arrived"

    async def _attempt(self, model: Model, pending: Pending) -> Done:
        submission = pending.submission
        is_afresh = submission.kind is Kind.FORWARD_BACKWARD and _begin_afresh(model, submission)
        if submission.rejection is not None:
            raise submission.rejection
        if submission.kind is not Kind.CREATE_MODEL:
            await self._models.check_ready(model)
        while True:
            side = self._pool.side_of(model)
            try:
                return await self._attempt_at(side, model, pending, is_afresh)
            except HandedOver:
                self._pool.move(model, side)

    async def _attempt_at(self, side: TrainerSide, model: Model, pending: Pending, is_afresh: bool) -> Done:
        submission, residency = pending.submission, side.residency
        is_creation = submission.kind is Kind.CREATE_MODEL
        if not is_creation:
            await residency.require(model, pending)
        is_journaled = submission.kind is Kind.FORWARD_BACKWARD and model.journaled_since is not None
        while is_journaled and self._journal.must_wait(model):
            words = (
                "the journal is full (max_journal_bytes): the request waits until the trainer has written a durable "
                "point of this owner's models"
            )
            await _wait_a_little(residency, model, pending, words, _BEHIND_S)
        if submission.kind is Kind.SAVE_FOR_SAMPLER:
            model.next_snapshot += 1
        pending.begin()
        pending.progress.wait_on("running")
        # A trainer that keeps recovery remembers which commands it began. If it also waited for the gateway's disk, it
        # would be idle.
        if is_afresh or model.journaled_since is None or submission.kind not in COMPUTING:
            await self._futures.set_running(pending, [self._models.saving(model)])
        blob = await self._futures.request_of(pending)
        looks = Backoff(self._disk_wait_s, _FIRST_LOOK_S, _LONGEST_LOOK_S)
        while True:
            asked = model.trainer_instance  # When the call fails, the model may already be in the next trainer process.
            try:
                return await side.commands[submission.kind](model, pending, blob)
            except (Unavailable, NotFound) as error:
                if is_creation:
                    raise
                await residency.recover(model, pending, error, asked)
            except StorageBehind as error:
                await _wait_a_little(residency, model, pending, error.message, _BEHIND_S)
            except DiskFull as error:
                if looks.is_over:
                    raise
                await _wait_for_room(residency, model, pending, error, looks)

    async def _end(self, model: Model, pending: Pending, done: Done, outcome: Outcome) -> None:
        submission = pending.submission
        is_first = submission.kind is Kind.FORWARD_BACKWARD and not model.is_accumulating
        _note_end(model, submission, outcome.error)
        effects, link = list(done.effects), self._pool.side_of(model).link
        if model.journaled_since is not None or (link.info is not None and link.info.keeps_recovery):
            effects += self._journal.record(link, model, pending, done, outcome.error, is_first)
        if submission.kind in BATCH_KINDS:
            self._batches.drop(pending)
        model.next_seq_id = max(model.next_seq_id, submission.seq_id + 1)
        try:
            await self._futures.finish(pending, outcome, [*effects, self._models.saving(model)])
            for step in done.afterwards:
                await step()
        except Exception:
            logger.exception("could not store the outcome of %s", submission.future_id)


async def _wait_for_room(residency: Residency, model: Model, pending: Pending, error: DiskFull, looks: Backoff) -> None:
    """Waits for disk space: a save changes no model and leaves no partial files. Later commands wait behind it.

    Raises the same errors as `Residency.require`.
    """
    place = error.metadata.get("place", "the checkpoints")
    logger.warning("%s waits: the disk of %s is full", pending.submission.future_id, place)
    words = "the disk of the checkpoints is full: the request waits for space. Delete checkpoints or enlarge the disk"
    await _wait_a_little(residency, model, pending, words, min(looks.next_s, looks.left_s))
    looks.lengthen()


async def _wait_a_little(residency: Residency, model: Model, pending: Pending, words: str, seconds: float) -> None:
    """Reports to the client why its command waits, then waits. Raises the same errors as `Residency.require`."""
    pending.progress.wait_on(words, QueueState.PAUSED)
    await residency.pause(model, seconds)
    await residency.require(model, pending)  # The trainer may have restarted in the meantime.
    pending.progress.wait_on("running")


def _note_end(model: Model, submission: Submission, error: FoveaError | None) -> None:
    """Updates the state of a model after a command has ended."""
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
        if kind is Kind.CREATE_MODEL:
            model.user_metadata = {}  # The row of a failed model remains for a while; its metadata need not.
    if kind is Kind.OPTIM_STEP:
        model.is_accumulating = False


def _begin_afresh(model: Model, submission: Submission) -> bool:
    """Forgets a failed forward_backward, so that gradient accumulation starts anew, and returns True.

    Returns False and changes nothing if other gradients were accumulated, or if the client did not yet know of the
    failure when it sent this request.
    """
    is_afresh = (
        model.failed_seq_id is not None
        and submission.known_failure == model.failed_seq_id
        and not model.is_accumulating
    )
    if is_afresh:
        model.failed_seq_id, model.failed_reason = None, ""
    return is_afresh


COMPUTING = (Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP)


class StepCommands:
    """The commands forward, forward_backward and optim_step."""

    def __init__(
        self, futures: Futures, models: Models, batches: Batches, trainer: TrainerLink, trainer_queue: TrainerQueue
    ) -> None:
        self._futures, self._models, self._batches, self._trainer = futures, models, batches, trainer
        self._trainer_queue = trainer_queue

    async def forward_backward(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Renders the datums and computes their loss, with or without gradients."""
        return Done(await self.compute(pending, not model.is_accumulating, model))

    async def compute(self, pending: Pending, drop_gradients: bool, model: Model | None = None) -> list[Message]:
        """Returns the outputs of a forward or forward_backward, then its metrics.

        Args:
            model: The model, which must be in the trainer as its last command left it. None for a command that runs
                again to restore a model.
        """
        pending.progress.wait_on("rendering")
        batch = await self._batches.take(pending, is_again=model is None)
        again: list[int] = []
        portion = len(batch.datums)
        while True:
            try:
                answer = await self._send(batch, pending, drop_gradients, model)
                break
            except FeatureEvicted as error:  # The trainer fetches images before it computes, so no gradient was added.
                missing = _missing(error, len(batch.datums))
                came = len(set(again).difference(missing))
                if again and not came and portion == 1:
                    raise
                # Render as many at once as arrived last time: more than the renderers can hold would evict one another.
                portion = max(1, came or portion // 4) if again else portion
                again = missing[:portion]
                pending.progress.wait_on("rendering again the images that the renderers no longer hold")
                batch = await self._batches.render_again(pending, batch, again)
        outputs = [gateway_pb2.WaitFutureResponse(output=output) for output in answer.outputs]
        metrics = trainer_pb2.Metrics(values=answer.metrics)
        return [*outputs, gateway_pb2.WaitFutureResponse(metrics=metrics)]

    async def _send(
        self, batch: Batch, pending: Pending, drop_gradients: bool, model: Model | None
    ) -> ForwardBackwardResult:
        batch.header.seq_id = pending.submission.seq_id
        batch.header.drop_gradients = drop_gradients
        batch.header.place = pending.place
        tokens = sum(len(datum.input.tokens) // 4 for datum in batch.datums)
        shares = not batch.header.HasField("custom_loss")
        async with self._trainer_queue.admit(
            pending, "computing, or waiting for the trainer", tokens, is_again=model is None, shares=shares
        ) as turn:
            client = self._trainer.client if model is None else self._models.client_of(model, self._trainer)
            in_groups = self._trainer.info is not None and self._trainer.info.takes_groups
            answer = await client.forward_backward(batch.header, batch.datums, None, in_groups)
            turn.measured = answer.seconds or None
        pending.place = answer.place
        if pending.submission.kind is Kind.FORWARD_BACKWARD:
            pending.usage.trained_tokens += tokens
        else:
            pending.usage.scored_tokens += tokens
        return answer

    async def optim_step(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Makes an optimizer step. If a forward_backward has failed since the last step, drops the partial gradients
        instead and raises FailedPrecondition.
        """
        seq_id = pending.submission.seq_id
        if model.failed_seq_id is not None:
            failed, reason = model.failed_seq_id, model.failed_reason
            async with self._trainer_queue.admit(pending, "dropping partial gradients, or waiting for the trainer"):
                client = self._models.client_of(model, self._trainer)
                await client.clear_gradients(model.model_id, timeout_s=None, seq_id=seq_id)
            model.failed_seq_id, model.failed_reason = None, ""
            raise FailedPrecondition(
                f"this optim_step (request {seq_id}) was not taken: forward_backward request {failed} before it "
                f"failed ({reason}), so the gradients were partial. They were dropped; send the forward_backward calls "
                "again, then optim_step"
            )
        request = gateway_pb2.SubmitOptimStepRequest.FromString(blob)
        async with self._trainer_queue.admit(pending, "stepping, or waiting for the trainer", shares=True) as turn:
            client = self._models.client_of(model, self._trainer)
            answer = await client.optim_step(model.model_id, request.adam, timeout_s=None, seq_id=seq_id)
            turn.measured = answer.seconds or None
        return Done([gateway_pb2.WaitFutureResponse(metrics=answer.metrics)])


def _missing(error: FeatureEvicted, count: int) -> list[int]:
    """Returns the indexes of the datums to render again; all of them if the trainer names none that exists."""
    named = error.metadata.get("datums", "")
    found = [int(index) for index in named.split(",") if 0 <= int(index) < count] if named else []
    return found or list(range(count))
