"""Batches of datums for forward and forward_backward, and the traced losses that they use.

A batch is decoded and rendered while its command waits in the queue. While the trainer computes one batch, the gateway
therefore renders the next one, and the trainer fetches its images. The gateway checks traced losses, stores them with
their session, and sends them along with each call.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import NamedTuple

import sqlalchemy as sa

from fovea.api.v1 import gateway_pb2, model_input_pb2, trainer_pb2
from fovea.runtime.tasks import BackgroundTasks
from fovea.tinker.v1 import tinker_pb2
from fovea.wire import custom_loss
from fovea.wire.conventions import MESSAGE_BYTES
from fovea.wire.errors import FoveaError, InvalidInput, NotFound
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import custom_losses
from fovea_gateway.database.sql_engine import insert_new
from fovea_gateway.http.request_body import off_loop_by_size
from fovea_gateway.replicas.renderers import Renderers
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.sampling.recordings import STABLE_REINFORCE, Recordings
from fovea_gateway.sessions.future import (
    Done,
    Kind,
    Outcome,
    Pending,
    Submission,
    check_seq_id,
    future_id,
    join_messages,
    run_to_outcome,
    split_messages,
    stage,
)
from fovea_gateway.sessions.futures import Futures
from fovea_gateway.sessions.sessions import Sessions
from fovea_gateway.training.training_wire import data_from_proto, header_from_proto

logger = logging.getLogger(__name__)


CUSTOM = "custom"
"""The name of the loss function that uses a traced loss."""

MAX_LOSSES = 1024
"""The number of losses that one session may create."""


@dataclass(frozen=True)
class CustomLossRow:
    """The database row of a traced loss. `loss` is a serialized `fovea.api.v1.CustomLoss`."""

    custom_loss_id: str
    session_id: str
    loss: bytes
    created_at: float = field(default_factory=time.time)


class CustomLosses:
    """The traced losses. Their ids are `<session>:loss:<n>`; they are deleted when their session ends."""

    def __init__(self, database: Database, futures: Futures, sessions: Sessions) -> None:
        self._database, self._futures, self._sessions = database, futures, sessions
        self._running = BackgroundTasks()

    async def submit(self, owner: str, request: gateway_pb2.CreateCustomLossRequest) -> str:
        """Accepts a loss and returns the id of its future. A repeat returns the id of the first request.

        Raises NotFound or SessionEnded for the session, and InvalidInput for the number. An invalid loss fails the
        future instead.
        """
        await self._require(owner, request)
        scope = f"{request.session_id}:custom_loss"
        own_id = future_id(scope, request.custom_loss_seq_id)
        submission = Submission(
            own_id, Kind.CREATE_CUSTOM_LOSS, owner, request.session_id, scope, request.custom_loss_seq_id
        )
        await self._futures.submit(submission, request.SerializeToString(), self._start)
        return own_id

    async def resume(self, pendings: Iterable[Pending]) -> None:
        """Resumes the creations of losses that an earlier process left unfinished."""
        for pending in pendings:
            if pending.submission.kind is not Kind.CREATE_CUSTOM_LOSS:
                continue
            try:
                await self._sessions.load_open(pending.submission.session_id)
            except FoveaError as error:
                await self._futures.finish(pending, Outcome(Kind.CREATE_CUSTOM_LOSS, b"", error))
            else:
                self._start(pending)

    def _start(self, pending: Pending) -> None:
        self._running.start(self._run(pending), f"store {pending.submission.future_id}")

    async def create(self, owner: str, request: gateway_pb2.CreateCustomLossRequest) -> str:
        """Stores a loss and returns its id. A repeat returns the id of the first request.

        Raises the errors of `submit`, and InvalidInput if the loss itself is invalid.
        """
        await self._require(owner, request)
        row = await _checked(request)
        await self._database.write(lambda connection: _insert(connection, row))
        return row.custom_loss_id

    async def get(
        self, session_id: str, header: gateway_pb2.SubmitForwardBackwardHeader
    ) -> trainer_pb2.CustomLoss | None:
        """Returns the traced loss that a call names, or None if the call names a built-in loss function.

        Raises InvalidInput if the id and the loss function do not belong together, and NotFound if the session has no
        such loss.
        """
        loss_id, field = header.custom_loss_id, "loss_fn_config.loss_id"
        if header.loss_function != CUSTOM:
            if loss_id:
                raise InvalidInput(f"{field} requires loss_fn {CUSTOM!r}, not {header.loss_function!r}", field=field)
            return None
        if not loss_id:
            raise InvalidInput(
                f"{field} is missing: loss_fn {CUSTOM!r} needs the id that create_custom_loss returned", field=field
            )
        blob = await self._database.read(lambda connection: _get(connection, session_id, loss_id))
        if blob is None:
            raise NotFound(f"{field} {loss_id[:200]!r} does not exist in session {session_id}", field=field)
        return trainer_pb2.CustomLoss.FromString(blob)

    async def forget(self, session_id: str) -> None:
        """Deletes the losses of a session that has ended."""
        await self._database.write(lambda connection: _delete(connection, session_id))

    async def stop(self) -> None:
        """Waits until running creations have finished."""
        await self._running.join()

    async def _require(self, owner: str, request: gateway_pb2.CreateCustomLossRequest) -> None:
        await self._sessions.require(owner, request.session_id)
        check_seq_id(request.custom_loss_seq_id, "custom_loss_seq_id", 0)
        if request.custom_loss_seq_id >= MAX_LOSSES:
            raise InvalidInput(
                f"custom_loss_seq_id is {request.custom_loss_seq_id}; a session may create {MAX_LOSSES} losses",
                field="custom_loss_seq_id",
            )

    async def _run(self, pending: Pending) -> None:
        pending.begin()
        done, outcome = await run_to_outcome(pending, self._create(pending))
        await self._futures.finish(pending, outcome, done.effects)

    async def _create(self, pending: Pending) -> Done:
        row = await _checked(gateway_pb2.CreateCustomLossRequest.FromString(await self._futures.request_of(pending)))
        created = gateway_pb2.CreateCustomLossResponse(custom_loss_id=row.custom_loss_id)
        return Done([gateway_pb2.WaitFutureResponse(custom_loss_created=created)], [partial(_insert, row=row)])


async def _checked(request: gateway_pb2.CreateCustomLossRequest) -> CustomLossRow:
    """Returns the row of a loss. Raises InvalidInput if the trainer would not run the loss."""
    await off_loop_by_size(len(request.loss.graph), custom_loss.parse, request.loss)
    custom_loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
    return CustomLossRow(custom_loss_id, request.session_id, request.loss.SerializeToString())


def _insert(connection: sa.Connection, row: CustomLossRow) -> bool:
    """Inserts a loss. Returns False and leaves the existing row if the id is in use."""
    return insert_new(connection, custom_losses, asdict(row))


def _get(connection: sa.Connection, session_id: str, custom_loss_id: str) -> bytes | None:
    """Returns a serialized loss, or None if the session has no loss with this id."""
    where = (custom_losses.c.custom_loss_id == custom_loss_id) & (custom_losses.c.session_id == session_id)
    row = connection.execute(sa.select(custom_losses.c.loss).where(where)).first()
    return bytes(row.loss) if row else None


def _delete(connection: sa.Connection, session_id: str) -> None:
    """Deletes all losses of a session."""
    connection.execute(sa.delete(custom_losses).where(custom_losses.c.session_id == session_id))


BATCH_KINDS = (Kind.FORWARD, Kind.FORWARD_BACKWARD)
_MOST_AHEAD = 8
"""Batches per owner. The limit keeps commands that wait for a missing request from delaying the rendering of others."""
_TEXTS_AT_ONCE = 32
"""Texts that are rendered before the event loop may serve others. They take about 1 ms."""
_TINKER_TAG = b"\0t"
"""The start of a stored request that is a client's ForwardBackwardRequest. Any other stored request is a series of
SubmitForwardBackwardRequest, which starts with the length of its header. That is never 0."""


class LossRequest(NamedTuple):
    """A decoded request for a loss computation."""

    header: gateway_pb2.SubmitForwardBackwardHeader
    data: Sequence[gateway_pb2.InputDatum]


def blob_of_body(body: bytes) -> bytes:
    """Returns the stored form of a request that came as a Tinker body: the client's bytes behind a tag."""
    return _TINKER_TAG + body


def blob_of_messages(request: LossRequest) -> bytes:
    """Returns the stored form of a request that came over gRPC."""
    parts = [gateway_pb2.SubmitForwardBackwardRequest(header=request.header)]
    return join_messages(parts + [gateway_pb2.SubmitForwardBackwardRequest(datum=datum) for datum in request.data])


def request_from_blob(blob: bytes) -> LossRequest:
    """Decodes a stored request. Raises as `data_from_proto` does, but never for an accepted request."""
    if not blob.startswith(_TINKER_TAG):
        first, *rest = split_messages(gateway_pb2.SubmitForwardBackwardRequest, blob)
        return LossRequest(first.header, [record.datum for record in rest])
    body = tinker_pb2.ForwardBackwardRequest()
    body.ParseFromString(memoryview(blob)[len(_TINKER_TAG) :])  # type: ignore[arg-type]
    header = header_from_proto(body)
    return LossRequest(header, data_from_proto(body, header))


@dataclass(frozen=True)
class Batch:
    """The header and the rendered datums of one call to the trainer."""

    header: trainer_pb2.ForwardBackwardHeader
    datums: list[trainer_pb2.Datum]


class Batches:
    """The batches of forward and forward_backward, decoded and rendered ahead of their commands.

    Args:
        find_trainer: Returns the trainer of a model. It receives hints about images that it will need, so that it can
            fetch them ahead of the batch.
    """

    def __init__(
        self,
        futures: Futures,
        renderers: Renderers,
        custom_losses: CustomLosses,
        recordings: Recordings,
        find_trainer: Callable[[str], TrainerLink],
    ) -> None:
        self._futures, self._renderers = futures, renderers
        self._custom_losses, self._recordings = custom_losses, recordings
        self._find_trainer = find_trainer
        self._hints = BackgroundTasks()
        self._ahead: defaultdict[str, dict[str, asyncio.Task[Batch]]] = defaultdict(dict)

    def begin(self, pending: Pending, decoded: LossRequest | None) -> None:
        """Starts to prepare a batch in the background, unless its owner has `_MOST_AHEAD` batches under way already.

        If `decoded` is None, the request is decoded from its stored form. Never raises: `take` raises the error of the
        preparation. A rejected request is not prepared.
        """
        ahead = self._ahead[pending.submission.owner]
        if pending.submission.rejection is None and len(ahead) < _MOST_AHEAD:
            task = asyncio.create_task(
                self._prepare_ahead(pending, decoded), name=f"render {pending.submission.future_id}"
            )
            task.add_done_callback(_look_at)
            ahead[pending.submission.future_id] = task

    async def take(self, pending: Pending, is_again: bool = False) -> Batch:
        """Returns the batch of a request, prepared in advance or now. Raises InvalidInput that names a bad datum.

        Args:
            is_again: Whether the request ran before and runs again to restore a model.
        """
        task = self._ahead[pending.submission.owner].pop(pending.submission.future_id, None)
        return await (self._prepare(pending, None, is_again) if task is None else task)

    def drop(self, pending: Pending) -> None:
        """Cancels the preparation of a request that will not run."""
        task = self._ahead[pending.submission.owner].pop(pending.submission.future_id, None)
        if task is not None:
            task.cancel()

    async def _prepare_ahead(self, pending: Pending, decoded: LossRequest | None) -> Batch:
        batch = await self._prepare(pending, decoded)
        if features := _features(batch):
            self._hints.start(self._tell_trainer(batch.header.model_id, features), "telling the trainer of images")
        return batch

    async def _tell_trainer(self, model_id: str, features: list[model_input_pb2.VisionFeature]) -> None:
        try:
            await self._find_trainer(model_id).client.fetch_ahead(model_id, features)
        except FoveaError as error:  # Only a hint: without it the trainer fetches the images when it computes.
            logger.debug("could not announce %d images of model %s to the trainer: %s", len(features), model_id, error)

    async def _prepare(self, pending: Pending, decoded: LossRequest | None, is_again: bool = False) -> Batch:
        """Renders a request, after decoding it if `decoded` is None."""
        given, data = decoded or await self._decode(pending)
        if not data:
            raise InvalidInput("data is empty; send at least one datum", field="data")
        header = trainer_pb2.ForwardBackwardHeader(
            model_id=given.model_id,
            loss_function=given.loss_function,
            loss_config=given.loss_config,
            backward=given.backward,
            datum_count=len(data),
            custom_loss=await self._custom_loss(pending, given),
        )
        with stage("render", pending.submission.kind.value):
            rendered = await self._render(pending.submission.owner, {i: datum.input for i, datum in enumerate(data)})
        if given.loss_function == STABLE_REINFORCE:
            inputs = [rendered[index] for index in range(len(data))]
            await self._recordings.fill(pending.submission, header, data, inputs, is_again)
        return Batch(header, [_datum(index, rendered[index], datum) for index, datum in enumerate(data)])

    async def _decode(self, pending: Pending) -> LossRequest:
        blob = await self._futures.request_of(pending)
        return await off_loop_by_size(len(blob), request_from_blob, blob)

    async def _custom_loss(
        self, pending: Pending, header: gateway_pb2.SubmitForwardBackwardHeader
    ) -> trainer_pb2.CustomLoss | None:
        if header.loss_function == CUSTOM or header.custom_loss_id:
            return await self._custom_losses.get(pending.submission.session_id, header)
        return None

    async def render_again(self, pending: Pending, batch: Batch, indexes: Sequence[int]) -> Batch:
        """Returns a copy of a batch in which the datums at `indexes` are rendered anew."""
        data = (await self._decode(pending)).data
        with stage("render", pending.submission.kind.value):
            rendered = await self._render(pending.submission.owner, {i: data[i].input for i in indexes})
        datums = list(batch.datums)
        for index, one in rendered.items():
            datums[index] = trainer_pb2.Datum(input=one, loss_inputs=datums[index].loss_inputs)
        return Batch(batch.header, datums)

    async def _render(
        self, owner: str, inputs: Mapping[int, model_input_pb2.ModelInput]
    ) -> dict[int, model_input_pb2.RenderedInput]:
        rendered, others = {}, {}
        for index, model_input in inputs.items():
            # Text needs no task of its own: a task would double its cost.
            text = await self._renderers.render_text(model_input, f"data[{index}].model_input")
            if text is None:
                others[index] = model_input
            else:
                rendered[index] = text
            if index % _TEXTS_AT_ONCE == _TEXTS_AT_ONCE - 1:
                await asyncio.sleep(0)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    index: group.create_task(self._renderers.render(owner, model_input, f"data[{index}].model_input"))
                    for index, model_input in others.items()
                }
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return rendered | {index: task.result() for index, task in tasks.items()}


def _features(batch: Batch) -> list[model_input_pb2.VisionFeature]:
    """Returns the references with which the trainer fetches the images of a batch, one for each distinct image."""
    spans = (span for datum in batch.datums for span in datum.input.spans)
    return list({span.feature.digest: _slim(span.feature) for span in spans}.values())


def _slim(feature: model_input_pb2.VisionFeature) -> model_input_pb2.VisionFeature:
    return model_input_pb2.VisionFeature(
        digest=feature.digest,
        size_bytes=feature.size_bytes,
        source=feature.source,
        tensors_sha256=feature.tensors_sha256,
    )


def _look_at(task: asyncio.Task[Batch]) -> None:
    """Retrieves the exception of a task that may have no consumer, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _datum(index: int, rendered: model_input_pb2.RenderedInput, datum: gateway_pb2.InputDatum) -> trainer_pb2.Datum:
    whole = trainer_pb2.Datum(input=rendered, loss_inputs=datum.loss_inputs)
    if (size_bytes := whole.ByteSize()) > MESSAGE_BYTES - 1024:
        raise InvalidInput(
            f"data[{index}] has {size_bytes} bytes without its images; the limit is {MESSAGE_BYTES - 1024} bytes",
            field=f"data[{index}]",
        )
    return whole
