"""Running a training command: its model must be there, its outcome is kept, its failure has consequences."""

import logging
import time

from fovea.runtime import tracing
from fovea.wire.errors import FoveaError, ModelLost, NotFound, Unavailable
from gateway.futures import records
from gateway.futures.future import Kind, Outcome, Pending, State, unforeseen
from gateway.futures.futures import FutureBoard
from gateway.training import export_command as exports
from gateway.training import model_creation as creation
from gateway.training import save_commands as saves
from gateway.training import step_commands as steps
from gateway.training.command_context import Command, Context, Done
from gateway.training.model_rows import Model, ModelState

logger = logging.getLogger(__name__)

COMMANDS: dict[Kind, Command] = {
    Kind.CREATE_MODEL: creation.create_model,
    Kind.LOAD_STATE: creation.load_state,
    Kind.FORWARD: steps.forward_backward,
    Kind.FORWARD_BACKWARD: steps.forward_backward,
    Kind.OPTIM_STEP: steps.optim_step,
    Kind.SAVE_STATE: saves.save_state,
    Kind.SAVE_FOR_SAMPLER: saves.save_for_sampler,
    Kind.SAVE_EXTERNAL: exports.save_external,
}

_CHANGING = (Kind.OPTIM_STEP, Kind.LOAD_STATE)
"""Commands after which the weights are others: if what came of one cannot be learned, the model is lost."""


class CommandRunner:
    """What a Line calls for each command in turn."""

    def __init__(self, board: FutureBoard, context: Context) -> None:
        self._board = board
        self._context = context

    async def execute(self, pending: Pending) -> None:
        """Runs a command and ends its future, together with what must be remembered of its model. Never raises."""
        model = await self._context.models.load(pending.scope)
        with tracing.span(f"future {pending.kind}", pending.traceparent, future_id=pending.future_id):
            await self._execute(model, pending)

    async def _execute(self, model: Model, pending: Pending) -> None:
        done, error = Done([]), None
        try:
            done = await self._run(model, pending)
        except FoveaError as failure:
            error = failure
        except Exception as failure:
            error = unforeseen(pending, failure)
        await self._end(model, pending, done, error)

    async def refuse(self, pending: Pending, error: FoveaError | None) -> None:
        """Ends a command that can no longer run: too late, or its session is over."""
        late = f"request {pending.seq_id} came after later ones had stopped waiting for it"
        await self._end(await self._context.models.load(pending.scope), pending, Done([]), error or NotFound(late))

    def skip(self, model: Model, first: int, last: int) -> None:
        """Notes that requests never arrived: they may have been gradients, so the next step must not be taken."""
        if model.failed_seq_id is None:
            model.failed_seq_id, model.failed_reason = first, f"requests {first} to {last} never arrived"

    async def _run(self, model: Model, pending: Pending) -> Done:
        if pending.kind is Kind.FORWARD_BACKWARD:
            _begin_afresh(model, pending)
        if pending.rejection is not None:
            raise pending.rejection
        if pending.kind is not Kind.CREATE_MODEL:
            await self._context.models.check_ready(model)
            await self._check_trainer(model, pending)
        if pending.kind is Kind.SAVE_FOR_SAMPLER:
            model.next_snapshot += 1
        pending.begin()
        pending.wait_on("running")
        await self._board.set_running(pending, [self._context.models.saving(model)])
        blob = await self._board.request_of(pending)
        try:
            return await COMMANDS[pending.kind](self._context, model, pending, blob)
        except Unavailable as error:
            raise await self._explain(model, pending, error) from None

    async def _check_trainer(self, model: Model, pending: Pending) -> None:
        trainer = self._context.trainer
        # An earlier gateway had sent it: whoever does not learn now what came of it never will.
        was_sent = pending.state is State.RUNNING
        try:
            info = await trainer.require(self._context.patience_s if was_sent else 0.0)
        except Unavailable as error:
            raise await self._unreachable(model, pending, error.message, was_sent) from None
        if info.instance_id != model.trainer_instance:
            raise await self._context.models.mark_lost(model, trainer.address)

    async def _explain(self, model: Model, pending: Pending, error: Unavailable) -> FoveaError:
        """A call broke off: says whether the trainer restarted, went away, or merely did not answer."""
        trainer = self._context.trainer
        instance = await trainer.look_again()
        if isinstance(error, ModelLost) or model.state is not ModelState.READY:
            return error
        if instance and instance != model.trainer_instance:
            return await self._context.models.mark_lost(model, trainer.address)
        reason = f"the trainer at {trainer.address} broke off during this {pending.kind} ({error.message})"
        if not instance or pending.kind in _CHANGING:
            return await self._unreachable(model, pending, reason, was_sent=True)
        return Unavailable(f"{reason} but still holds the model, unchanged: send this again")

    async def _unreachable(self, model: Model, pending: Pending, reason: str, was_sent: bool) -> FoveaError:
        if was_sent and pending.kind in _CHANGING:
            model.state, model.state_reason = ModelState.LOST, reason
        return await self._context.models.lost_error(model, reason)

    async def _end(self, model: Model, pending: Pending, done: Done, error: FoveaError | None) -> None:
        if error is not None:
            tracing.note(reason=error.reason)
            logger.warning("%s of %s failed: %s: %s", pending.kind, pending.future_id, error.reason, error)
            if pending.kind is Kind.FORWARD_BACKWARD and model.failed_seq_id is None:
                model.failed_seq_id, model.failed_reason = pending.seq_id, error.message
            if pending.kind is Kind.CREATE_MODEL and model.state is ModelState.CREATING:
                model.state, model.state_reason = ModelState.FAILED, error.message
        else:
            logger.info("%s of %s done in %.2f s", pending.kind, pending.future_id, time.time() - pending.created_at)
            if pending.kind is Kind.FORWARD_BACKWARD:
                model.is_accumulating = True
            if pending.kind is Kind.LOAD_STATE:
                model.is_accumulating, model.failed_seq_id, model.failed_reason = False, None, ""
        if pending.kind is Kind.OPTIM_STEP:
            model.is_accumulating = False
        self._context.batches.drop(pending)
        model.next_seq_id = max(model.next_seq_id, pending.seq_id + 1)
        outcome = Outcome(pending.kind, records.join(done.result), error)
        try:
            await self._board.finish(pending, outcome, [*done.effects, self._context.models.saving(model)])
            for step in done.afterwards:
                await step()
        except Exception:
            logger.exception("the outcome of %s could not be kept", pending.future_id)


def _begin_afresh(model: Model, pending: Pending) -> None:
    """Forgets a failed forward_backward if nothing else was accumulated and the caller knew when it sent this one."""
    if model.failed_seq_id is not None and pending.known_failure == model.failed_seq_id and not model.is_accumulating:
        model.failed_seq_id, model.failed_reason = None, ""
