"""Snapshots: their rows, and that a sampler has the one that a sample names.

One mechanism serves first use, eviction and restarted samplers: whoever needs a snapshot asks the trainer to push it,
and everybody who needs the same one meanwhile waits for that push.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import sqlalchemy as sa
from cachetools import LRUCache

from fovea.api.v1 import trainer_pb2, weights_pb2
from fovea.runtime import tracing
from fovea.runtime.tasks import BackgroundTasks, SingleFlight
from fovea.wire.errors import DeadlineExceeded, FailedPrecondition, FoveaError, ModelLost, NotFound, Unavailable
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import models, sampling_sessions, snapshots
from fovea_gateway.database.sql_engine import insert_new
from fovea_gateway.replicas.samplers import Sampler
from fovea_gateway.replicas.trainer_link import TrainerLink
from fovea_gateway.replicas.weights_lock import BASE

logger = logging.getLogger(__name__)

_KNOWN = 4096
_RECENT = 64
"""How many snapshots, the last used ones, a sampler that joins is given if its peers hold them."""
_ROUNDS = 3
"""How often a sampler that joins is brought to the full weights of its peers, which change meanwhile."""


@dataclass(eq=False)
class KeptSnapshot:
    """Frozen weights: in the memory of one trainer, and in storage if `uri` is set."""

    identity: weights_pb2.Snapshot
    uri: str
    trainer_instance: str
    created_at: float = field(default_factory=time.time)


class Returning(Unavailable):
    """A trainer that restarted brings back what it held: however long that takes, it is worth waiting."""


class Residence(Protocol):
    """Knows which models are in the trainer."""

    async def check_snapshots(self, model_id: str) -> None:
        """Raises Returning while unnamed snapshots of a model are brought back."""
        ...


class Snapshots:
    """Pushes the snapshots of one base model to its samplers, once for all who wait.

    Args:
        trainer: None, as `residence`, for a base model that is served for sampling only.
    """

    def __init__(
        self,
        database: Database,
        base_model: str,
        trainer: TrainerLink | None,
        residence: Residence | None,
        push_timeout_s: float,
    ) -> None:
        self._database = database
        self._base_model = base_model
        self._trainer = trainer
        self._residence = residence
        self._push_timeout_s = push_timeout_s
        self._known: LRUCache[str, KeptSnapshot] = LRUCache(_KNOWN)
        self._pushes: SingleFlight[tuple[str, str], None] = SingleFlight()
        self._users: Counter[str] = Counter()
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._lost: set[str] = set()
        self._retired: dict[str, Callable[[], list[Sampler]]] = {}
        self._being_freed: set[str] = set()
        self._frees = BackgroundTasks()

    async def get(self, snapshot_id: str) -> KeptSnapshot:
        """A snapshot by id. Raises NotFound."""
        kept = self._known.get(snapshot_id)
        if kept is None:
            kept = await self._database.read(lambda connection: get_row(connection, snapshot_id))
            if kept is None:
                raise NotFound(f"there is no snapshot {snapshot_id!r}")
            self.remember(kept)
        return kept

    def remember(self, kept: KeptSnapshot) -> None:
        """Notes a snapshot that may not be in the database yet."""
        self._known[kept.identity.snapshot_id] = kept

    async def resident_for(self, snapshot_id: str) -> str:
        """The full weights that must be in place to sample a snapshot: itself, or the base for an adapter."""
        if snapshot_id == BASE:
            return BASE
        kept = await self.get(snapshot_id)
        return snapshot_id if kept.identity.kind == weights_pb2.SNAPSHOT_KIND_FULL else BASE

    async def ensure_adapter(self, sampler: Sampler, snapshot_id: str, peers: list[Sampler]) -> None:
        """Returns once `sampler` holds the adapter; `peers` that lack it get it in the same push."""
        if snapshot_id in sampler.adapters:
            return
        lacking = [peer for peer in peers if peer is not sampler and snapshot_id not in peer.adapters]
        await self._push_once([sampler, *lacking], snapshot_id)

    async def put_resident(self, sampler: Sampler, snapshot_id: str) -> None:
        """Puts full weights in place in one sampler; empty means the base."""
        await self._push_once([sampler], snapshot_id)
        sampler.adapters.clear()

    async def catch_up(self, sampler: Sampler, peers: Callable[[], list[Sampler]]) -> None:
        """Brings to a sampler, before it takes requests, what its peers are sampled with. Raises what a push raises."""
        done: str | None = None
        for _ in range(_ROUNDS):
            wanted = _most_common_resident(peers())
            if wanted in (None, done):
                return
            done = wanted
            async with sampler.weights_lock.hold(wanted):
                await self._bring_adapters(sampler, peers)

    def is_lost(self, snapshot_id: str) -> bool:
        """Whether a push has found that the trainer has lost the snapshot: only samplers still hold it."""
        return snapshot_id in self._lost

    async def _bring_adapters(self, sampler: Sampler, peers: Callable[[], list[Sampler]]) -> None:
        hopeless: set[str] = set()
        while True:
            held = {snapshot_id for peer in peers() for snapshot_id in peer.adapters} - sampler.adapters - hopeless
            # The longest unused first, so that it is also the first that the sampler evicts.
            snapshot_id = next((recent for recent in self._recent if recent in held), None)
            if snapshot_id is None:
                return
            try:
                await self.ensure_adapter(sampler, snapshot_id, [])
            except (ModelLost, NotFound) as error:
                logger.warning("sampler %s cannot be given %s: %s", sampler.address, snapshot_id, error)
                hopeless.add(snapshot_id)

    async def forget(self, model_ids: list[str], samplers: list[Sampler]) -> None:
        """Frees the unnamed snapshots of models that are over. What cannot be freed now goes with the next restart."""
        for snapshot_id in await self._database.read(lambda connection: ids_of_unnamed(connection, model_ids)):
            await self._drop(snapshot_id, samplers)

    @contextmanager
    def using(self, snapshot_id: str) -> Iterator[None]:
        """Keeps a snapshot from being freed while somebody samples from it or pushes it."""
        self._users[snapshot_id] += 1
        self._recent[snapshot_id] = None
        self._recent.move_to_end(snapshot_id)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        try:
            yield
        finally:
            self._users[snapshot_id] -= 1
            if not self._users[snapshot_id]:
                del self._users[snapshot_id]
                self._free_if_unused(snapshot_id)

    def retire(self, snapshot_id: str, samplers: Callable[[], list[Sampler]]) -> None:
        """Frees a snapshot that nobody can name any more, once those who use it have ended."""
        self._retired[snapshot_id] = samplers
        self._free_if_unused(snapshot_id)

    async def retire_unreachable(self, samplers: Callable[[], list[Sampler]]) -> None:
        """Frees what an earlier process, or a failed call, left behind."""
        for snapshot_id in await self._database.read(
            lambda connection: ids_of_unreachable(connection, self._base_model)
        ):
            if snapshot_id not in self._being_freed:
                self.retire(snapshot_id, samplers)

    async def close(self) -> None:
        """Stops freeing; what is left goes after the next start."""
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
                logger.info("snapshot %s is freed: nobody can name it any more", snapshot_id)
        finally:
            self._being_freed.discard(snapshot_id)

    async def _drop(self, snapshot_id: str, samplers: list[Sampler]) -> bool:
        self._known.pop(snapshot_id, None)
        self._recent.pop(snapshot_id, None)
        self._lost.discard(snapshot_id)
        holders = [sampler for sampler in samplers if snapshot_id in sampler.adapters]
        calls = [_drop_from(sampler, snapshot_id) for sampler in holders]
        if self._trainer is not None:
            calls.append(self._trainer.client.forget_snapshot(snapshot_id))
        try:
            await asyncio.gather(*calls)
        except FoveaError as error:
            logger.warning("snapshot %s could not be freed: %s", snapshot_id, error)
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
        logger.info("pushed %s to %d samplers in %.2f s", snapshot_id or "base", len(samplers) - len(errors), seconds)
        if samplers[0].address in errors:
            reason = errors[samplers[0].address]
            raise Unavailable(f"the push of {snapshot_id or 'the base weights'} to {samplers[0].address}: {reason}")

    async def _call(
        self, kept: KeptSnapshot | None, snapshot_id: str, addresses: list[str]
    ) -> trainer_pb2.PushSnapshotResponse:
        uri = kept.uri if kept else ""
        if self._trainer is None or self._residence is None:
            raise FailedPrecondition(
                f"base model {self._base_model!r} is served for sampling only: without a trainer nobody pushes weights"
            )
        if kept and not uri:
            await self._residence.check_snapshots(kept.identity.model_id)
        await self._trainer.require()
        try:
            return await self._trainer.client.push_snapshot(snapshot_id, addresses, uri, self._push_timeout_s)
        except NotFound:
            if kept and not uri:  # the trainer may have restarted a moment ago
                await self._trainer.look_again()
                await self._residence.check_snapshots(kept.identity.model_id)
            raise self._gone(snapshot_id, kept) from None
        except DeadlineExceeded as error:
            raise Unavailable(f"the push of {snapshot_id or 'the base weights'} took too long: {error}") from None

    def _gone(self, snapshot_id: str, kept: KeptSnapshot | None) -> FoveaError:
        self._lost.add(snapshot_id)
        is_full = kept is not None and kept.identity.kind == weights_pb2.SNAPSHOT_KIND_FULL
        return ModelLost(
            f"snapshot {snapshot_id} was saved without a name, and the trainer holds it "
            + (
                "no longer: those of full parameters are in its memory alone"
                if is_full
                else "neither in memory nor for recovery"
            )
            + ". It cannot be loaded again. Save weights with a name (save_weights_for_sampler) to keep them"
        )


async def _drop_from(sampler: Sampler, snapshot_id: str) -> None:
    sampler.adapters.discard(snapshot_id)  # at once: nobody is to sample it there any more
    try:
        await sampler.client.drop_snapshot(snapshot_id)
    except FoveaError:
        sampler.adapters.add(snapshot_id)  # it may hold it still: the next look for orphans asks again
        raise


def _most_common_resident(samplers: list[Sampler]) -> str | None:
    """The full weights that most samplers have in place; None if none is known."""
    places = Counter(sampler.weights_lock.resident for sampler in samplers if sampler.weights_lock.resident is not None)
    return places.most_common(1)[0][0] if places else None


class Versions:
    """The newest snapshot of each model that a sample has asked for."""

    def __init__(self) -> None:
        self._newest: LRUCache[str, int] = LRUCache(_KNOWN)

    def want(self, snapshot_id: str) -> None:
        """Notes that a sample asks for a snapshot; the base model has no versions."""
        version = version_of(snapshot_id)
        if version is None:
            return
        model_id, number = version
        self._newest[model_id] = max(number, self._newest.get(model_id, number))

    def lag(self, held: Iterable[str]) -> int:
        """Versions between the newest that was asked for and the newest of `held`, of the model where they are most.

        Models of which nothing is held do not count: nobody samples them there, or their adapters had to leave.
        """
        newest_held: dict[str, int] = {}
        for model_id, number in filter(None, map(version_of, held)):
            newest_held[model_id] = max(number, newest_held.get(model_id, number))
        return max((self._newest.get(model_id, at) - at for model_id, at in newest_held.items()), default=0)


def put_row(connection: sa.Connection, kept: KeptSnapshot) -> None:
    """Keeps a new snapshot."""
    row = {
        "snapshot_id": kept.identity.snapshot_id,
        "model_id": kept.identity.model_id,
        "identity": kept.identity.SerializeToString(),
        "uri": kept.uri,
        "trainer_instance": kept.trainer_instance,
        "created_at": kept.created_at,
    }
    insert_new(connection, snapshots, row)


def get_row(connection: sa.Connection, snapshot_id: str) -> KeptSnapshot | None:
    """A snapshot by id."""
    query = sa.select(snapshots).where(snapshots.c.snapshot_id == snapshot_id)
    row = (connection.execute(query)).mappings().first()
    return _to_snapshot(row) if row else None


def ids_of_unnamed(connection: sa.Connection, model_ids: list[str]) -> list[str]:
    """Ids of the snapshots of models that are in memory only."""
    where = snapshots.c.model_id.in_(model_ids) & (snapshots.c.uri == "")
    return [row.snapshot_id for row in connection.execute(sa.select(snapshots.c.snapshot_id).where(where))]


def ids_of_unreachable(connection: sa.Connection, base_model: str) -> list[str]:
    """Ids of a base model's snapshots that are in memory only and that no sampling session, open or over, names."""
    is_named = sa.exists().where(sampling_sessions.c.snapshot_id == snapshots.c.snapshot_id)
    joined = snapshots.join(models, models.c.model_id == snapshots.c.model_id)
    where = (models.c.base_model == base_model) & (snapshots.c.uri == "") & ~is_named
    query = sa.select(snapshots.c.snapshot_id).select_from(joined).where(where)
    return [row.snapshot_id for row in connection.execute(query)]


def delete_row(connection: sa.Connection, snapshot_id: str) -> None:
    connection.execute(sa.delete(snapshots).where(snapshots.c.snapshot_id == snapshot_id))


def _to_snapshot(row: Any) -> KeptSnapshot:
    identity = weights_pb2.Snapshot.FromString(row["identity"])
    return KeptSnapshot(identity, row["uri"], row["trainer_instance"], row["created_at"])


def id_of_snapshot(model: str, number: int) -> str:
    """Id of a model's n-th snapshot."""
    return f"{model}@{number}"


def version_of(snapshot: str) -> tuple[str, int] | None:
    """The model and the number of a snapshot that can be sampled; None for the base and for exports."""
    model, _, number = snapshot.partition("@")
    return (model, int(number)) if number.isdecimal() else None


def id_of_export(model: str, seq_id: int) -> str:
    """Id of the snapshot that the export command `seq_id` of a model writes; never sampled from."""
    return f"{model}@export-{seq_id}"
