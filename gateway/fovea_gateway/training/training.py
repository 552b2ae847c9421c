"""Training submissions. Each is accepted once, in any order, and put into its model's queue, which runs by seq_id."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

from fovea.api.v1 import gateway_pb2
from fovea.runtime.tasks import BackgroundTasks
from fovea.wire.errors import FailedPrecondition, FoveaError, InvalidInput, SessionEnded
from fovea_gateway.access.api_keys import SUBJECT
from fovea_gateway.access.kept_rows import KeptRows
from fovea_gateway.replicas.base_models import BaseModels
from fovea_gateway.replicas.renderers import least_token_count
from fovea_gateway.sessions.future import Kind, Outcome, Pending, Submission, check_seq_id, future_id
from fovea_gateway.sessions.futures import Futures
from fovea_gateway.sessions.sessions import Session, Sessions
from fovea_gateway.training.batches import BATCH_KINDS, LossRequest, blob_of_messages
from fovea_gateway.training.commands import CommandRunner
from fovea_gateway.training.journal import Journal
from fovea_gateway.training.models import Model, Models, ModelState, id_of_model
from fovea_gateway.training.trainer_pool import TrainerPool

logger = logging.getLogger(__name__)


CommandRequest = (
    gateway_pb2.SubmitOptimStepRequest
    | gateway_pb2.SubmitSaveStateRequest
    | gateway_pb2.SubmitLoadStateRequest
    | gateway_pb2.SubmitSaveForSamplerRequest
    | gateway_pb2.SubmitSaveExternalRequest
)
_KINDS: Mapping[type[CommandRequest], Kind] = {
    gateway_pb2.SubmitOptimStepRequest: Kind.OPTIM_STEP,
    gateway_pb2.SubmitSaveStateRequest: Kind.SAVE_STATE,
    gateway_pb2.SubmitLoadStateRequest: Kind.LOAD_STATE,
    gateway_pb2.SubmitSaveForSamplerRequest: Kind.SAVE_FOR_SAMPLER,
    gateway_pb2.SubmitSaveExternalRequest: Kind.SAVE_EXTERNAL,
}


KINDS = frozenset({*_KINDS.values(), *BATCH_KINDS, Kind.CREATE_MODEL})
"""The kinds of commands on models."""


class CommandQueue:
    """The command queue of one model. It runs commands one at a time, strictly by seq_id, in whatever order they
    arrive.

    Args:
        model_id: The model's id, for logs.
        next_seq_id: The seq_id of the first command to run.
        run: Runs one command and completes its future, with a result or an error. Never raises.
        refuse: Fails the future of a command that can no longer run.
        skip: Records that a range of seq ids never arrived.
        gap_timeout_s: Seconds that later commands wait for a missing one, counted from the last arrival.
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
        """The seq_id that is running, or that will run next once it has arrived."""
        return self._next

    def add(self, pending: Pending) -> None:
        """Adds a command and returns at once."""
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
        """Refuses waiting and future commands. Waits for the running command to finish."""
        self._closed_by = error
        self._arrived.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def stop(self) -> None:
        """Cancels the queue at the end of the process. Waiting commands remain in the database."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def pause(self) -> asyncio.Task[None] | None:
        """Starts no further command. Returns the task of the running command, or None."""
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


class Training:
    """The use cases of training: it accepts the commands that clients send to models.

    A submission with invalid content is accepted, and its future fails when the command is due. If the gateway refused
    one of several requests, the client would wait forever for the others.

    Args:
        runners: Runners by base model, for the base models that have a trainer. `pools` has the same keys.
    """

    def __init__(
        self,
        futures: Futures,
        sessions: Sessions,
        models: Models,
        base_models: BaseModels,
        runners: Mapping[str, CommandRunner],
        pools: Mapping[str, TrainerPool],
        journal: Journal,
        rows: KeptRows,
        gap_timeout_s: float,
    ) -> None:
        self._futures, self._sessions, self._models, self._base_models = futures, sessions, models, base_models
        self._runners, self._pools, self._journal, self._rows = runners, pools, journal, rows
        self._gap_timeout_s = gap_timeout_s
        self._queues: dict[str, CommandQueue] = {}
        self._refusals = BackgroundTasks()

    async def submit_create(
        self, owner: str, request: gateway_pb2.SubmitCreateModelRequest, rejection: FoveaError | None = None
    ) -> tuple[str, str]:
        """Accepts the creation of a model; returns the id of the future and the id of the model.

        Raises NotFound for the base model, InvalidInput if the base model is for sampling only, NotFound or
        SessionEnded for the session, InvalidInput for too much metadata, and ResourceExhausted above the owner's share.
        """
        self._base_models.check_trained(request.base_model)
        session = await self._sessions.require(owner, request.session_id)
        self._futures.check_quota(owner)
        self._rows.take(owner, {"user_metadata": dict(request.user_metadata)})
        own_id = id_of_model(session.session_id, check_seq_id(request.model_seq_id, "model_seq_id", 0))
        SUBJECT.set(own_id)
        if not request.from_path and not request.HasField("lora") and rejection is None:
            rejection = InvalidInput("lora_config is missing; rank 0 trains all parameters", field="lora_config")
        model = Model(own_id, session.session_id, owner, request.base_model, request.lora, dict(request.user_metadata))
        await self._models.add(model)
        blob = request.SerializeToString()
        return await self._submit(owner, Kind.CREATE_MODEL, own_id, 0, blob, rejection), own_id

    async def submit_forward_backward(
        self,
        owner: str,
        request: LossRequest,
        rejection: FoveaError | None = None,
        blob: bytes | None = None,
    ) -> str:
        """Accepts a loss computation, with or without gradients; returns the id of the future.

        Args:
            request: The decoded request. If it can be prepared at once, it is not decoded again.
            rejection: The error with which it will fail when it is due.
            blob: The form in which it is stored, as `request_from_blob` reads it. It is made from `request` if absent.

        Raises NotFound and SessionEnded. Raises ResourceExhausted above the owner's share, unless this is the next
        command.
        """
        header = request.header
        SUBJECT.set(header.model_id)
        stored = await asyncio.to_thread(blob_of_messages, request) if blob is None else blob
        kind = Kind.FORWARD_BACKWARD if header.backward else Kind.FORWARD
        tokens = sum(least_token_count(datum.input) for datum in request.data)
        return await self._submit(owner, kind, header.model_id, header.seq_id, stored, rejection, tokens, request)

    async def submit(self, owner: str, request: CommandRequest, rejection: FoveaError | None = None) -> str:
        """Accepts any other command. Raises the same errors as `submit_forward_backward`."""
        blob = request.SerializeToString()
        return await self._submit(owner, _KINDS[type(request)], request.model_id, request.seq_id, blob, rejection)

    async def _submit(
        self,
        owner: str,
        kind: Kind,
        model_id: str,
        seq_id: int,
        blob: bytes,
        rejection: FoveaError | None,
        token_count: int = 0,
        decoded: LossRequest | None = None,
    ) -> str:
        model = await self._models.get(owner, model_id)
        await self._sessions.require(owner, model.session_id)
        model = self._models.use(model)
        check_seq_id(seq_id, "seq_id", 0 if kind is Kind.CREATE_MODEL else 1)
        model.last_request_at = time.time()  # Written with the next change of the model.
        failed = model.failed_seq_id
        known_failure = failed if failed is not None and self._futures.has_reported_failure(model_id, failed) else None
        submission = Submission(
            future_id(model_id, seq_id), kind, owner, model.session_id, model_id, seq_id, rejection, known_failure,
            token_count=token_count,
        )  # fmt: skip
        queue = self._queues.get(model_id)
        in_turn = model.next_seq_id if queue is None else queue.in_turn
        # Later commands wait for this one. If it were refused, they would stay queued and occupy the owner's share.
        others_wait_for_it = kind is not Kind.CREATE_MODEL and seq_id <= in_turn
        start = partial(self._start, decoded=decoded)
        await self._futures.submit(submission, blob, start, others_wait_for_it)
        return submission.future_id

    async def resume(self, pendings: Iterable[Pending]) -> None:
        """Resumes the commands that an earlier process left unfinished."""
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

    def _start(self, pending: Pending, decoded: LossRequest | None = None) -> None:
        """Adds an accepted command to its model's queue. The model is in memory unless its session has just ended."""
        submission = pending.submission
        model = self._models.find(submission.scope)
        runner = self._runners.get(model.base_model) if model else None
        if model is None or runner is None:
            self._refusals.start(self._refuse(pending), f"refuse {submission.future_id}")
            return
        queue = self._queues.get(model.model_id)
        if queue is None:
            queue = self._queues[model.model_id] = self._new_queue(model, runner)
        runner.begin(pending, decoded)
        queue.add(pending)

    async def _refuse(self, pending: Pending) -> None:
        submission = pending.submission
        model = await self._models.load(submission.scope)
        if runner := self._runners.get(model.base_model):
            session = await self._sessions.load(submission.session_id)
            await runner.refuse(pending, SessionEnded.of(session.session_id, session.end_reason))
        else:
            gone = FailedPrecondition(
                f"model {model.model_id} belongs to base model {model.base_model!r}, which is no longer trained here"
            )
            await self._futures.finish(pending, Outcome(submission.kind, b"", gone))

    async def end_session(self, session: Session, error: SessionEnded) -> None:
        """Discards the queued commands of a session's models, then frees the models."""
        model_ids = await self._models.of_session(session.session_id)
        for pool in self._pools.values():
            await pool.abandon(model_ids, error)
        for model_id in model_ids:
            queue = self._queues.pop(model_id, None)
            if queue is not None:
                await queue.close(error)
            await self._free(await self._models.load(model_id), error.message)
        self._models.forget(session.session_id)
        for pool in self._pools.values():
            pool.forget(model_ids)
        await self._journal.forget(model_ids)

    def forget_idle(self, session_id: str) -> None:
        """Drops the models of an idle session from memory. They are read again when they are used."""
        for model_id in [model_id for model_id in self._queues if model_id.startswith(f"{session_id}:")]:
            del self._queues[model_id]
        self._models.forget(session_id)

    async def drain(self, timeout_s: float) -> None:
        """Starts no further command. Gives running commands `timeout_s` seconds to finish."""
        tasks = [task for queue in self._queues.values() if (task := queue.pause()) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def stop(self) -> None:
        """Cancels the queues at the end of the process."""
        await asyncio.gather(*(queue.stop() for queue in self._queues.values()))

    async def _free(self, model: Model, reason: str) -> None:
        is_held = model.state is ModelState.READY
        await self._models.end(model, reason)
        if is_held and (runner := self._runners.get(model.base_model)):
            await runner.free(model)

    def _new_queue(self, model: Model, runner: CommandRunner) -> CommandQueue:
        return CommandQueue(
            model.model_id,
            model.next_seq_id,
            runner.run,
            runner.refuse,
            lambda first, last: runner.skip(model, first, last),
            self._gap_timeout_s,
        )
