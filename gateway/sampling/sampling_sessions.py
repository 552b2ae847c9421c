"""Sampling sessions, and samples from them."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fovea.api.v1 import gateway_pb2
from fovea.runtime import tracing
from fovea.wire.errors import ContextOverflow, FoveaError, Internal, InvalidInput, NotFound
from gateway import identity
from gateway.access.quotas import Shares
from gateway.checkpoints.checkpoint_registry import Checkpoints
from gateway.checkpoints.checkpoint_rows import KeptSnapshot
from gateway.database.database import Database
from gateway.database.writer import Job
from gateway.futures import records
from gateway.futures.future import Kind, Outcome, Pending
from gateway.futures.futures import FutureBoard
from gateway.identity import Caller
from gateway.replicas.renderers import least_token_count
from gateway.replicas.samplers import Samplers
from gateway.replicas.snapshot_pushes import Snapshots
from gateway.sampling.sample_runner import SampleRunner, SampleWork, check_context, check_limits
from gateway.sessions import session_rows as rows
from gateway.sessions.session_rows import SamplingSession
from gateway.sessions.sessions import Sessions
from gateway.training.model_rows import Model

logger = logging.getLogger(__name__)


class Sampling:
    """What clients do with sampling sessions."""

    def __init__(
        self,
        database: Database,
        board: FutureBoard,
        sessions: Sessions,
        checkpoints: Checkpoints,
        samplers: Samplers,
        snapshots: Snapshots,
        runner: SampleRunner,
        model_name: str,
        shares: Shares,
    ) -> None:
        self._database, self._board, self._sessions, self._checkpoints = database, board, sessions, checkpoints
        self._samplers, self._snapshots, self._runner, self._model_name = samplers, snapshots, runner, model_name
        self._shares = shares
        self._known: dict[str, SamplingSession] = {}
        self._newest: dict[str, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_draining = False

    @property
    def max_context_length(self) -> int:
        """Positions that the samplers take; 0 before one was seen."""
        return self._samplers.info.max_context_length if self._samplers.info else 0

    async def open(
        self, caller: Caller, session_id: str, request_seq_id: int, base_model: str, model_path: str
    ) -> SamplingSession:
        """Opens a sampling session on the base model or on a saved snapshot; a repeat answers the first one.

        Raises NotFound for an unknown session, model or path, InvalidInput if neither is named.
        """
        session = await self._sessions.require(caller, session_id)
        if not base_model and not model_path:
            raise InvalidInput("name base_model or model_path", field="base_model")
        self.check_base_model(base_model or self._model_name)
        snapshot_id = (await self._checkpoints.find_sampler(caller, model_path)).snapshot_id if model_path else ""
        sampling = self._make(session.session_id, caller.owner, self._take_number(session), snapshot_id)
        sampling.request_seq_id, sampling.model_path = request_seq_id, model_path or None
        if not await self._database.write(lambda connection: _insert(connection, session, sampling)):
            known = await self._database.read(
                lambda connection: rows.find_sampling_session(connection, session_id, request_seq_id)
            )
            assert known is not None, "an insert failed without a row in its way"
            return known
        self._known[sampling.sampling_session_id] = sampling
        return sampling

    def open_on_snapshot(self, model: Model, snapshot_id: str, inflight: bool) -> tuple[SamplingSession, Job[Any]]:
        """A sampling session on unnamed weights, and the write that keeps it.

        With `inflight` it follows the model: the write moves it, and all others that follow, to these weights. Call
        `move_followers` once it is committed.
        """
        session = self._sessions.cached(model.session_id)
        sampling = self._make(model.session_id, model.owner, self._take_number(session), snapshot_id)
        sampling.followed_model_id = model.model_id if inflight else None
        self._known[sampling.sampling_session_id] = sampling

        def job(connection: Any) -> None:
            _insert(connection, session, sampling)
            if inflight:
                rows.move_followers(connection, model.model_id, snapshot_id)

        return sampling, job

    async def move_followers(self, model_id: str, snapshot_id: str) -> None:
        """Lets samples that begin from now on use a model's newest weights, and frees those that they replace."""
        for sampling in self._known.values():
            if sampling.followed_model_id == model_id:
                sampling.snapshot_id = snapshot_id
        replaced = self._newest.get(model_id)
        self._newest[model_id] = snapshot_id
        if replaced is not None and replaced != snapshot_id:
            self._snapshots.retire(replaced, lambda: self._samplers.up)

    async def join(self, caller: Caller, sampling_session_id: str) -> int:
        """Counts one more client of a sampling session; returns its number, from 1. Raises NotFound, SessionEnded."""
        sampling = await self.get(caller, sampling_session_id)
        await self._sessions.require(caller, sampling.session_id)
        return await self._database.write(lambda connection: rows.add_client(connection, sampling_session_id))

    async def sweep(self) -> None:
        """Frees snapshots that no sampling session names any more."""
        await self._snapshots.retire_unreachable(lambda: self._samplers.up)

    def push_soon(self, kept: KeptSnapshot) -> None:
        """Brings an adapter to the samplers in the background; if that fails, the first sample tries again."""
        self._keep(asyncio.create_task(self._push(kept.identity.snapshot_id, kept)))

    async def get(self, caller: Caller, sampling_session_id: str) -> SamplingSession:
        """A sampling session of the caller. Raises NotFound."""
        sampling = self._known.get(sampling_session_id)
        if sampling is None:
            sampling = await self._database.read(
                lambda connection: rows.get_sampling_session(connection, sampling_session_id)
            )
            if sampling is not None:
                # It may have been moved forward while it was read.
                sampling.snapshot_id = self._newest.get(sampling.followed_model_id or "", sampling.snapshot_id)
                sampling = self._known.setdefault(sampling_session_id, sampling)
        if sampling is None or sampling.owner != caller.owner:
            raise NotFound(f"there is no sampling session {sampling_session_id!r}", field="sampling_session_id")
        return sampling

    async def submit(
        self,
        caller: Caller,
        sampling_session_id: str,
        seq_id: int,
        request: gateway_pb2.SampleTokensRequest,
        rejection: FoveaError | None = None,
    ) -> tuple[str, list[str]]:
        """Accepts a sample; returns the future's id and the ids of the sequences to come.

        Content that is wrong fails the future. Raises NotFound, SessionEnded, ResourceExhausted, after which clients
        send the same again, and ContextOverflow, which they expect at once.
        """
        sampling = await self.get(caller, sampling_session_id)
        await self._check_usable(caller, sampling)
        future_id = identity.future_id(sampling_session_id, identity.check_seq_id(seq_id, "seq_id", 0))
        rejection = rejection or self._rejection(request)
        if isinstance(rejection, ContextOverflow):
            raise rejection
        pending = Pending(
            future_id, Kind.SAMPLE, caller.owner, sampling.session_id, sampling_session_id, seq_id,
            request=request.SerializeToString(), rejection=rejection,
        )  # fmt: skip
        await self._board.submit(pending)
        return future_id, identity.sequence_ids(future_id, 0 if rejection else request.sample_count)

    def start(self, pending: Pending) -> None:
        """Begins to work on an accepted sample, unless the process is about to end: then the next one does."""
        if self._is_draining:
            return
        pending.work = asyncio.create_task(self._run(pending), name=pending.future_id)
        self._keep(pending.work)

    async def stream(
        self, caller: Caller, request: gateway_pb2.SampleTokensRequest
    ) -> AsyncIterator[gateway_pb2.SampleTokensResponse]:
        """Samples now, without a future; leaving the iterator frees the engine. A target table comes back first."""
        sampling = await self.get(caller, request.sampling_session_id)
        await self._check_usable(caller, sampling)
        if rejection := self._rejection(request):
            raise rejection
        sampling_id = sampling.sampling_session_id
        pending = Pending(
            f"{sampling_id}:{uuid.uuid4().hex[:12]}", Kind.SAMPLE, caller.owner, sampling.session_id, sampling_id,
            seq_id=0, request=None,
        )  # fmt: skip
        work = SampleWork(pending, sampling, request, at_once=False)
        is_begun = False
        self._shares.check(caller.owner)
        self._shares.take(caller.owner)
        try:
            async for event in self._runner.stream(work):
                if request.HasField("target_table") and not is_begun:
                    yield gateway_pb2.SampleTokensResponse(target_table=request.target_table)
                is_begun = True
                kind = event.WhichOneof("event")
                yield gateway_pb2.SampleTokensResponse(**{kind: getattr(event, kind)})
        finally:
            self._shares.give(caller.owner)

    def check_base_model(self, base_model: str) -> None:
        """Raises NotFound for a model that is not served here."""
        if base_model != self._model_name:
            raise NotFound(f"base_model {base_model!r} is not served; this is {self._model_name!r}", field="base_model")

    def forget(self, session_id: str) -> None:
        """Drops what is in memory of a session that is over."""
        self._known = {key: known for key, known in self._known.items() if known.session_id != session_id}
        self._newest = {key: newest for key, newest in self._newest.items() if not key.startswith(f"{session_id}:")}

    async def _check_usable(self, caller: Caller, sampling: SamplingSession) -> None:
        """Raises SessionEnded, or NotFound once the saved weights have expired, been deleted or taken back."""
        await self._sessions.require(caller, sampling.session_id)
        if sampling.model_path:
            await self._checkpoints.check_sampled(caller, sampling.model_path, sampling.snapshot_id)

    async def drain(self, timeout_s: float) -> None:
        """Begins no further sample, and gives those that a sampler works on `timeout_s` to end."""
        self._is_draining = True
        begun = self._tasks & self._runner.sampling
        for task in self._tasks - begun:
            task.cancel()
        if begun:
            await asyncio.wait(begun, timeout=timeout_s)

    async def stop(self) -> None:
        """Stops all work, for the end of the process: it stays in the database and runs after a restart."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _rejection(self, request: gateway_pb2.SampleTokensRequest) -> FoveaError | None:
        info = self._samplers.info
        if info is None:
            return None
        params = request.params
        try:
            check_limits(request, info)
            max_tokens = params.max_tokens if params.HasField("max_tokens") else 1
            check_context(least_token_count(request.prompt), max_tokens, info.max_context_length)
        except FoveaError as error:
            return error
        return None

    async def _run(self, pending: Pending) -> None:
        with tracing.span(f"future {pending.kind}", pending.traceparent, future_id=pending.future_id):
            await self._finish(pending)

    async def _finish(self, pending: Pending) -> None:
        try:
            outcome = Outcome(pending.kind, records.join(await self._sample(pending)))
        except FoveaError as error:
            tracing.note(reason=error.reason)
            logger.warning("sample %s failed: %s: %s", pending.future_id, error.reason, error)
            outcome = Outcome(pending.kind, b"", error)
        except Exception:
            log_id = uuid.uuid4().hex[:12]
            logger.exception("sample %s failed, log id %s", pending.future_id, log_id)
            outcome = Outcome(pending.kind, b"", Internal(f"internal error; the gateway's log has it as {log_id}"))
        await self._board.finish(pending, outcome)

    async def _sample(self, pending: Pending) -> list[gateway_pb2.SampleTokensResponse]:
        if pending.rejection is not None:
            raise pending.rejection
        request = gateway_pb2.SampleTokensRequest.FromString(await self._board.request_of(pending))
        sampling = await self.get(Caller(pending.owner), pending.scope)
        version = identity.version_of(sampling.snapshot_id)
        pending.sampled = version[0] if version else sampling.base_model
        return await self._runner.collect(SampleWork(pending, sampling, request, at_once=True))

    async def _push(self, snapshot_id: str, kept: KeptSnapshot) -> None:
        self._snapshots.remember(kept)
        samplers = self._samplers.up
        try:
            if samplers:
                with self._snapshots.using(snapshot_id):
                    await self._snapshots.ensure_adapter(samplers[0], snapshot_id, samplers)
        except FoveaError as error:
            logger.warning("early push of %s failed: %s", snapshot_id, error)

    def _make(self, session_id: str, owner: str, number: int, snapshot_id: str) -> SamplingSession:
        sampling_id = identity.sampling_session_id(session_id, number)
        return SamplingSession(sampling_id, session_id, owner, self._model_name, snapshot_id=snapshot_id)

    @staticmethod
    def _take_number(session: rows.Session) -> int:
        session.next_sampling_number += 1
        return session.next_sampling_number - 1

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _insert(connection: Any, session: rows.Session, sampling: SamplingSession) -> bool:
    is_new = rows.insert_sampling_session(connection, sampling)
    rows.update_session(connection, session.session_id, next_sampling_number=session.next_sampling_number)
    return is_new
