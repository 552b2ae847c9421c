"""The registry of checkpoints: names, places, expiry, and what the SDK's REST client lists."""

import asyncio
import logging
import shutil
import time
import uuid
from pathlib import Path

from fovea.wire.errors import AlreadyExists, InvalidInput, NotFound
from gateway.identity import SAMPLER, TRAINING, Caller, CheckpointPath, check_name, parse_path
from gateway.store import checkpoints as rows
from gateway.store import models as model_rows
from gateway.store.checkpoints import Checkpoint
from gateway.store.database import Database
from gateway.store.models import Model

logger = logging.getLogger(__name__)

_LEAST_TTL_S = 3600
_MOST_TTL_S = 10 * 366 * 86400


def check_ttl(ttl_s: int, field: str = "ttl_seconds") -> float | None:
    """When something with this time to live expires; None for 0. Raises InvalidInput outside 1 hour .. 10 years."""
    if ttl_s == 0:
        return None
    if not _LEAST_TTL_S <= ttl_s <= _MOST_TTL_S:
        raise InvalidInput(f"{field} is {ttl_s}; it must be {_LEAST_TTL_S} .. {_MOST_TTL_S}", field=field)
    return time.time() + ttl_s


class Checkpoints:
    """Checkpoints by `tinker://` path.

    Args:
        root: Folder or fsspec URL below which the trainer writes.
    """

    def __init__(self, database: Database, root: str) -> None:
        self._database = database
        self._root = root

    async def plan(
        self, model: Model, segment: str, name: str, overwrite: bool
    ) -> tuple[Checkpoint, Checkpoint | None]:
        """A checkpoint to be written, in a folder that nothing else uses, and the one that it replaces.

        Raises InvalidInput for a bad name, AlreadyExists for a taken one.
        """
        path = str(CheckpointPath(model.model_id, segment, check_name(name, "path")))
        old = await self._database.read(lambda connection: rows.get(connection, path))
        if old is not None and not overwrite and not _is_expired(old):
            fix = "save with overwrite=True or take another name" if segment == TRAINING else "take another name"
            raise AlreadyExists(f"there is a checkpoint {path} already: {fix}", field="path")
        folder = f"{name}.{uuid.uuid4().hex[:8]}"
        uri = f"{self._root}/{model.model_id.replace(':', '_')}/{segment}/{folder}"
        return Checkpoint(path, model.model_id, model.owner, segment, name, uri, model.base_model, model.lora), old

    async def find(self, caller: Caller, path: str, field: str = "path") -> Checkpoint:
        """A checkpoint of the caller. Raises NotFound for an unknown, expired or somebody else's one."""
        parse_path(path, field)
        checkpoint = await self._database.read(lambda connection: rows.get(connection, path))
        if checkpoint is None or checkpoint.owner != caller.owner or _is_expired(checkpoint):
            raise NotFound(f"there is no checkpoint {path}", field=field)
        return checkpoint

    async def find_training(self, caller: Caller, path: str) -> Checkpoint:
        """A checkpoint that training can go on from. Raises NotFound, InvalidInput for weights saved for sampling."""
        checkpoint = await self.find(caller, path)
        if checkpoint.segment != TRAINING:
            raise InvalidInput(f"{path} was saved for sampling; load one that save_state made", field="path")
        return checkpoint

    async def find_sampler(self, caller: Caller, path: str) -> Checkpoint:
        """A checkpoint that can be sampled from. Raises NotFound, InvalidInput for a training checkpoint."""
        checkpoint = await self.find(caller, path, "model_path")
        if checkpoint.segment != SAMPLER:
            raise InvalidInput(
                f"{path} is a training checkpoint; sample from one that save_weights_for_sampler made",
                field="model_path",
            )
        return checkpoint

    async def of_run(self, caller: Caller, model_id: str) -> list[Checkpoint]:
        """A model's checkpoints, newest first. Raises NotFound for an unknown model."""
        model = await self._database.read(lambda connection: model_rows.get(connection, model_id))
        if model is None or model.owner != caller.owner:
            raise NotFound(f"there is no training run {model_id!r}", field="training_run_id")
        found = await self._database.read(lambda connection: rows.of_model(connection, model_id))
        return [checkpoint for checkpoint in found if not _is_expired(checkpoint)]

    async def page(self, caller: Caller, limit: int, offset: int) -> tuple[list[Checkpoint], int]:
        """A page of the caller's checkpoints, newest first, and how many there are."""
        return await self._database.read(lambda connection: rows.of_owner(connection, caller.owner, limit, offset))

    async def runs(self, caller: Caller, limit: int, offset: int) -> tuple[list[Model], int]:
        """A page of the caller's models, and how many there are."""
        return await self._database.read(
            lambda connection: model_rows.of_owner(connection, caller.owner, limit, offset)
        )

    async def delete(self, caller: Caller, path: str) -> None:
        """Forgets a checkpoint and removes its folder."""
        await self._drop(await self.find(caller, path))

    async def set_ttl(self, caller: Caller, path: str, ttl_s: int | None) -> None:
        """Sets when a checkpoint expires; None keeps it."""
        expires_at = None if ttl_s is None else check_ttl(ttl_s or -1)
        await self.find(caller, path)
        await self._database.write(lambda connection: rows.set_expiry(connection, path, expires_at))

    async def sweep(self) -> None:
        """Drops expired checkpoints."""
        now = time.time()
        for checkpoint in await self._database.read(lambda connection: rows.expired(connection, now)):
            await self._drop(checkpoint)

    async def remove_folder(self, uri: str) -> None:
        """Removes a folder that no checkpoint names any more, if it is local: object stores have lifecycle rules."""
        if "://" not in uri and Path(uri).is_relative_to(self._root):
            await asyncio.to_thread(shutil.rmtree, uri, ignore_errors=True)

    async def _drop(self, checkpoint: Checkpoint) -> None:
        await self._database.write(lambda connection: rows.delete(connection, checkpoint.path))
        await self.remove_folder(checkpoint.uri)
        logger.info("checkpoint %s is gone", checkpoint.path)


def _is_expired(checkpoint: Checkpoint) -> bool:
    return checkpoint.expires_at is not None and checkpoint.expires_at < time.time()
