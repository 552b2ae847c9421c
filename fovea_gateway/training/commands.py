"""Runs one training command and stores its outcome.

A command that changes a model has no deadline: if the gateway gave up, it would not know what the command has done. The
trainer identifies such a command by its seq_id, runs it once, and returns the same outcome however often the gateway
asks.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from fovea.runtime.tasks import Backoff
from fovea.wire.errors import DiskFull, FoveaError, NotFound, StorageBehind, Unavailable
from fovea_gateway.futures.future import Done, Kind, Outcome, Pending, QueueState, Submission, run_to_outcome
from fovea_gateway.futures.futures import Futures
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.training.batches import BATCH_KINDS, Batches
from fovea_gateway.training.journal import Journal
from fovea_gateway.training.models import Model, Models, ModelState
from fovea_gateway.training.residency import Residency
from fovea_gateway.training.step_commands import COMPUTING

logger = logging.getLogger(__name__)

_FIRST_LOOK_S, _LONGEST_LOOK_S = 1.0, 30.0
"""The shortest and the longest pause between two attempts to save on a full disk. Each attempt writes what fits."""

_BEHIND_S = 0.5
"""The pause before a retry of a command that waits for durable points. The trainer remembers its queue position."""

Command = Callable[[Model, Pending, bytes], Awaitable[Done]]


class CommandRunner:
    """Runs the training commands of one base model.

    Before a command, it makes sure that the trainer holds the model. Afterwards it stores the outcome and updates the
    state of the model.

    Args:
        trainer: The trainer of this base model; `residency` and `batches` belong to it too.
        commands: The function that runs each kind of command.
        disk_wait_s: Seconds that a saving command waits for space on a full disk.
    """

    def __init__(
        self,
        futures: Futures,
        models: Models,
        trainer: TrainerLink,
        residency: Residency,
        journal: Journal,
        batches: Batches,
        commands: Mapping[Kind, Command],
        disk_wait_s: float,
    ) -> None:
        self._futures, self._models, self._residency, self._journal = futures, models, residency, journal
        self._trainer, self._batches, self._commands = trainer, batches, commands
        self._disk_wait_s = disk_wait_s

    def begin(self, pending: Pending) -> None:
        """Starts the work that a command allows before it may run."""
        if pending.submission.kind in BATCH_KINDS:
            self._batches.begin(pending)

    async def free(self, model: Model) -> None:
        """Makes the trainer free a model that has ended."""
        try:
            await self._trainer.client.delete_model(model.model_id)
        except FoveaError as error:
            logger.warning("the trainer could not free model %s: %s", model.model_id, error)

    async def run(self, pending: Pending) -> None:
        """Runs a command, then stores its outcome and the new state of its model in one transaction. Never raises."""
        model = await self._models.load(pending.submission.scope)
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
        is_creation = submission.kind is Kind.CREATE_MODEL
        if not is_creation:
            await self._models.check_ready(model)
            await self._residency.require(model, pending)
        while submission.kind is Kind.FORWARD_BACKWARD and self._journal.must_wait(model):
            words = (
                "the journal is full (max_journal_bytes): the request waits until the trainer has written a durable "
                "point of this model"
            )
            await self._wait_a_little(model, pending, words, _BEHIND_S)
        if submission.kind is Kind.SAVE_FOR_SAMPLER:
            model.next_snapshot += 1
        pending.begin()
        pending.progress.wait_on("running")
        # A trainer that keeps recovery remembers which commands it began. Waiting for our disk as well would idle it.
        if is_afresh or model.journaled_since is None or submission.kind not in COMPUTING:
            await self._futures.set_running(pending, [self._models.saving(model)])
        blob = await self._futures.request_of(pending)
        looks = Backoff(self._disk_wait_s, _FIRST_LOOK_S, _LONGEST_LOOK_S)
        while True:
            asked = model.trainer_instance  # When the call fails, the model may already be in the next trainer process.
            try:
                return await self._commands[submission.kind](model, pending, blob)
            except (Unavailable, NotFound) as error:
                if is_creation:
                    raise
                await self._residency.recover(model, pending, error, asked)
            except StorageBehind as error:
                await self._wait_a_little(model, pending, error.message, _BEHIND_S)
            except DiskFull as error:
                if looks.is_over:
                    raise
                await self._wait_for_room(model, pending, error, looks)

    async def _wait_for_room(self, model: Model, pending: Pending, error: DiskFull, looks: Backoff) -> None:
        """Waits for disk space: a save changes no model and leaves no partial files. Later commands wait behind it.

        Raises the same errors as `Residency.require`.
        """
        place = error.metadata.get("place", "the checkpoints")
        logger.warning("%s waits: the disk of %s is full", pending.submission.future_id, place)
        words = (
            "the disk of the checkpoints is full: the request waits for space. Delete checkpoints or enlarge the disk"
        )
        await self._wait_a_little(model, pending, words, min(looks.next_s, looks.left_s))
        looks.lengthen()

    async def _wait_a_little(self, model: Model, pending: Pending, words: str, seconds: float) -> None:
        """Reports to the client why its command waits, then waits. Raises the same errors as `Residency.require`."""
        pending.progress.wait_on(words, QueueState.PAUSED)
        await self._residency.pause(model, seconds)
        await self._residency.require(model, pending)  # The trainer may have restarted in the meantime.
        pending.progress.wait_on("running")

    async def _end(self, model: Model, pending: Pending, done: Done, outcome: Outcome) -> None:
        submission = pending.submission
        is_first = submission.kind is Kind.FORWARD_BACKWARD and not model.is_accumulating
        _note_end(model, submission, outcome.error)
        effects = [
            *done.effects,
            *self._journal.record(self._trainer, model, submission, done, outcome.error, is_first),
        ]
        if submission.kind in BATCH_KINDS:
            self._batches.drop(pending)
        model.next_seq_id = max(model.next_seq_id, submission.seq_id + 1)
        try:
            await self._futures.finish(pending, outcome, [*effects, self._models.saving(model)])
            for step in done.afterwards:
                await step()
        except Exception:
            logger.exception("could not store the outcome of %s", submission.future_id)


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
