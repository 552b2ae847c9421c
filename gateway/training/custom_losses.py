"""Traced losses: checked, kept in the database with their session, and handed to the trainer with each call."""

import asyncio
import logging

from fovea.api.v1 import gateway_pb2, trainer_pb2
from fovea.wire import custom_loss
from fovea.wire.errors import FoveaError, InvalidInput, NotFound
from gateway import identity
from gateway.database.database import Database
from gateway.futures import records
from gateway.futures.future import Kind, Outcome, Pending, unforeseen
from gateway.futures.futures import FutureBoard
from gateway.identity import Caller
from gateway.sessions.sessions import Sessions
from gateway.training import custom_loss_rows as rows

logger = logging.getLogger(__name__)

CUSTOM = "custom"
"""The loss function that takes one."""

MAX_LOSSES = 1024
"""The most of a session."""


class CustomLosses:
    """Traced losses by id, `<session>:loss:<n>`. They end with their session."""

    def __init__(self, database: Database, board: FutureBoard, sessions: Sessions) -> None:
        self._database, self._board, self._sessions = database, board, sessions
        self._running: set[asyncio.Task[None]] = set()

    async def submit(self, caller: Caller, request: gateway_pb2.CreateCustomLossRequest) -> str:
        """Accepts a loss; returns the future's id. A repeat gets the first one's.

        Raises NotFound, SessionEnded for the session, InvalidInput for the number. What is wrong with the loss itself
        fails the future.
        """
        await self._require(caller, request)
        scope = f"{request.session_id}:custom_loss"
        future_id = identity.future_id(scope, request.custom_loss_seq_id)
        pending = Pending(
            future_id, Kind.CREATE_CUSTOM_LOSS, caller.owner, request.session_id, scope, request.custom_loss_seq_id,
            request=request.SerializeToString(),
        )  # fmt: skip
        await self._board.submit(pending)
        return future_id

    def start(self, pending: Pending) -> None:
        """Works on an accepted loss."""
        self._running.add(task := asyncio.create_task(self._run(pending), name=f"keep {pending.future_id}"))
        task.add_done_callback(self._running.discard)

    async def create(self, caller: Caller, request: gateway_pb2.CreateCustomLossRequest) -> str:
        """Keeps a loss; returns its id. A repeat gets the first one's.

        Raises as `submit`, and InvalidInput for what is wrong with the loss.
        """
        await self._require(caller, request)
        kept = _checked(request)
        await self._database.write(lambda connection: rows.insert(connection, kept))
        return kept.custom_loss_id

    async def get(
        self, session_id: str, header: gateway_pb2.SubmitForwardBackwardHeader
    ) -> trainer_pb2.CustomLoss | None:
        """The loss that a call names; None if it names a loss function of the trainer.

        Raises InvalidInput if id and loss function do not belong together, NotFound if the session has no such loss.
        """
        loss_id, field = header.custom_loss_id, "loss_fn_config.loss_id"
        if header.loss_function != CUSTOM:
            if loss_id:
                raise InvalidInput(f"{field} goes with loss_fn {CUSTOM!r}, not {header.loss_function!r}", field=field)
            return None
        if not loss_id:
            raise InvalidInput(
                f"{field} is missing: loss_fn {CUSTOM!r} needs what create_custom_loss gave", field=field
            )
        blob = await self._database.read(lambda connection: rows.get(connection, session_id, loss_id))
        if blob is None:
            raise NotFound(f"{field} {loss_id[:200]!r} is no loss of session {session_id}", field=field)
        return trainer_pb2.CustomLoss.FromString(blob)

    async def forget(self, session_id: str) -> None:
        """Drops the losses of a session that is over."""
        await self._database.write(lambda connection: rows.delete(connection, session_id))

    async def stop(self) -> None:
        """Lets what was begun end."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _require(self, caller: Caller, request: gateway_pb2.CreateCustomLossRequest) -> None:
        await self._sessions.require(caller, request.session_id)
        identity.check_seq_id(request.custom_loss_seq_id, "custom_loss_seq_id", 0)
        if request.custom_loss_seq_id >= MAX_LOSSES:
            raise InvalidInput(
                f"custom_loss_seq_id is {request.custom_loss_seq_id}: a session takes {MAX_LOSSES} losses",
                field="custom_loss_seq_id",
            )

    async def _run(self, pending: Pending) -> None:
        pending.begin()
        try:
            request = gateway_pb2.CreateCustomLossRequest.FromString(await self._board.request_of(pending))
            kept = _checked(request)
            created = gateway_pb2.CreateCustomLossResponse(custom_loss_id=kept.custom_loss_id)
            result = records.join([gateway_pb2.WaitFutureResponse(custom_loss_created=created)])
            outcome = Outcome(pending.kind, result)
            await self._board.finish(pending, outcome, [lambda connection: rows.insert(connection, kept)])
        except FoveaError as error:
            await self._board.finish(pending, Outcome(pending.kind, b"", error))
        except Exception as error:
            await self._board.finish(pending, Outcome(pending.kind, b"", unforeseen(pending, error)))


def _checked(request: gateway_pb2.CreateCustomLossRequest) -> rows.CustomLossRow:
    """Raises InvalidInput for a loss that the trainer would not run."""
    custom_loss.parse(request.loss)
    custom_loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
    return rows.CustomLossRow(custom_loss_id, request.session_id, request.loss.SerializeToString())
