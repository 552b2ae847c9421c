"""Training submissions: accepted in any order, each once, and handed to the line of their model."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from google.protobuf.message import Message

from fovea.api.v1 import gateway_pb2
from fovea.wire.errors import FoveaError, InvalidInput, SessionEnded
from gateway import identity
from gateway.futures import records
from gateway.futures.future import Kind, Pending
from gateway.futures.futures import FutureBoard
from gateway.identity import Caller
from gateway.replicas.trainer_link import TrainerLink
from gateway.sessions.session_rows import Session
from gateway.sessions.sessions import Sessions
from gateway.training.batches import Batches
from gateway.training.command_runner import CommandRunner
from gateway.training.model_rows import Model, ModelState
from gateway.training.models import Models
from gateway.training.ordered_queue import Line

logger = logging.getLogger(__name__)


Command = (
    gateway_pb2.SubmitOptimStepRequest
    | gateway_pb2.SubmitSaveStateRequest
    | gateway_pb2.SubmitLoadStateRequest
    | gateway_pb2.SubmitSaveForSamplerRequest
    | gateway_pb2.SubmitSaveExternalRequest
)
_KINDS: Mapping[type[Command], Kind] = {
    gateway_pb2.SubmitOptimStepRequest: Kind.OPTIM_STEP,
    gateway_pb2.SubmitSaveStateRequest: Kind.SAVE_STATE,
    gateway_pb2.SubmitLoadStateRequest: Kind.LOAD_STATE,
    gateway_pb2.SubmitSaveForSamplerRequest: Kind.SAVE_FOR_SAMPLER,
    gateway_pb2.SubmitSaveExternalRequest: Kind.SAVE_EXTERNAL,
}


class Training:
    """What clients do with models.

    Content that is wrong never refuses a submission: it fails the future when its turn comes, because a client that was
    refused one of several requests would wait forever for the others (tinker-contract.md, section 3).
    """

    def __init__(
        self,
        board: FutureBoard,
        sessions: Sessions,
        models: Models,
        batches: Batches,
        runner: CommandRunner,
        trainer: TrainerLink,
        gap_timeout_s: float,
    ) -> None:
        self._board, self._sessions, self._models = board, sessions, models
        self._batches, self._runner, self._trainer = batches, runner, trainer
        self._gap_timeout_s = gap_timeout_s
        self._lines: dict[str, Line] = {}
        self._told_failures: dict[str, int] = {}
        self._refusals: set[asyncio.Task[None]] = set()

    async def submit_create(
        self, caller: Caller, request: gateway_pb2.SubmitCreateModelRequest, rejection: FoveaError | None = None
    ) -> tuple[str, str]:
        """Accepts the creation of a model; returns the future's id and the model's.

        Raises NotFound, SessionEnded for the session, InvalidInput for too much metadata, ResourceExhausted above the
        owner's share.
        """
        session = await self._sessions.require(caller, request.session_id)
        identity.check_metadata(dict(request.user_metadata))
        self._board.check_room(caller.owner)
        number = identity.check_seq_id(request.model_seq_id, "model_seq_id", 0)
        model_id = identity.model_id(session.session_id, number)
        if not request.from_path and not request.HasField("lora") and rejection is None:
            rejection = InvalidInput("lora_config is missing; rank 0 trains all parameters", field="lora_config")
        model = Model(
            model_id, session.session_id, caller.owner, request.base_model, request.lora, dict(request.user_metadata)
        )
        await self._models.add(model)
        return await self._submit(caller, Kind.CREATE_MODEL, model_id, 0, [request], rejection), model_id

    async def submit_forward_backward(
        self,
        caller: Caller,
        header: gateway_pb2.SubmitForwardBackwardHeader,
        data: Sequence[gateway_pb2.InputDatum],
        rejection: FoveaError | None = None,
    ) -> str:
        """Accepts a loss, with gradients or without; returns the future's id.

        Raises NotFound, SessionEnded, and ResourceExhausted above the owner's share, unless it is its turn.
        """
        parts = [gateway_pb2.SubmitForwardBackwardRequest(header=header)]
        parts += [gateway_pb2.SubmitForwardBackwardRequest(datum=datum) for datum in data]
        kind = Kind.FORWARD_BACKWARD if header.backward else Kind.FORWARD
        return await self._submit(caller, kind, header.model_id, header.seq_id, parts, rejection)

    async def submit(self, caller: Caller, request: Command, rejection: FoveaError | None = None) -> str:
        """Accepts any other command. Raises as above."""
        return await self._submit(caller, _KINDS[type(request)], request.model_id, request.seq_id, [request], rejection)

    async def _submit(
        self,
        caller: Caller,
        kind: Kind,
        model_id: str,
        seq_id: int,
        request: Sequence[Message],
        rejection: FoveaError | None,
    ) -> str:
        model = await self._models.get(caller, model_id)
        await self._sessions.require(caller, model.session_id)
        model = self._models.use(model)
        identity.check_seq_id(seq_id, "seq_id", 0 if kind is Kind.CREATE_MODEL else 1)
        self._models.touch(model)
        is_stream = kind in (Kind.FORWARD, Kind.FORWARD_BACKWARD)
        blob = records.join(request) if is_stream else request[0].SerializeToString()
        pending = Pending(
            identity.future_id(model_id, seq_id), kind, caller.owner, model.session_id, model_id, seq_id,
            request=blob, rejection=rejection, known_failure=self._told_failures.get(model_id),
        )  # fmt: skip
        line = self._lines.get(model_id)
        in_turn = model.next_seq_id if line is None else line.in_turn
        # Later commands are held for this one: refusing it would keep them, and with them the owner's share.
        await self._board.submit(pending, others_wait_for_it=kind is not Kind.CREATE_MODEL and seq_id <= in_turn)
        return pending.future_id

    def note_failure_told(self, future_id: str) -> None:
        """Notes that a client is being told of a failed future, if it is the one that spoilt its model's gradients."""
        model_id, _, seq_id = future_id.rpartition(":")
        model = self._models.find(model_id)
        if model is not None and str(model.failed_seq_id) == seq_id:
            self._told_failures[model_id] = int(seq_id)

    def start(self, pending: Pending) -> None:
        """Hands an accepted command to its model's line. The model is in memory, unless its session has just ended."""
        model = self._models.find(pending.scope)
        if model is None:
            error = SessionEnded(f"session {pending.session_id} is over: open a new one")
            self._refusals.add(task := asyncio.create_task(self._runner.refuse(pending, error)))
            task.add_done_callback(self._refusals.discard)
            return
        line = self._lines.get(model.model_id)
        if line is None:
            line = self._lines[model.model_id] = self._new_line(model)
        self._batches.begin(pending)
        line.add(pending)

    async def end_session(self, session: Session, error: SessionEnded) -> None:
        """Discards what a session's models have queued, then frees them."""
        for model_id in await self._models.of_session(session.session_id):
            self._told_failures.pop(model_id, None)
            line = self._lines.pop(model_id, None)
            if line is not None:
                await line.close(error)
            await self._free(await self._models.load(model_id), error.message)
        self._models.forget(session.session_id)

    async def drain(self, timeout_s: float) -> None:
        """Starts no further command and gives the running ones `timeout_s` to end."""
        tasks = [task for line in self._lines.values() if (task := line.pause()) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def stop(self) -> None:
        """Stops the lines, for the end of the process."""
        await asyncio.gather(*(line.stop() for line in self._lines.values()))

    async def _free(self, model: Model, reason: str) -> None:
        is_held = model.state is ModelState.READY
        await self._models.end(model, reason)
        if not is_held:
            return
        try:
            await self._trainer.client.delete_model(model.model_id)
        except FoveaError as error:
            logger.warning("model %s could not be freed: %s", model.model_id, error)

    def _new_line(self, model: Model) -> Line:
        return Line(
            model.model_id,
            model.next_seq_id,
            self._runner.execute,
            self._runner.refuse,
            lambda first, last: self._runner.skip(model, first, last),
            self._gap_timeout_s,
        )
