"""Snapshots: their database rows, and their pushes to the samplers that need them.

One mechanism covers first use, eviction and restarted samplers: a request that needs a snapshot asks the trainer to
push it, and other requests for the same snapshot wait for that push.
"""

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from cachetools import LRUCache

from fovea.api.v1 import trainer_pb2, weights_pb2
from fovea.runtime import tracing
from fovea.runtime.tasks import BackgroundTasks, SingleFlight
from fovea.wire.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    FoveaError,
    Internal,
    ModelLost,
    NotFound,
    Unavailable,
)
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import models, sampling_sessions, snapshots
from fovea_gateway.database.sql_engine import insert_new
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.replicas.samplers import BASE, Sampler

logger = logging.getLogger(__name__)

_KNOWN = 4096
_RECENT = 64
"""The number of recently used snapshots that a joining sampler receives, if its peers hold them."""
_ROUNDS = 3
"""The number of attempts to bring a joining sampler to the full weights of its peers, which may change meanwhile."""


@dataclass(eq=False)
class SnapshotRecord:
    """Frozen weights. They are in the memory of one trainer, and also in storage if `uri` is set."""

    identity: weights_pb2.Snapshot
    uri: str
    trainer_instance: str
    created_at: float = field(default_factory=time.time)


class RestoreInProgress(Unavailable):
    """A restarted trainer is restoring the model. Callers keep waiting, however long it takes."""


class LoadFailed(Unavailable):
    """No sampler could load the weights, because of internal errors. A retry may fail in the same way."""


@dataclass
class PushTimes:
    """The number and the durations of the pushes in this process; `last_at` is a monotonic time in seconds."""

    count: int = 0
    total_s: float = 0.0
    last_s: float | None = None
    last_at: float = 0.0

    def add(self, seconds: float) -> None:
        """Adds a push that has just ended."""
        self.count, self.total_s = self.count + 1, self.total_s + seconds
        self.last_s, self.last_at = seconds, time.monotonic()


class Snapshots:
    """The snapshots of one base model, which are pushed to its samplers. Concurrent requests share a push.

    Args:
        trainers: The trainers of the base model.
        find_trainer: Returns the trainer of a model, or of the base model for an empty id. It and `check_restored` are
            None for a base model that is served for sampling only.
        check_restored: Raises RestoreInProgress while the unnamed snapshots of a model are being restored.
    """

    def __init__(
        self,
        database: Database,
        base_model: str,
        trainers: Sequence[TrainerLink],
        find_trainer: Callable[[str], TrainerLink] | None,
        check_restored: Callable[[str], Awaitable[None]] | None,
        push_timeout_s: float,
    ) -> None:
        self.push_times = PushTimes()
        self._database = database
        self._base_model = base_model
        self._trainers, self._find_trainer = trainers, find_trainer
        self._check_restored = check_restored
        self._push_timeout_s = push_timeout_s
        self._known: LRUCache[str, SnapshotRecord] = LRUCache(_KNOWN)
        self._pushes: SingleFlight[tuple[str, str], None] = SingleFlight()
        self._users: Counter[str] = Counter()
        self._recent: OrderedDict[str, float] = OrderedDict()
        self._lost: set[str] = set()
        self._retired: dict[str, Callable[[], list[Sampler]]] = {}
        self._being_freed: set[str] = set()
        self._frees = BackgroundTasks()

    async def get(self, snapshot_id: str) -> SnapshotRecord:
        """Returns a snapshot by id. Raises NotFound."""
        kept = self._known.get(snapshot_id)
        if kept is None:
            kept = await self._database.read(lambda connection: get_row(connection, snapshot_id))
            if kept is None or snapshot_id in self._being_freed:
                raise NotFound(
                    f"snapshot {snapshot_id!r} no longer exists: it was saved without a name, and its model ended, or"
                    " newer ones needed its storage (unnamed_bytes). To keep weights, save them with a name"
                )
            self.remember(kept)
        return kept

    def remember(self, kept: SnapshotRecord) -> None:
        """Caches a snapshot that may not be in the database yet."""
        self._known[kept.identity.snapshot_id] = kept

    async def resident_for(self, snapshot_id: str) -> str:
        """Returns the full weights needed to sample a snapshot: the snapshot itself, or the base for an adapter."""
        if snapshot_id == BASE:
            return BASE
        kept = await self.get(snapshot_id)
        return snapshot_id if kept.identity.kind == weights_pb2.SNAPSHOT_KIND_FULL else BASE

    async def ensure_adapter(self, sampler: Sampler, snapshot_id: str, peers: list[Sampler]) -> None:
        """Returns once `sampler` holds the adapter. The same push also goes to `peers` that lack it."""
        if snapshot_id in sampler.adapters:
            return
        lacking = [peer for peer in peers if peer is not sampler and snapshot_id not in peer.adapters]
        await self._push_once([sampler, *lacking], snapshot_id)

    async def put_resident(self, sampler: Sampler, snapshot_id: str) -> None:
        """Loads full weights into one sampler, which drops its adapters. An empty id means the base model."""
        await self._push_once([sampler], snapshot_id)
        sampler.adapters.clear()

    async def catch_up(self, sampler: Sampler, peers: Callable[[], list[Sampler]]) -> None:
        """Transfers to a sampler the weights that its peers serve. Raises the errors of a push."""
        done: str | None = None
        for _ in range(_ROUNDS):
            wanted = _most_common_resident(peers())
            if wanted in (None, done):
                return
            done = wanted
            async with sampler.weights_lock.hold(wanted):
                await self._bring_adapters(sampler, peers)

    def is_lost(self, snapshot_id: str) -> bool:
        """Returns whether a push found that the trainer has lost the snapshot, so that only samplers still hold it."""
        return snapshot_id in self._lost

    async def _bring_adapters(self, sampler: Sampler, peers: Callable[[], list[Sampler]]) -> None:
        hopeless: set[str] = set()
        while True:
            held = {snapshot_id for peer in peers() for snapshot_id in peer.adapters} - sampler.adapters - hopeless
            # Push the least recently used first, so that the sampler also evicts it first.
            snapshot_id = next((recent for recent in list(self._recent)[-_RECENT:] if recent in held), None)
            if snapshot_id is None:
                return
            try:
                await self.ensure_adapter(sampler, snapshot_id, [])
            except (ModelLost, NotFound) as error:
                logger.warning("sampler %s did not receive %s: %s", sampler.address, snapshot_id, error)
                hopeless.add(snapshot_id)

    async def forget(self, model_ids: list[str], samplers: list[Sampler]) -> None:
        """Frees the unnamed snapshots of ended models. The next restart frees what cannot be freed now."""
        await self.drop(await self._database.read(lambda connection: ids_of_unnamed(connection, model_ids)), samplers)

    async def drop(self, snapshot_ids: Iterable[str], samplers: list[Sampler]) -> None:
        """Makes samplers and trainers free snapshots. Logs a warning for each that cannot be freed now."""
        for snapshot_id in snapshot_ids:
            await self._drop(snapshot_id, samplers)

    @contextmanager
    def using(self, snapshot_id: str) -> Iterator[None]:
        """Prevents a snapshot from being freed while a request samples from it or pushes it."""
        self._users[snapshot_id] += 1
        self._recent[snapshot_id] = time.time()
        self._recent.move_to_end(snapshot_id)
        if len(self._recent) > _KNOWN:
            self._recent.popitem(last=False)
        try:
            yield
        finally:
            self._recent[snapshot_id] = time.time()
            self._users[snapshot_id] -= 1
            if not self._users[snapshot_id]:
                del self._users[snapshot_id]
                self._free_if_unused(snapshot_id)

    def used_at(self, snapshot_id: str) -> float:
        """Returns the time of a snapshot's last use, in seconds since 1970; inf while it is in use, 0 if unknown."""
        return math.inf if self._users[snapshot_id] else self._recent.get(snapshot_id, 0.0)

    def retire(self, snapshot_id: str, samplers: Callable[[], list[Sampler]]) -> None:
        """Frees a snapshot that clients can no longer name, or have not used lately, as soon as no request uses it."""
        if snapshot_id not in self._being_freed:
            self._retired[snapshot_id] = samplers
            self._free_if_unused(snapshot_id)

    async def retire_unreachable(self, samplers: Callable[[], list[Sampler]]) -> None:
        """Frees the snapshots that an earlier process or a failed call left behind."""
        for snapshot_id in await self._database.read(
            lambda connection: ids_of_unreachable(connection, self._base_model)
        ):
            self.retire(snapshot_id, samplers)

    async def close(self) -> None:
        """Stops freeing. The next process frees the remaining snapshots."""
        await self._frees.cancel()

    def _free_if_unused(self, snapshot_id: str) -> None:
        if snapshot_id in self._retired and not self._users[snapshot_id]:
            samplers = self._retired.pop(snapshot_id)
            self._being_freed.add(snapshot_id)
            self._frees.start(self._free(snapshot_id, samplers()), f"free {snapshot_id}")

    async def _free(self, snapshot_id: str, samplers: list[Sampler]) -> None:
        try:
            if await self._drop(snapshot_id, samplers):
                await self._database.write(lambda connection: delete_row(connection, snapshot_id))
                self._known.pop(snapshot_id, None)
                logger.info("snapshot %s is freed", snapshot_id)
        finally:
            self._being_freed.discard(snapshot_id)

    async def _drop(self, snapshot_id: str, samplers: list[Sampler]) -> bool:
        self._known.pop(snapshot_id, None)
        self._recent.pop(snapshot_id, None)
        self._lost.discard(snapshot_id)
        holders = [sampler for sampler in samplers if snapshot_id in sampler.adapters]
        calls = [_drop_from(sampler, snapshot_id) for sampler in holders]
        # A trainer that is away has lost its memory, or drops old snapshots itself.
        trainers = [trainer for trainer in self._trainers if trainer.up] or self._trainers[:1]
        calls += [trainer.client.forget_snapshot(snapshot_id) for trainer in trainers]
        try:
            await asyncio.gather(*calls)
        except FoveaError as error:
            logger.warning("could not free snapshot %s: %s", snapshot_id, error)
            return False
        return True

    async def _push_once(self, samplers: list[Sampler], snapshot_id: str) -> None:
        first, *others = ((sampler.address, snapshot_id) for sampler in samplers)
        name = f"push {snapshot_id or 'base'}"
        await self._pushes.run(first, lambda: self._push(samplers, snapshot_id), others, name)

    async def _push(self, samplers: list[Sampler], snapshot_id: str) -> None:
        kept = await self.get(snapshot_id) if snapshot_id else None
        started = time.perf_counter()
        try:
            with tracing.span("push", snapshot_id=snapshot_id):
                response = await self._call(kept, snapshot_id, [sampler.address for sampler in samplers])
        except FoveaError as error:
            metrics.PUSHES.labels(error.reason).inc()
            raise
        errors = {result.sampler: result.error for result in response.results if result.error}
        for sampler in samplers:
            metrics.PUSHES.labels("SAMPLER_FAILED" if sampler.address in errors else "OK").inc()
            if sampler.address not in errors and kept and kept.identity.kind == weights_pb2.SNAPSHOT_KIND_ADAPTER:
                sampler.adapters.add(snapshot_id)
        seconds = time.perf_counter() - started
        metrics.PUSH_SECONDS.observe(seconds)
        self.push_times.add(seconds)
        logger.info("pushed %s to %d samplers in %.2f s", snapshot_id or "base", len(samplers) - len(errors), seconds)
        if samplers[0].address in errors:
            reason = errors[samplers[0].address]
            raise Unavailable(
                f"the push of {snapshot_id or 'the base weights'} to {samplers[0].address} failed: {reason}"
            )

    async def _call(
        self, kept: SnapshotRecord | None, snapshot_id: str, addresses: list[str]
    ) -> trainer_pb2.PushSnapshotResponse:
        uri = kept.uri if kept else ""
        if self._find_trainer is None or self._check_restored is None:
            raise FailedPrecondition(
                f"base model {self._base_model!r} is served for sampling only: without a trainer, no weights can be "
                "pushed"
            )
        if kept and not uri:
            await self._check_restored(kept.identity.model_id)
        trainer = self._find_trainer(kept.identity.model_id if kept else "")
        await trainer.require()
        try:
            return await trainer.client.push_snapshot(snapshot_id, addresses, uri, self._push_timeout_s)
        except NotFound:
            if kept and not uri:  # The trainer may have restarted a moment ago.
                await trainer.look_again()
                await self._check_restored(kept.identity.model_id)
            raise self._gone(snapshot_id, kept) from None
        except DeadlineExceeded as error:
            raise Unavailable(f"the push of {snapshot_id or 'the base weights'} took too long: {error}") from None
        except Internal as error:
            raise LoadFailed(error.message) from None

    def _gone(self, snapshot_id: str, kept: SnapshotRecord | None) -> FoveaError:
        self._lost.add(snapshot_id)
        is_full = kept is not None and kept.identity.kind == weights_pb2.SNAPSHOT_KIND_FULL
        place = "in memory, the only place for snapshots of full parameters" if is_full else "in memory or for recovery"
        return ModelLost(
            f"snapshot {snapshot_id} was saved without a name, and the trainer no longer has it {place}. It cannot be "
            "loaded again. Save weights with a name (save_weights_for_sampler) to keep them"
        )


async def _drop_from(sampler: Sampler, snapshot_id: str) -> None:
    sampler.adapters.discard(snapshot_id)  # Immediately, so that no request samples from it there.
    try:
        await sampler.client.drop_snapshot(snapshot_id)
    except FoveaError:
        sampler.adapters.add(snapshot_id)  # The sampler may still hold it; the orphan collector asks again.
        raise


def _most_common_resident(samplers: list[Sampler]) -> str | None:
    """Returns the full weights that most samplers hold; None if none is known."""
    places = Counter(sampler.weights_lock.resident for sampler in samplers if sampler.weights_lock.resident is not None)
    return places.most_common(1)[0][0] if places else None


def put_row(connection: sa.Connection, kept: SnapshotRecord) -> None:
    """Inserts a new snapshot."""
    row = {
        "snapshot_id": kept.identity.snapshot_id,
        "model_id": kept.identity.model_id,
        "identity": kept.identity.SerializeToString(),
        "uri": kept.uri,
        "trainer_instance": kept.trainer_instance,
        "created_at": kept.created_at,
    }
    insert_new(connection, snapshots, row)


def get_row(connection: sa.Connection, snapshot_id: str) -> SnapshotRecord | None:
    """Returns a snapshot by id, or None."""
    query = sa.select(snapshots).where(snapshots.c.snapshot_id == snapshot_id)
    row = (connection.execute(query)).mappings().first()
    return _to_snapshot(row) if row else None


def ids_of_unnamed(connection: sa.Connection, model_ids: list[str]) -> list[str]:
    """Returns the ids of the models' snapshots that are only in memory."""
    where = snapshots.c.model_id.in_(model_ids) & (snapshots.c.uri == "")
    return [row.snapshot_id for row in connection.execute(sa.select(snapshots.c.snapshot_id).where(where))]


def ids_of_stored(connection: sa.Connection, model_ids: list[str]) -> list[str]:
    """Returns the ids of the models' snapshots that have files."""
    where = snapshots.c.model_id.in_(model_ids) & (snapshots.c.uri != "")
    return list(connection.scalars(sa.select(snapshots.c.snapshot_id).where(where)))


def ids_of_unreachable(connection: sa.Connection, base_model: str) -> list[str]:
    """Returns a base model's snapshots that are only in memory and that no sampling session, open or ended, names."""
    is_named = sa.exists().where(sampling_sessions.c.snapshot_id == snapshots.c.snapshot_id)
    joined = snapshots.join(models, models.c.model_id == snapshots.c.model_id)
    where = (models.c.base_model == base_model) & (snapshots.c.uri == "") & ~is_named
    query = sa.select(snapshots.c.snapshot_id).select_from(joined).where(where)
    return [row.snapshot_id for row in connection.execute(query)]


def delete_row(connection: sa.Connection, snapshot_id: str) -> None:
    connection.execute(sa.delete(snapshots).where(snapshots.c.snapshot_id == snapshot_id))


def _to_snapshot(row: Any) -> SnapshotRecord:
    identity = weights_pb2.Snapshot.FromString(row["identity"])
    return SnapshotRecord(identity, row["uri"], row["trainer_instance"], row["created_at"])


def id_of_snapshot(model: str, number: int) -> str:
    """Returns the id of a model's n-th snapshot."""
    return f"{model}@{number}"


def id_of_export(model: str, seq_id: int) -> str:
    """Returns the id of the snapshot that export command `seq_id` of a model writes. It is never sampled from."""
    return f"{model}@export-{seq_id}"
