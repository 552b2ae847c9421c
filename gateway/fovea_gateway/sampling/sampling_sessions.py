"""Sampling sessions, and samples from them."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from fovea.api.v1 import gateway_pb2, sampler_pb2
from fovea.runtime.tasks import BackgroundTasks
from fovea.wire.errors import ContextOverflow, FoveaError, InvalidInput, NotFound
from fovea_gateway.access.kept_rows import KeptRows
from fovea_gateway.checkpoints.checkpoint import SCHEME
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints
from fovea_gateway.database.database import Database, Job
from fovea_gateway.database.schema import sampling_sessions
from fovea_gateway.database.sql_engine import insert_new
from fovea_gateway.replicas.base_models import BaseModel, BaseModels
from fovea_gateway.replicas.renderers import least_token_count
from fovea_gateway.replicas.samplers import version_of
from fovea_gateway.replicas.snapshot_pushes import SnapshotRecord
from fovea_gateway.sampling.recordings import Recordings
from fovea_gateway.sampling.sample_runner import (
    SampleRunner,
    SampleWork,
    SamplingSession,
    check_context,
    check_limits,
    most_tokens,
)
from fovea_gateway.sampling.sample_wire import sequence_ids
from fovea_gateway.sessions.future import (
    Done,
    Kind,
    Outcome,
    Pending,
    Submission,
    check_seq_id,
    future_id,
    run_to_outcome,
)
from fovea_gateway.sessions.futures import Futures
from fovea_gateway.sessions.sessions import Session, Sessions, update_session

logger = logging.getLogger(__name__)


class Sampling:
    """The use cases of sampling sessions."""

    def __init__(
        self, database: Database, futures: Futures, sessions: Sessions, checkpoints: Checkpoints,
        base_models: BaseModels, runner: SampleRunner, rows: KeptRows, recordings: Recordings,
    ) -> None:  # fmt: skip
        self._database, self._futures, self._sessions, self._checkpoints = database, futures, sessions, checkpoints
        self._base_models, self.runner, self._rows, self._recordings = base_models, runner, rows, recordings
        self._known: dict[str, SamplingSession] = {}
        self._newest: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pushes = BackgroundTasks()
        self._is_draining = False

    @property
    def max_context_length(self) -> int:
        """Returns the largest context length of the samplers of any base model; 0 before one was seen."""
        return max(base.max_context_length for base in self._base_models)

    def tokenizer_id(self, base_model: str) -> str:
        """Returns the folder or hub name of a base model's tokenizer; the model's name if it is no longer served."""
        found = self._base_models.find(base_model)
        return found.tokenizer_id if found else base_model

    async def open(
        self, owner: str, session_id: str, request_seq_id: int, base_model: str, model_path: str
    ) -> SamplingSession:
        """Opens a sampling session on the base model or a saved snapshot; a repeated request returns the first one.

        Raises NotFound for an unknown session, model or path; SessionEnded; InvalidInput if neither is given, if they
        do not match or cannot be sampled; ResourceExhausted above the owner's share of rows.
        """
        session = await self._sessions.require(owner, session_id)
        if not base_model and not model_path:
            raise InvalidInput("name base_model or model_path", field="base_model")
        snapshot_id = ""
        if base_model:
            self._base_models.check_sampled(base_model)
        if model_path:
            checkpoint = await self._checkpoints.find_sampler(owner, model_path)
            if base_model not in ("", checkpoint.base_model):
                raise InvalidInput(
                    f"{model_path} was trained on {checkpoint.base_model!r}, not {base_model!r}: leave base_model out",
                    field="base_model",
                )
            self._base_models.check_sampled(checkpoint.base_model, "model_path")
            base_model, snapshot_id = checkpoint.base_model, checkpoint.snapshot_id
        self._rows.take(owner, {"model_path": model_path})
        sampling = _make(session, base_model, snapshot_id)
        sampling.request_seq_id, sampling.model_path = request_seq_id, model_path or None
        if not await self._database.write(lambda connection: _insert(connection, session, sampling)):
            known = await self._database.read(lambda connection: _find_row(connection, session_id, request_seq_id))
            assert known is not None, "an insert failed without a row in its way"
            return known
        self._known[sampling.sampling_session_id] = sampling
        return sampling

    def check_sampled(self, base_model: str) -> None:
        """Raises InvalidInput for a base model that is served for training only."""
        self._base_models.check_sampled(base_model)

    def open_on_snapshot(
        self, session_id: str, base_model: str, model_id: str, snapshot_id: str, inflight: bool
    ) -> tuple[SamplingSession, Job[Any]]:
        """Returns a sampling session on unnamed weights of a model of `base_model`, and the job that stores the
        session.

        With `inflight`, the job also moves all sessions that follow the model to these weights; then call
        `move_followers`.
        """
        session = self._sessions.cached(session_id)
        sampling = _make(session, base_model, snapshot_id)
        sampling.followed_model_id = model_id if inflight else None
        self._known[sampling.sampling_session_id] = sampling

        def job(connection: Any) -> None:
            _insert(connection, session, sampling)
            if inflight:
                _update_followers(connection, model_id, snapshot_id)

        return sampling, job

    async def move_followers(self, base_model: str, model_id: str, snapshot_id: str) -> None:
        """Lets a model's samples use its newest weights, and frees the weights that they replace.

        Running samples switch to the new weights only if these are full parameters.
        """
        for sampling in self._known.values():
            if sampling.followed_model_id == model_id:
                sampling.snapshot_id = snapshot_id
        replaced = self._newest.get(model_id)
        self._newest[model_id] = snapshot_id
        base = self._base_models.get(base_model)
        if replaced is not None and replaced != snapshot_id:
            base.snapshots.retire(replaced, base.up_samplers)
        self._pushes.start(base.move_followers(snapshot_id), f"move to {snapshot_id}")

    async def join(self, owner: str, sampling_session_id: str) -> int:
        """Counts one more client of a sampling session; returns its number, from 1. Raises NotFound, SessionEnded."""
        sampling = await self.get(owner, sampling_session_id)
        await self._sessions.require(owner, sampling.session_id)
        return await self._database.write(lambda connection: _add_client(connection, sampling_session_id))

    async def sweep(self) -> None:
        """Frees snapshots that no sampling session names any more."""
        for base in self._base_models:
            await base.snapshots.retire_unreachable(base.up_samplers)

    def push_soon(self, base_model: str, kept: SnapshotRecord) -> None:
        """Pushes an adapter to the samplers in the background. If that fails, the first sample pushes it."""
        base = self._base_models.get(base_model)
        self._pushes.start(self._push(base, kept), f"early push of {kept.identity.snapshot_id}")

    async def get(self, owner: str, sampling_session_id: str) -> SamplingSession:
        """Returns a sampling session of the caller. Raises NotFound."""
        sampling = self._known.get(sampling_session_id)
        if sampling is None:
            sampling = await self._database.read(lambda connection: _get_row(connection, sampling_session_id))
            if sampling is not None:
                # The session may have moved to newer weights while it was read.
                sampling.snapshot_id = self._newest.get(sampling.followed_model_id or "", sampling.snapshot_id)
                sampling = self._known.setdefault(sampling_session_id, sampling)
        if sampling is None or sampling.owner != owner:
            raise NotFound(f"there is no sampling session {sampling_session_id!r}", field="sampling_session_id")
        return sampling

    async def named(self, owner: str, model: str) -> tuple[SamplingSession, Mapping[str, str]]:
        """Returns an unsaved session on a base model or `tinker://` path, and the checkpoint's user metadata.

        Raises NotFound for a name that is neither, InvalidInput for a path that cannot be sampled from.
        """
        snapshot_id, base_model, path = "", model, None
        metadata: Mapping[str, str] = {}
        if model.startswith(SCHEME):
            found = await self._checkpoints.find_sampler(owner, model)
            snapshot_id, base_model, path, metadata = found.snapshot_id, found.base_model, model, found.user_metadata
        base = self._base_models.get(base_model)
        return SamplingSession(f"once:{uuid.uuid4().hex[:12]}", "", owner, base.name, None, path, snapshot_id), metadata

    async def submit(
        self,
        owner: str,
        sampling_session_id: str,
        seq_id: int,
        request: gateway_pb2.SampleTokensRequest,
        rejection: FoveaError | None = None,
    ) -> tuple[str, list[str]]:
        """Accepts a sample; returns the future's id and the ids of its sequences.

        Invalid content fails the future. Raises NotFound, SessionEnded, and ResourceExhausted (clients then send the
        request again). Raises ContextOverflow at once, as clients expect.
        """
        sampling = await self.get(owner, sampling_session_id)
        base = await self._check_usable(owner, sampling)
        own_id = future_id(sampling_session_id, check_seq_id(seq_id, "seq_id", 0))
        rejection = rejection or _rejection(base, request)
        if isinstance(rejection, ContextOverflow):
            raise rejection
        submission = Submission(
            own_id, Kind.SAMPLE, owner, sampling.session_id, sampling_session_id, seq_id, rejection,
            token_count=_token_count(base, request),
        )  # fmt: skip
        await self._futures.submit(submission, request.SerializeToString(), self._start)
        return own_id, sequence_ids(own_id, 0 if rejection else request.sample_count)

    async def resume(self, pendings: Iterable[Pending]) -> None:
        """Resumes the samples among the requests that an earlier process left unfinished."""
        for pending in [one for one in pendings if one.submission.kind is Kind.SAMPLE]:
            try:
                await self._sessions.load_open(pending.submission.session_id)
            except FoveaError as error:
                await self._futures.finish(pending, Outcome(Kind.SAMPLE, b"", error))
            else:
                self._start(pending)

    def _start(self, pending: Pending) -> None:
        """Starts work on an accepted sample. If the process is about to end, the next process does it instead."""
        if self._is_draining:
            return
        pending.work = asyncio.create_task(self._run(pending), name=pending.submission.future_id)
        self._tasks.add(pending.work)
        pending.work.add_done_callback(self._tasks.discard)

    async def stream(
        self, owner: str, request: gateway_pb2.SampleTokensRequest
    ) -> AsyncIterator[gateway_pb2.SampleTokensResponse]:
        """Samples at once, without a future. Closing the iterator frees the engine. Yields a target table first."""
        sampling = await self.get(owner, request.sampling_session_id)
        await self._check_usable(owner, sampling)
        is_begun = False
        async for _, event in self.run(sampling, request, as_it_comes=True):
            if request.HasField("target_table") and not is_begun:
                yield gateway_pb2.SampleTokensResponse(target_table=request.target_table)
            is_begun = True
            yield event

    async def run(
        self, sampling: SamplingSession, request: gateway_pb2.SampleTokensRequest,
        answer: sampler_pb2.OpenAIAnswer | None = None, *, as_it_comes: bool,
    ) -> AsyncIterator[tuple[bytes, gateway_pb2.SampleTokensResponse]]:  # fmt: skip
        """Samples at once, without a future. Yields the int32 ids of the rendered prompt together with each event.

        Args:
            answer: The response for which to sample. Tokens that its own sampler draws are not yielded.
            as_it_comes: Whether to yield tokens as they are generated, not each sequence whole. A whole one is sampled
                again if a sampler breaks it off.
        """
        base = self._base_models.get(sampling.base_model)
        if rejection := _rejection(base, request):
            raise rejection
        sampling_id = sampling.sampling_session_id
        submission = Submission(
            f"{sampling_id}:{uuid.uuid4().hex[:12]}", Kind.SAMPLE, sampling.owner, sampling.session_id, sampling_id,
            seq_id=0, token_count=_token_count(base, request),
        )  # fmt: skip
        pending = Pending(submission, request=None)
        work = SampleWork(pending, base, sampling, request, at_once=not as_it_comes, answer=answer)
        with self._futures.counting(submission):
            try:
                if as_it_comes:
                    async for event in self.runner.stream(work):
                        kind = event.WhichOneof("event")
                        yield work.prompt_ids, gateway_pb2.SampleTokensResponse(**{kind: getattr(event, kind)})
                else:
                    for gathered in await self.runner.collect(work):
                        yield work.prompt_ids, gathered
            finally:
                await self._futures.store_usage(pending)

    def forget(self, session_id: str) -> None:
        """Drops an ended session from memory."""
        self._known = {key: known for key, known in self._known.items() if known.session_id != session_id}
        self._newest = {key: newest for key, newest in self._newest.items() if not key.startswith(f"{session_id}:")}

    async def _check_usable(self, owner: str, sampling: SamplingSession) -> BaseModel:
        """Returns the base model to sample. Raises SessionEnded, InvalidInput for a base model for training only,
        NotFound if it is no longer served or the saved weights have expired or been deleted or unpublished.
        """
        await self._sessions.require(owner, sampling.session_id)
        if sampling.model_path:
            await self._checkpoints.check_sampled(owner, sampling.model_path, sampling.snapshot_id)
        self._base_models.check_sampled(sampling.base_model, "sampling_session_id")
        return self._base_models.get(sampling.base_model)

    async def drain(self, timeout_s: float) -> None:
        """Starts no further samples, and gives those in a sampler `timeout_s` seconds to finish."""
        self._is_draining = True
        await self._pushes.cancel()
        begun = self._tasks & self.runner.tasks_in_samplers
        for task in self._tasks - begun:
            task.cancel()
        if begun:
            await asyncio.wait(begun, timeout=timeout_s)

    async def stop(self) -> None:
        """Stops all work because the process ends. The work stays in the database and runs after a restart."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, pending: Pending) -> None:
        done, outcome = await run_to_outcome(pending, self._sample(pending))
        await self._futures.finish(pending, outcome, done.effects)

    async def _sample(self, pending: Pending) -> Done:
        submission = pending.submission
        if submission.rejection is not None:
            raise submission.rejection
        request = gateway_pb2.SampleTokensRequest.FromString(await self._futures.request_of(pending))
        sampling = await self.get(submission.owner, submission.scope)
        self._base_models.check_sampled(sampling.base_model, "sampling_session_id")
        version = version_of(sampling.snapshot_id)
        pending.progress.sampled = version[0] if version else sampling.base_model
        work = SampleWork(
            pending, self._base_models.get(sampling.base_model), sampling, request, at_once=True,
            is_wanted=lambda: self._sessions.is_wanted(submission.session_id),
        )  # fmt: skip
        if request.record_stability_info:
            return await self._recordings.sample(work, self.runner)
        return Done([*await self.runner.collect(work)])

    @staticmethod
    async def _push(base: BaseModel, kept: SnapshotRecord) -> None:
        base.snapshots.remember(kept)
        samplers, snapshot_id = base.samplers.up, kept.identity.snapshot_id
        try:
            if samplers:
                with base.snapshots.using(snapshot_id):
                    await base.snapshots.ensure_adapter(samplers[0], snapshot_id, samplers)
        except FoveaError as error:
            logger.warning("early push of %s failed: %s", snapshot_id, error)


def _make(session: Session, base_model: str, snapshot_id: str) -> SamplingSession:
    """Returns a new sampling session and takes its number."""
    own_id = f"{session.session_id}:sample:{session.next_sampling_number}"
    session.next_sampling_number += 1
    return SamplingSession(own_id, session.session_id, session.owner, base_model, snapshot_id=snapshot_id)


def _rejection(base: BaseModel, request: gateway_pb2.SampleTokensRequest) -> FoveaError | None:
    info = base.samplers.info
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


def _token_count(base: BaseModel, request: gateway_pb2.SampleTokensRequest) -> int:
    return most_tokens(request, least_token_count(request.prompt), base.max_context_length)


def _insert(connection: Any, session: Session, sampling: SamplingSession) -> bool:
    is_new = insert_new(connection, sampling_sessions, vars(sampling))
    update_session(connection, session.session_id, next_sampling_number=session.next_sampling_number)
    return is_new


def _get_row(connection: sa.Connection, sampling_session_id: str) -> SamplingSession | None:
    return _first(connection, sampling_sessions.c.sampling_session_id == sampling_session_id)


def _find_row(connection: sa.Connection, session_id: str, request_seq_id: int) -> SamplingSession | None:
    """Returns the sampling session that an earlier request with the same number opened."""
    table = sampling_sessions.c
    return _first(connection, (table.session_id == session_id) & (table.request_seq_id == request_seq_id))


def _first(connection: sa.Connection, where: sa.ColumnElement[bool]) -> SamplingSession | None:
    row = connection.execute(sa.select(sampling_sessions).where(where)).mappings().first()
    return SamplingSession(**row) if row else None


def _add_client(connection: sa.Connection, sampling_session_id: str) -> int:
    """Counts one more client of a sampling session; returns its number, from 1, which is never reused."""
    where, count = sampling_sessions.c.sampling_session_id == sampling_session_id, sampling_sessions.c.client_count
    connection.execute(sa.update(sampling_sessions).where(where).values(client_count=count + 1))
    return int(connection.execute(sa.select(count).where(where)).scalar_one())


def _update_followers(connection: sa.Connection, model_id: str, snapshot_id: str) -> None:
    """Moves every sampling session that follows a model to its newest weights."""
    is_following = sampling_sessions.c.followed_model_id == model_id
    connection.execute(sa.update(sampling_sessions).where(is_following).values(snapshot_id=snapshot_id))
