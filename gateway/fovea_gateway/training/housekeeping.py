"""Regular work: frees orphans, limits unnamed snapshots, and parks the sessions of silent clients.

Orphans are models in the trainer, adapters in samplers and folders in storage that a killed gateway left behind. The
collector frees only what belongs to models in this gateway's own rows, because another gateway may use the same trainer
machine, samplers or storage.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import sqlalchemy as sa

from fovea.api.v1 import weights_pb2
from fovea.runtime.durable import ExpiryClock
from fovea.wire.conventions import PLAIN_SUFFIX, REPLACED_SUFFIX, STAGING_SUFFIX
from fovea.wire.errors import FoveaError
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.checkpoints.checkpoint import folder_name
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints, named_uris
from fovea_gateway.checkpoints.uploads import Uploads
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import models, snapshots
from fovea_gateway.replicas.base_models import BaseModel, BaseModels
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.replicas.samplers import version_of
from fovea_gateway.replicas.snapshot_pushes import ids_of_stored
from fovea_gateway.sessions.futures import Futures
from fovea_gateway.sessions.sessions import Session, Sessions
from fovea_gateway.training.models import (
    IS_LIVING,
    Models,
    ModelState,
    all_ids,
    ids_of_ended_sessions,
    ids_of_over,
    known_ids,
)
from fovea_gateway.training.trainer_pool import TrainerPool
from fovea_gateway.training.training import Training

logger = logging.getLogger(__name__)


class OrphanCollector:
    """The collector of orphans. Its methods may be called at any time; they never touch unfinished objects."""

    def __init__(
        self,
        database: Database,
        base_models: BaseModels,
        checkpoints: Checkpoints,
        uploads: Uploads,
    ) -> None:
        self._database = database
        self._base_models = base_models
        self._checkpoints = checkpoints
        self._uploads = uploads
        self._suspects: set[str] = set()
        self._foreign: set[str] = set()

    async def misplaced(self) -> list[str]:
        """Returns the folders of checkpoints that do not lie below the root, because the state folder was moved."""
        root = f"{self._checkpoints.storage.root}/"
        return [uri for uri in await self._database.read(named_uris) if uri and not uri.startswith(root)]

    async def free_models(self, trainer: TrainerLink) -> None:
        """Makes a trainer free ended models and their files. Raises FoveaError if the trainer does not answer.

        Files of models without a row remain, since their database may be restored. A warning reports them once.
        """
        info = await trainer.client.info(with_kept=True)
        held = [*info.model_ids, *info.kept_model_ids]
        foreign = set(info.kept_model_ids) - set(await self._database.read_whole(lambda c: known_ids(c, held)))
        if foreign - self._foreign:
            logger.warning(
                "the trainer keeps recovery files of %d models that this gateway does not know, such as %s: they "
                "belong to another gateway or to a lost database. In the second case, remove them by hand",
                len(foreign),
                min(foreign),
            )
        self._foreign = foreign
        for model_id in await self._database.read(lambda connection: ids_of_over(connection, held)):
            logger.warning("freeing model %s, which has ended but was still in the trainer", model_id)
            await trainer.client.delete_model(model_id)

    async def free_adapters(self, base: BaseModel) -> None:
        """Makes samplers and trainer of a base model free the snapshots of ended sessions that have no files.

        Some have no row either: a gateway that has lost its database pushes what it can no longer record.
        """
        of_model: dict[str, set[str]] = {}
        for sampler in base.samplers.up:
            for snapshot_id in sampler.adapters:
                if version := version_of(snapshot_id):
                    of_model.setdefault(version[0], set()).add(snapshot_id)
        found = list(of_model)
        over = await self._database.read(lambda connection: ids_of_ended_sessions(connection, found))
        stored = await self._database.read(lambda connection: ids_of_stored(connection, over))
        if orphans := {snapshot_id for model_id in over for snapshot_id in of_model[model_id]}.difference(stored):
            logger.warning("freeing %d snapshots of ended sessions that samplers still held", len(orphans))
            await base.snapshots.drop(orphans, base.samplers.up)

    async def remove_folders(self) -> None:
        """Removes folders of this gateway's models that no checkpoint names, if two successive calls have found them.

        Calls should be minutes apart: the trainer may still be writing a folder for a killed gateway, and the row of a
        checkpoint is committed after its files exist.
        """
        found = set()
        models = set(await self._database.read(all_ids))
        ours = {folder_name(model_id) for model_id in models}
        storage = self._checkpoints.storage
        for model in ours & set(await storage.entries(storage.root)):
            for segment in await storage.entries(f"{storage.root}/{model}"):
                names = await storage.entries(f"{storage.root}/{model}/{segment}")
                found |= {f"{storage.root}/{model}/{segment}/{name}" for name in names}
        # Read the rows after the listing: a checkpoint that got its row in between is not an orphan.
        held = self._checkpoints.being_written | set(await self._database.read(named_uris))
        orphans = {uri for uri in found if _folder(uri) not in held}
        for uri in orphans & self._suspects:
            logger.warning("removing %s, which belongs to no checkpoint", uri)
            await storage.remove(uri)
        self._suspects = orphans

    async def sweep(self, with_folders: bool) -> None:
        """Frees all kinds of orphans. If a service cannot be reached, the next call tries again."""
        for base in self._base_models:
            try:
                for trainer in base.trainers.up:
                    await self.free_models(trainer)
                await self.free_adapters(base)
            except FoveaError as error:
                logger.warning("could not free orphans in the trainer or the samplers of %s: %s", base.name, error)
        if with_folders:
            await self.remove_folders()
            if self._database.shards.number == 0:  # the others receive no uploads
                await self._uploads.remove_expired()


def _folder(uri: str) -> str:
    """Returns the URI of a folder without the suffix for staging, replacement or plain text."""
    return uri.split(STAGING_SUFFIX)[0].split(REPLACED_SUFFIX)[0].removesuffix(PLAIN_SUFFIX)


class UnnamedAdapter(NamedTuple):
    """An adapter snapshot without a name, which the trainer stores with its recovery data."""

    snapshot_id: str
    model_id: str
    owner: str
    size_bytes: int
    created_at: float


def unnamed_adapters(connection: sa.Connection, base_model: str) -> list[UnnamedAdapter]:
    """Returns the unnamed adapter snapshots of a base model's living models, the oldest first."""
    joined = snapshots.join(models, models.c.model_id == snapshots.c.model_id)
    where = (models.c.base_model == base_model) & IS_LIVING & (snapshots.c.uri == "")
    query = sa.select(models.c.owner, snapshots.c.identity, snapshots.c.created_at).select_from(joined)
    rows = connection.execute(query.where(where).order_by(snapshots.c.created_at))
    found = [(row, weights_pb2.Snapshot.FromString(row.identity)) for row in rows]
    return [
        UnnamedAdapter(identity.snapshot_id, identity.model_id, row.owner, identity.size_bytes, row.created_at)
        for row, identity in found
        if identity.kind == weights_pb2.SNAPSHOT_KIND_ADAPTER
    ]


class UnnamedLimit:
    """The limit for the storage of unnamed adapter snapshots, which the trainer stores until their model ends.

    Args:
        most_bytes: The limit for all snapshots together. Above it, owners with more than their share of it lose those
            that were not used for the longest time. The newest one of each model stays.
        weight_of: Returns an owner's weight, greater than 0.
        unused_s: Seconds without use after which a snapshot may be deleted.
    """

    def __init__(
        self,
        database: Database,
        base_models: BaseModels,
        most_bytes: int,
        weight_of: Callable[[str], float],
        unused_s: float = 60.0,
    ) -> None:
        self._database, self._base_models = database, base_models
        self._most_bytes, self._weight_of, self.unused_s = most_bytes, weight_of, unused_s
        self._since = time.time()

    async def sweep(self) -> None:
        """Frees snapshots above the limit. A snapshot in use stays."""
        held: Counter[str] = Counter()
        spare: list[tuple[float, UnnamedAdapter, BaseModel]] = []
        latest = time.time() - self.unused_s
        for base in self._base_models:
            found = await self._database.read(partial(unnamed_adapters, base_model=base.name))
            newest = {each.model_id: each.snapshot_id for each in found}
            for each in found:
                held[each.owner] += each.size_bytes
                # An earlier process does not say when it was used last.
                used_at = max(each.created_at, self._since, base.snapshots.used_at(each.snapshot_id))
                if newest[each.model_id] != each.snapshot_id and used_at <= latest:
                    spare.append((used_at, each, base))
        metrics.UNNAMED_BYTES.set(held.total())
        share = self._most_bytes / (sum(map(self._weight_of, held)) or 1.0)
        freed = 0
        for _, each, base in sorted(spare, key=lambda one: (one[0], one[1].created_at)):
            if held.total() > self._most_bytes and held[each.owner] > share * self._weight_of(each.owner):
                base.snapshots.retire(each.snapshot_id, base.up_samplers)
                held[each.owner] -= each.size_bytes
                freed += 1
        if freed:
            logger.info("freeing %d unnamed snapshots: unnamed_bytes is %d", freed, self._most_bytes)


_LATE_S = 15.0
_QUIET_S = 30.0
"""Seconds without a heartbeat. The SDK sends one every ten seconds; a quiet client may be gone, so its models make
room.
"""
_LOOK_S = 0.5


class Suspension:
    """The parking of silent clients' sessions. It frees the trainer for others, as long as the trainer's storage has
    room.

    If the trainer cannot store models, the sessions end instead.

    Args:
        ttl_s: Seconds after which a parked session ends.
        most_bytes: The limit for all parked models together. Above it, the owner with the most bytes in relation to its
            weight loses its oldest parked sessions.
        weight_of: Returns an owner's weight, greater than 0.
    """

    def __init__(
        self,
        futures: Futures,
        sessions: Sessions,
        models: Models,
        training: Training,
        pools: Mapping[str, TrainerPool],
        base_models: BaseModels,
        ttl_s: float,
        most_bytes: int,
        weight_of: Callable[[str], float],
        clock: ExpiryClock,
    ) -> None:
        self._futures, self._sessions, self._models, self._training = futures, sessions, models, training
        self._pools, self._base_models = pools, base_models
        self._ttl_s, self._most_bytes, self._weight_of, self._clock = ttl_s, most_bytes, weight_of, clock
        self._making_room: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._made_room: Counter[str] = Counter()

    async def sweep(self) -> None:
        """Parks or ends silent sessions, then ends those that were parked for too long or use too much storage."""
        infos = [trainer.info for trainer in self._base_models.trainers]
        for session in self._sessions.silent():
            if None in infos:
                continue  # It is not known yet whether all trainers can store models.
            if infos and not any(info.keeps_recovery for info in infos if info is not None):
                await self._sessions.expire(session)
            elif not self._is_busy(session):
                await self._park(session)
        await self._bound()

    async def make_room(self, base_model: str) -> bool:
        """Parks models of clients that seem to be gone, earlier than usual, because a new model needs the room.

        Waits for clients with a late heartbeat until they return or are quiet. If several creations need room at once,
        one of them makes it for all. Returns whether models have left the trainer since the call.
        """
        before = self._made_room[base_model]
        async with self._making_room[base_model]:
            if self._made_room[base_model] == before:
                self._made_room[base_model] += await self._park_quiet(base_model)
            return self._made_room[base_model] > before

    async def _park_quiet(self, base_model: str) -> int:
        """Waits for quiet sessions and parks them; returns how many it has parked."""
        while True:
            holders = [session for session in self._holders(base_model) if self._sessions.is_silent(session, _LATE_S)]
            quiet = [session for session in holders if self._sessions.is_silent(session, _QUIET_S)]
            for session in quiet:
                await self._park(session, _QUIET_S)
            if quiet or not holders:
                return sum(1 for session in quiet if session.parked_at is not None)
            await asyncio.sleep(_LOOK_S)

    def _holders(self, base_model: str) -> list[Session]:
        """Returns the idle sessions with models in the trainer, provided that the trainer can store all of their
        models.
        """
        held = [model for model in self._models.ready(base_model) if model.trainer_instance]
        fixed = {model.session_id for model in held if model.journaled_since is None}
        found = {model.session_id: self._sessions.cached(model.session_id) for model in held}
        return [session for session in found.values() if session.session_id not in fixed and not self._is_busy(session)]

    async def _park(self, session: Session, after_s: float | None = None) -> None:
        size_bytes = 0
        for model_id in await self._models.of_session(session.session_id):
            model = self._models.find(model_id)
            if model is None or model.state is not ModelState.READY or not model.trainer_instance:
                continue
            if model.base_model not in self._pools:  # It is no longer trained here, so no trainer can park it.
                continue
            if model.journaled_since is None:  # Its trainer kept no recovery, so nothing can be parked.
                await self._sessions.expire(session)
                return
            try:
                size_bytes += await self._pools[model.base_model].park(model)
            except FoveaError as error:
                logger.warning("could not park session %s yet: %s", session.session_id, error)
                return
        if self._sessions.is_silent(session, after_s) and not self._is_busy(session):
            self._training.forget_idle(session.session_id)
            await self._sessions.park(session, size_bytes)

    def _is_busy(self, session: Session) -> bool:
        return any(pending.submission.session_id == session.session_id for pending in self._futures.unfinished())

    async def _bound(self) -> None:
        parked, now = await self._sessions.parked(), self._clock.now()
        held: Counter[str] = Counter()
        for session in parked:
            held[session.owner] += session.parked_bytes
        metrics.PARKED.set(len(parked))
        metrics.PARKED_BYTES.set(held.total())
        for session in [each for each in parked if now - (each.parked_at or now) > self._ttl_s]:
            await self._sessions.expire(session, f"parked for more than parked_ttl_s, {self._ttl_s:.0f} s")
            held[session.owner] -= session.parked_bytes
            parked.remove(session)
        while held.total() > self._most_bytes:
            owner = max(held, key=lambda name: held[name] / self._weight_of(name))
            oldest = next(session for session in parked if session.owner == owner and session.parked_bytes)
            await self._sessions.expire(
                oldest,
                f"all parked sessions used {held.total()} bytes; parked_bytes is {self._most_bytes}. This owner's "
                "sessions used the largest share, so its oldest one ended",
            )
            held[owner] -= oldest.parked_bytes
            parked.remove(oldest)
