"""The journal stores the commands that changed models since their last durable points, so that they can run again.

When a command has changed a model, the transaction that stores its outcome also moves its request into the journal. The
request stays there until the trainer reports a durable point that contains the change. A failed command changes
nothing, with one exception: a refused optimizer step may have dropped the gradients.
"""

import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import sqlalchemy as sa
from google.protobuf.message import Message

from fovea.wire.errors import FailedPrecondition, FoveaError, ResourceExhausted
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.database.database import Database, Job
from fovea_gateway.database.schema import future_requests, journal, journal_numerics, journal_requests, models
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.sessions.future import Done, Kind, Pending
from fovea_gateway.training.models import Model, Models

logger = logging.getLogger(__name__)

_TABLES = (journal, journal_requests, journal_numerics)
_CHANGING = (Kind.CREATE_MODEL, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.LOAD_STATE, Kind.SAVE_FOR_SAMPLER)
_STEPS = (Kind.OPTIM_STEP.value, Kind.LOAD_STATE.value)
_CLEARED = (FailedPrecondition, ResourceExhausted)
"""The errors of an optimizer step that has dropped the gradients. Other errors occur before the gradients are touched.
"""

_STALLED_S = 300.0
"""Seconds for which storage must fail before an owner above its share loses entries."""
PLACE = "place"
"""The place of a loss computation in a pass of the trainer. In the same place it gives the same bits."""


@dataclass(frozen=True)
class Entry:
    """One command that has run.

    Attributes:
        drops_gradients: For a forward_backward: existing gradients were dropped first. For an optim_step: the gradients
            were dropped and no step was made.
        subject: The object of the command: the id of the snapshot that it created, or the folder that it loaded.
        digest: The digest of the answer that the client received.
        size_bytes: The size of the request.
        numerics: The numerical settings that the trainer reported when it ran the command, and `PLACE`. Empty in old
            entries.
    """

    model_id: str
    seq_id: int
    owner: str
    session_id: str
    kind: Kind
    drops_gradients: bool
    subject: str
    digest: str
    size_bytes: int = 0
    numerics: dict[str, str] = field(default_factory=dict)


class Journal:
    """The entries of all models.

    Args:
        capacity_bytes: The limit for all stored requests together. An owner may use as many bytes as are still free.
            An owner above that waits for the next durable points of its models, or gets an error if none is due. Only
            while storage fails, its largest model loses its entries and can be restored only after its next point.
        clock: Returns seconds since an arbitrary origin.
    """

    def __init__(
        self,
        database: Database,
        models: Models,
        capacity_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database, self._models = database, models
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._trimmed: dict[str, dict[str, int]] = {}
        self._failing_since: dict[str, float] = {}  # by address of the trainer
        self._changes: dict[str, int] = {}  # the last change of each model's weights, by seq_id
        self._full: dict[str, list[str]] = {}  # the models of each owner above its share

    def record(
        self,
        trainer: TrainerLink,
        model: Model,
        pending: Pending,
        done: Done,
        error: FoveaError | None,
        drops_gradients: bool,
    ) -> list[Job[Any]]:
        """Returns the writes to add to the transaction that stores a command's outcome. There are none for a command
        without effect, or if the trainer keeps no recovery.
        """
        submission = pending.submission
        is_cleared = submission.kind is Kind.OPTIM_STEP and isinstance(error, _CLEARED) and not submission.rejection
        is_named = submission.kind is Kind.SAVE_FOR_SAMPLER and not done.subject  # Its snapshot is in storage already.
        if submission.kind not in _CHANGING or (error is not None and not is_cleared) or is_named:
            return []
        if trainer.info is None or not trainer.info.keeps_recovery:
            model.journaled_since = None
            return []
        if submission.kind is Kind.CREATE_MODEL:
            model.journaled_since = 0
        if submission.kind in (Kind.OPTIM_STEP, Kind.LOAD_STATE) and error is None:
            self._changes[model.model_id] = submission.seq_id
        entry = Entry(
            model.model_id, submission.seq_id, model.owner, model.session_id, submission.kind,
            drops_gradients or is_cleared, done.subject, digest_of(done.result),
            numerics={**trainer.info.numerics, **({PLACE: pending.place} if pending.place else {})},
        )  # fmt: skip
        return [lambda connection: _move(connection, submission.future_id, entry)]

    async def entries(self, model_id: str) -> list[Entry]:
        """Returns the entries of a model, in order."""
        return await self._database.read(lambda connection: _entries(connection, model_id))

    async def request_of(self, entry: Entry) -> bytes:
        """Returns the serialized request of an entry."""
        table = journal_requests.c
        where = (table.model_id == entry.model_id) & (table.seq_id == entry.seq_id)
        query = sa.select(table.request).where(where)
        return await self._database.read(lambda connection: bytes(connection.execute(query).scalar_one()))

    async def trim(self, trainer: TrainerLink) -> None:
        """Deletes the entries that the trainer reports as durable, and updates `journaled_since` of their models."""
        said = trainer.info.durable_seq_ids if trainer.info is not None else {}
        trimmed = self._trimmed.get(trainer.address, {})
        until = {model_id: seq_id for model_id, seq_id in said.items() if trimmed.get(model_id) != seq_id}
        fails = trainer.info is not None and trainer.info.recovery_failure
        since = min(self._failing_since.get(trainer.address, math.inf), self._clock())
        self._failing_since[trainer.address] = since if fails else math.inf
        for model_id, seq_id in until.items():
            model = self._models.find(model_id)
            if model is not None and model.journaled_since is not None:
                model.journaled_since = max(model.journaled_since, seq_id + 1)
        if until:
            await self._database.write(lambda connection: _trim(connection, until))
        self._trimmed[trainer.address] = dict(said)

    def must_wait(self, model: Model) -> bool:
        """Returns whether a model's losses must wait because its owner is above its share. Raises ResourceExhausted if
        no durable point is due that would free space.
        """
        if model.owner not in self._full:
            return False
        if any(map(self._awaits_point, [*self._full[model.owner], model.model_id])):
            return True
        raise ResourceExhausted(
            "the losses since this owner's last optim_steps fill the journal (max_journal_bytes): take steps more often"
        )

    async def bound(self) -> None:
        """Finds the owners above their share. While storage fails, drops the entries of their largest models."""
        found = await self._database.read(_sizes)
        of_owner: Counter[str] = Counter()
        for size in found:
            of_owner[size.owner] += size.size_bytes
            self._changes[size.model_id] = max(size.last_change, self._changes.get(size.model_id, 0))
        metrics.JOURNAL_BYTES.set(of_owner.total())
        full = {owner for owner, held in of_owner.items() if held > self._capacity_bytes - of_owner.total()}
        if any(self._clock() - since >= _STALLED_S for since in self._failing_since.values()):
            for owner in full:
                await self._give_up(max((s.size_bytes, s.model_id) for s in found if s.owner == owner)[1])
            full = set()
        self._full = {owner: [size.model_id for size in found if size.owner == owner] for owner in full}

    async def forget(self, model_ids: Iterable[str]) -> None:
        """Deletes the entries of models that have ended."""
        over = list(model_ids)
        for model_id in over:
            self._changes.pop(model_id, None)
        await self._database.write(lambda connection: _drop(connection, over))

    def _awaits_point(self, model_id: str) -> bool:
        """Returns whether a change of a model is not in a durable point yet, so that the trainer will write one."""
        durable = max((said.get(model_id, 0) for said in self._trimmed.values()), default=0)
        return self._changes.get(model_id, 0) > durable

    async def _give_up(self, model_id: str) -> None:
        model = self._models.use(await self._models.load(model_id))
        model.journaled_since = model.next_seq_id  # An upper bound: commands that change nothing leave no entry.
        saving = self._models.saving(model)

        def job(connection: sa.Connection) -> int:
            query = sa.select(sa.func.max(journal.c.seq_id)).where(journal.c.model_id == model_id)
            last: int = connection.execute(query).scalar() or 0
            _drop(connection, [model_id])
            saving(connection)
            return last

        model.journaled_since = await self._database.write(job) + 1
        await self._models.save(model)
        logger.error(
            "the journal is full (max_journal_bytes), and the trainer's recovery storage fails: if the trainer ended "
            "now, model %s could not be restored from commands before request %d",
            model_id,
            model.journaled_since,
        )


def digest_of(result: Iterable[Message]) -> str:
    """Returns the hexadecimal SHA-256 of an answer. It does not depend on the order of map fields."""
    digest = hashlib.sha256()
    for message in result:
        digest.update(message.SerializeToString(deterministic=True))
    return digest.hexdigest()


def _move(connection: sa.Connection, future_id: str, entry: Entry) -> None:
    """Moves the request of a future that is about to end into the journal. May be repeated after a failed commit."""
    place = {"model_id": entry.model_id, "seq_id": entry.seq_id}
    given = sa.select(future_requests.c.request).where(future_requests.c.future_id == future_id)
    request: bytes = connection.execute(given).scalar_one()
    connection.execute(sa.insert(journal_requests).values(**place, request=request))
    if entry.kind is Kind.OPTIM_STEP and entry.drops_gradients:
        _drop_losses(connection, entry.model_id)
    row = {**vars(entry), "kind": entry.kind.value, "size_bytes": len(request)}
    connection.execute(sa.insert(journal_numerics).values(**place, numerics=row.pop("numerics")))
    connection.execute(sa.insert(journal).values(**row))


def _entries(connection: sa.Connection, model_id: str) -> list[Entry]:
    same = (journal_numerics.c.model_id == journal.c.model_id) & (journal_numerics.c.seq_id == journal.c.seq_id)
    query = sa.select(journal, journal_numerics.c.numerics).outerjoin(journal_numerics, same)
    found = connection.execute(query.where(journal.c.model_id == model_id).order_by(journal.c.seq_id)).mappings()
    return [Entry(**{**row, "kind": Kind(row["kind"]), "numerics": row["numerics"] or {}}) for row in found]


def _trim(connection: sa.Connection, until: dict[str, int]) -> None:
    rows = [{"model": model_id, "until": seq_id} for model_id, seq_id in until.items()]
    for table in _TABLES:
        where = (table.c.model_id == sa.bindparam("model")) & (table.c.seq_id <= sa.bindparam("until"))
        connection.execute(sa.delete(table).where(where), rows)
    since = models.c.journaled_since
    where = (models.c.model_id == sa.bindparam("model")) & (since <= sa.bindparam("until"))
    connection.execute(sa.update(models).where(where).values(journaled_since=sa.bindparam("until") + 1), rows)


def _drop(connection: sa.Connection, model_ids: list[str]) -> None:
    for table in _TABLES:
        connection.execute(sa.delete(table).where(table.c.model_id.in_(model_ids)))


def _drop_losses(connection: sa.Connection, model_id: str) -> None:
    """Deletes the losses since the last step: a refused step has dropped their gradients."""
    query = sa.select(journal.c.seq_id, journal.c.kind).where(journal.c.model_id == model_id)
    rows = connection.execute(query.order_by(journal.c.seq_id.desc())).all()
    since = takewhile(lambda row: row.kind not in _STEPS, rows)
    lost = [row.seq_id for row in since if row.kind == Kind.FORWARD_BACKWARD.value]
    for table in _TABLES:
        connection.execute(sa.delete(table).where((table.c.model_id == model_id) & table.c.seq_id.in_(lost)))


def _sizes(connection: sa.Connection) -> Sequence[Any]:
    """Returns for each model its owner, the bytes of its requests, and the last one that changed its weights."""
    is_change = journal.c.kind.in_(_STEPS) & ~journal.c.drops_gradients
    last_change = sa.func.max(sa.case((is_change, journal.c.seq_id), else_=0)).label("last_change")
    size_bytes = sa.cast(sa.func.sum(journal.c.size_bytes), sa.BigInteger).label("size_bytes")
    query = sa.select(journal.c.owner, journal.c.model_id, size_bytes, last_change)
    return connection.execute(query.group_by(journal.c.owner, journal.c.model_id)).all()
