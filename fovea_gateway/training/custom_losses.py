"""Traced losses. The gateway checks them, stores them with their session, and sends them along with each call."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial

import sqlalchemy as sa

from fovea.api.v1 import gateway_pb2, trainer_pb2
from fovea.runtime.tasks import BackgroundTasks
from fovea.wire import custom_loss
from fovea.wire.errors import FoveaError, InvalidInput, NotFound
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import custom_losses
from fovea_gateway.database.sql_engine import insert_new
from fovea_gateway.futures.future import (
    Done,
    Kind,
    Outcome,
    Pending,
    Submission,
    check_seq_id,
    future_id,
    run_to_outcome,
)
from fovea_gateway.futures.futures import Futures
from fovea_gateway.http.request_body import off_loop_by_size
from fovea_gateway.sessions.sessions import Sessions

CUSTOM = "custom"
"""The name of the loss function that uses a traced loss."""

MAX_LOSSES = 1024
"""The number of losses that one session may create."""


@dataclass(frozen=True)
class CustomLossRow:
    """A row of a session's loss. `loss` is a serialized `fovea.api.v1.CustomLoss`."""

    custom_loss_id: str
    session_id: str
    loss: bytes
    created_at: float = field(default_factory=time.time)


class CustomLosses:
    """Creates and finds traced losses. Their ids are `<session>:loss:<n>`; they are deleted when their session ends."""

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
