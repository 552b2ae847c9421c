"""Frees orphans: models in the trainer, adapters in samplers and folders in storage that a killed gateway left behind.

An orphan is named by no row. The collector frees only what belongs to models in this gateway's own rows, because
another gateway may use the same trainer machine, samplers or storage.
"""

import logging

from fovea.wire.conventions import PLAIN_SUFFIX, REPLACED_SUFFIX, STAGING_SUFFIX
from fovea.wire.errors import FoveaError
from fovea_gateway.checkpoints.checkpoint import folder_name
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints, named_uris
from fovea_gateway.checkpoints.uploads import Uploads
from fovea_gateway.database.database import Database
from fovea_gateway.replicas.base_models import BaseModel, BaseModels
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.replicas.snapshot_pushes import ids_of_unnamed, version_of
from fovea_gateway.training.models import all_ids, ids_of_ended_sessions, ids_of_over, known_ids

logger = logging.getLogger(__name__)


class OrphanCollector:
    """Finds and frees orphans. Its methods may be called at any time; they never touch an object under construction."""

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

    async def free_models(self, trainer: TrainerLink) -> None:
        """Makes a trainer free ended models and their files. Raises FoveaError if the trainer does not answer.

        Files of models without a row remain, since their database may be restored. A warning reports them once.
        """
        info = await trainer.client.info(with_kept=True)
        held = [*info.model_ids, *info.kept_model_ids]
        foreign = set(info.kept_model_ids) - set(await self._database.read(lambda c: known_ids(c, held)))
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
        """Makes samplers and trainer of a base model free the unnamed snapshots of ended sessions."""
        of_model: dict[str, set[str]] = {}
        for sampler in base.samplers.up:
            for snapshot_id in sampler.adapters:
                if version := version_of(snapshot_id):
                    of_model.setdefault(version[0], set()).add(snapshot_id)
        found = list(of_model)
        over = await self._database.read(lambda connection: ids_of_ended_sessions(connection, found))
        unnamed = await self._database.read(lambda connection: ids_of_unnamed(connection, over))
        if unnamed := [
            snapshot_id for snapshot_id in unnamed if snapshot_id in of_model[snapshot_id.partition("@")[0]]
        ]:
            logger.warning("freeing %d snapshots of ended sessions that samplers still held", len(unnamed))
            await base.snapshots.forget(over, base.samplers.up)

    async def remove_folders(self) -> None:
        """Removes folders of our models that no checkpoint names, if two successive calls have found them.

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
        """Frees all kinds of orphans. The next call retries what could not be reached."""
        for base in self._base_models:
            try:
                if base.trainer is not None and base.trainer.up:
                    await self.free_models(base.trainer)
                await self.free_adapters(base)
            except FoveaError as error:
                logger.warning("could not free orphans in the trainer or the samplers of %s: %s", base.name, error)
        if with_folders:
            await self.remove_folders()
            await self._uploads.remove_expired()


def _folder(uri: str) -> str:
    """Returns the final name of a folder that carries a suffix for staging, replacement or plain text."""
    return uri.split(STAGING_SUFFIX)[0].split(REPLACED_SUFFIX)[0].removesuffix(PLAIN_SUFFIX)
