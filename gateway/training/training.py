"""Training submissions: accepted in any order, each once, and handed to the queue of their model."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from google.protobuf.message import Message

from fovea.api.v1 import gateway_pb2
from fovea.runtime.tasks import BackgroundTasks
from fovea.wire.errors import FoveaError, InvalidInput, SessionEnded
from gateway.futures.future import Kind, Outcome, Pending, Submission, check_seq_id, future_id, join_messages
from gateway.futures.futures import Futures
from gateway.replicas.trainer_link import TrainerLink
from gateway.sessions.sessions import Session, Sessions, check_metadata
from gateway.training.command_runner import CommandQueue, CommandRunner
from gateway.training.models import Model, Models, ModelState, id_of_model
from gateway.training.step_commands import BATCH_KINDS, Batches

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


KINDS = frozenset({*_KINDS.values(), *BATCH_KINDS, Kind.CREATE_MODEL})
"""What is done with models."""


class Training:
    """What clients do with models.

    Content that is wrong never refuses a submission: it fails the future when its turn comes, because a client that was
    refused one of several requests would wait forever for the others (tinker-contract.md, section 3).
    """

    def __init__(
        self,
        futures: Futures,
        sessions: Sessions,
        models: Models,
        batches: Batches,
        runner: CommandRunner,
        trainer: TrainerLink,
        gap_timeout_s: float,
    ) -> None:
        self._futures, self._sessions, self._models = futures, sessions, models
        self._batches, self._runner, self._trainer = batches, runner, trainer
        self._gap_timeout_s = gap_timeout_s
        self._queues: dict[str, CommandQueue] = {}
        self._refusals = BackgroundTasks()

    async def submit_create(
        self, owner: str, request: gateway_pb2.SubmitCreateModelRequest, rejection: FoveaError | None = None
    ) -> tuple[str, str]:
        """Accepts the creation of a model; returns the future's id and the model's.

        Raises NotFound, SessionEnded for the session, InvalidInput for too much metadata, ResourceExhausted above the
        owner's share.
        """
        session = await self._sessions.require(owner, request.session_id)
        check_metadata(dict(request.user_metadata))
        self._futures.check_quota(owner)
        own_id = id_of_model(session.session_id, check_seq_id(request.model_seq_id, "model_seq_id", 0))
        if not request.from_path and not request.HasField("lora") and rejection is None:
            rejection = InvalidInput("lora_config is missing; rank 0 trains all parameters", field="lora_config")
        model = Model(own_id, session.session_id, owner, request.base_model, request.lora, dict(request.user_metadata))
        await self._models.add(model)
        return await self._submit(owner, Kind.CREATE_MODEL, own_id, 0, [request], rejection), own_id

    async def submit_forward_backward(
        self,
        owner: str,
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
        return await self._submit(owner, kind, header.model_id, header.seq_id, parts, rejection)

    async def submit(self, owner: str, request: Command, rejection: FoveaError | None = None) -> str:
        """Accepts any other command. Raises as above."""
        return await self._submit(owner, _KINDS[type(request)], request.model_id, request.seq_id, [request], rejection)

    async def _submit(
        self,
        owner: str,
        kind: Kind,
        model_id: str,
        seq_id: int,
        request: Sequence[Message],
        rejection: FoveaError | None,
    ) -> str:
        model = await self._models.get(owner, model_id)
        await self._sessions.require(owner, model.session_id)
        model = self._models.use(model)
        check_seq_id(seq_id, "seq_id", 0 if kind is Kind.CREATE_MODEL else 1)
        model.last_request_at = time.time()  # written with the next change
        blob = join_messages(request) if kind in BATCH_KINDS else request[0].SerializeToString()
        failed = model.failed_seq_id
        known_failure = failed if failed is not None and self._futures.has_told_failure(model_id, failed) else None
        submission = Submission(
            future_id(model_id, seq_id), kind, owner, model.session_id, model_id, seq_id, rejection, known_failure
        )
        queue = self._queues.get(model_id)
        in_turn = model.next_seq_id if queue is None else queue.in_turn
        # Later commands are held for this one: refusing it would keep them, and with them the owner's share.
        others_wait_for_it = kind is not Kind.CREATE_MODEL and seq_id <= in_turn
        await self._futures.submit(submission, blob, self._start, others_wait_for_it)
        return submission.future_id

    async def resume(self, pendings: Iterable[Pending]) -> None:
        """Takes up the commands among what an earlier process left unfinished."""
        for pending in pendings:
            submission = pending.submission
            if submission.kind not in KINDS:
                continue
            try:
                await self._sessions.load_open(submission.session_id)
                self._models.use(await self._models.load(submission.scope))
            except FoveaError as error:
                await self._futures.finish(pending, Outcome(submission.kind, b"", error))
            else:
                self._start(pending)

    def _start(self, pending: Pending) -> None:
        """Hands an accepted command to its model's queue. The model is in memory, unless its session has just ended."""
        submission = pending.submission
        model = self._models.find(submission.scope)
        if model is None:
            error = SessionEnded(f"session {submission.session_id} is over: open a new one")
            self._refusals.start(self._runner.refuse(pending, error), f"refuse {submission.future_id}")
            return
        queue = self._queues.get(model.model_id)
        if queue is None:
            queue = self._queues[model.model_id] = self._new_queue(model)
        if submission.kind in BATCH_KINDS:
            self._batches.begin(pending)
        queue.add(pending)

    async def end_session(self, session: Session, error: SessionEnded) -> None:
        """Discards what a session's models have queued, then frees them."""
        for model_id in await self._models.of_session(session.session_id):
            queue = self._queues.pop(model_id, None)
            if queue is not None:
                await queue.close(error)
            await self._free(await self._models.load(model_id), error.message)
        self._models.forget(session.session_id)

    async def drain(self, timeout_s: float) -> None:
        """Starts no further command and gives the running ones `timeout_s` to end."""
        tasks = [task for queue in self._queues.values() if (task := queue.pause()) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def stop(self) -> None:
        """Stops the queues, for the end of the process."""
        await asyncio.gather(*(queue.stop() for queue in self._queues.values()))

    async def _free(self, model: Model, reason: str) -> None:
        is_held = model.state is ModelState.READY
        await self._models.end(model, reason)
        if not is_held:
            return
        try:
            await self._trainer.client.delete_model(model.model_id)
        except FoveaError as error:
            logger.warning("model %s could not be freed: %s", model.model_id, error)

    def _new_queue(self, model: Model) -> CommandQueue:
        return CommandQueue(
            model.model_id,
            model.next_seq_id,
            self._runner.run,
            self._runner.refuse,
            lambda first, last: self._runner.skip(model, first, last),
            self._gap_timeout_s,
        )
