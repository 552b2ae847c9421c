"""Runs a training command in its turn and keeps its outcome.

What changes a model has no deadline: to give it up would leave unknown what it did. The trainer knows it by its seq_id,
does it once, and says what came of it however often it is asked.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from fovea.runtime.tasks import Backoff
from fovea.wire.errors import DiskFull, FoveaError, NotFound, StorageBehind, Unavailable
from fovea_gateway.futures.future import Done, Kind, Outcome, Pending, QueueState, Submission, run_to_outcome
from fovea_gateway.futures.futures import Futures
from fovea_gateway.replicas.trainer_link import TrainerLink
from fovea_gateway.training.batches import BATCH_KINDS, Batches
from fovea_gateway.training.journal import Journal
from fovea_gateway.training.models import Model, Models, ModelState
from fovea_gateway.training.residence import Residence
from fovea_gateway.training.step_commands import COMPUTING

logger = logging.getLogger(__name__)

_FIRST_LOOK_S, _LONGEST_LOOK_S = 1.0, 30.0
"""Pauses between two tries to save on a full disk: each try writes what there is room for."""

_BEHIND_S = 0.5
"""The pause before a command is tried again that waits for durable points: the trainer keeps its place in the line."""

Command = Callable[[Model, Pending, bytes], Awaitable[Done]]


class CommandRunner:
    """Runs training commands on models of one base model: the model must be there, the outcome is kept, a failure has
    consequences.

    Args:
        trainer: Of this base model, as are `residence` and `batches`.
        commands: What is done for each kind.
        disk_wait_s: How long a command that saves waits for room on a full disk.
    """

    def __init__(
        self,
        futures: Futures,
        models: Models,
        trainer: TrainerLink,
        residence: Residence,
        journal: Journal,
        batches: Batches,
        commands: Mapping[Kind, Command],
        disk_wait_s: float,
    ) -> None:
        self._futures, self._models, self._residence, self._journal = futures, models, residence, journal
        self._trainer, self._batches, self._commands = trainer, batches, commands
        self._disk_wait_s = disk_wait_s

    def begin(self, pending: Pending) -> None:
        """Starts on what can be done before a command's turn comes."""
        if pending.submission.kind in BATCH_KINDS:
            self._batches.begin(pending)

    async def free(self, model: Model) -> None:
        """Has the trainer free a model that is over."""
        try:
            await self._trainer.client.delete_model(model.model_id)
        except FoveaError as error:
            logger.warning("model %s could not be freed: %s", model.model_id, error)

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
        is_afresh = submission.kind is Kind.FORWARD_BACKWARD and _begin_afresh(model, submission)
        if submission.rejection is not None:
            raise submission.rejection
        is_creation = submission.kind is Kind.CREATE_MODEL
        if not is_creation:
            await self._models.check_ready(model)
            await self._residence.require(model, pending)
        while submission.kind is Kind.FORWARD_BACKWARD and self._journal.must_wait(model):
            words = (
                "the journal is full (max_journal_bytes): this waits until the trainer has written a durable point of "
                "this model"
            )
            await self._wait_a_little(model, pending, words, _BEHIND_S)
        if submission.kind is Kind.SAVE_FOR_SAMPLER:
            model.next_snapshot += 1
        pending.begin()
        pending.progress.wait_on("running")
        # A trainer that keeps recovery knows by itself what was begun, and would idle until the disk has it too.
        if is_afresh or model.journaled_since is None or submission.kind not in COMPUTING:
            await self._futures.set_running(pending, [self._models.saving(model)])
        blob = await self._futures.request_of(pending)
        looks = Backoff(self._disk_wait_s, _FIRST_LOOK_S, _LONGEST_LOOK_S)
        while True:
            asked = model.trainer_instance  # by the time it fails, the model may be back in the next one
            try:
                return await self._commands[submission.kind](model, pending, blob)
            except (Unavailable, NotFound) as error:
                if is_creation:
                    raise
                await self._residence.mend(model, pending, error, asked)
            except StorageBehind as error:
                await self._wait_a_little(model, pending, error.message, _BEHIND_S)
            except DiskFull as error:
                if looks.is_over:
                    raise
                await self._wait_for_room(model, pending, error, looks)

    async def _wait_for_room(self, model: Model, pending: Pending, error: DiskFull, looks: Backoff) -> None:
        """A save changes no model and leaves nothing half-written, so it waits: what comes after it waits for its turn.

        Raises what `Residence.require` does.
        """
        place = error.metadata.get("place", "the checkpoints")
        logger.warning("%s waits, the disk of %s is full", pending.submission.future_id, place)
        words = "the disk of the checkpoints is full: this waits for room, delete checkpoints or have it made larger"
        await self._wait_a_little(model, pending, words, min(looks.next_s, looks.left_s))
        looks.lengthen()

    async def _wait_a_little(self, model: Model, pending: Pending, words: str, seconds: float) -> None:
        """Tells the client what its command waits for. Raises what `Residence.require` does."""
        pending.progress.wait_on(words, QueueState.PAUSED)
        await self._residence.pause(model, seconds)
        await self._residence.require(model, pending)  # the trainer may have restarted meanwhile
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
        if kind is Kind.CREATE_MODEL:
            model.user_metadata = {}  # of a model that failed the row is kept for a while, and nothing else
    if kind is Kind.OPTIM_STEP:
        model.is_accumulating = False


def _begin_afresh(model: Model, submission: Submission) -> bool:
    """Forgets a failed forward_backward if nothing else was accumulated and the caller knew when it sent this one; says
    whether it did.
    """
    is_afresh = (
        model.failed_seq_id is not None
        and submission.known_failure == model.failed_seq_id
        and not model.is_accumulating
    )
    if is_afresh:
        model.failed_seq_id, model.failed_reason = None, ""
    return is_afresh
