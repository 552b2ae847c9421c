"""The registry of checkpoints: names, places, expiry, who may read them, and what the SDK's REST client lists."""

import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fovea.wire.errors import AlreadyExists, InvalidInput, NotFound
from gateway import identity
from gateway.checkpoints import checkpoint_rows as rows
from gateway.checkpoints.checkpoint_rows import Checkpoint
from gateway.checkpoints.checkpoint_storage import Storage
from gateway.database.database import Database
from gateway.identity import EXTERNAL, SAMPLER, TRAINING, Caller, CheckpointPath, check_name, parse_path
from gateway.training import model_rows
from gateway.training.model_rows import Model

logger = logging.getLogger(__name__)

_LEAST_TTL_S = 3600
_MOST_TTL_S = 10 * 366 * 86400
_REMEMBERED = 4096
_NOUNS = {
    TRAINING: "a training checkpoint",
    SAMPLER: "weights to sample from",
    EXTERNAL: "an export to be downloaded",
}


def check_ttl(ttl_s: int, field: str = "ttl_seconds") -> float | None:
    """When something with this time to live expires; None for 0. Raises InvalidInput outside 1 hour .. 10 years."""
    if ttl_s == 0:
        return None
    if not _LEAST_TTL_S <= ttl_s <= _MOST_TTL_S:
        raise InvalidInput(f"{field} is {ttl_s}; it must be {_LEAST_TTL_S} .. {_MOST_TTL_S}", field=field)
    return time.time() + ttl_s


def check_ttl_or_none(ttl_s: int | None) -> float | None:
    """The same for a client's own number, where None means forever and 0 is as wrong as any other short time."""
    return None if ttl_s is None else check_ttl(ttl_s or -1)


class Checkpoints:
    """Checkpoints by `tinker://` path. The owner may do everything, others may read what is published."""

    def __init__(self, database: Database, storage: Storage) -> None:
        self._database = database
        self.storage = storage
        self.being_written: set[str] = set()
        self._sampled: dict[str, Checkpoint] = {}

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
        uri = self.new_folder(model.model_id, segment, name)
        return Checkpoint(path, model.model_id, model.owner, segment, name, uri, model.base_model, model.lora), old

    def new_folder(self, model_id: str, segment: str, name: str) -> str:
        """A folder below the root that nothing uses."""
        return f"{self.storage.root}/{identity.folder_name(model_id)}/{segment}/{name}.{uuid.uuid4().hex[:8]}"

    @asynccontextmanager
    async def writing(self, *uris: str) -> AsyncIterator[None]:
        """Leaves no files of these folders behind if what writes them fails: a trainer that died cannot clean up."""
        self.being_written.update(uris)
        try:
            yield
        except BaseException:
            for uri in uris:
                await self.storage.remove(uri)
            raise
        finally:
            self.being_written.difference_update(uris)

    async def find(self, caller: Caller, path: str, field: str = "path") -> Checkpoint:
        """A checkpoint that the caller may read. Raises NotFound for an unknown, expired or somebody else's one."""
        parse_path(path, field)
        checkpoint = await self._database.read(lambda connection: rows.get(connection, path))
        if checkpoint is None or not _is_readable(checkpoint, caller):
            raise NotFound(f"there is no checkpoint {path}", field=field)
        return checkpoint

    async def find_own(self, caller: Caller, path: str, field: str = "path") -> Checkpoint:
        """A checkpoint of the caller. Raises NotFound as above, and for what others published."""
        checkpoint = await self.find(caller, path, field)
        if checkpoint.owner != caller.owner:
            raise NotFound(f"there is no checkpoint {path} of yours", field=field)
        return checkpoint

    async def find_training(self, caller: Caller, path: str) -> Checkpoint:
        """A checkpoint that training can go on from. Raises NotFound, InvalidInput for other kinds."""
        checkpoint = await self.find(caller, path)
        if checkpoint.segment != TRAINING:
            raise InvalidInput(f"{path} is {_NOUNS[checkpoint.segment]}; load one that save_state made", field="path")
        return checkpoint

    async def find_sampler(self, caller: Caller, path: str) -> Checkpoint:
        """A checkpoint that can be sampled from. Raises NotFound, InvalidInput for other kinds."""
        checkpoint = await self.find(caller, path, "model_path")
        if checkpoint.segment != SAMPLER:
            raise InvalidInput(
                f"{path} is {_NOUNS[checkpoint.segment]}; sample from one that save_weights_for_sampler made",
                field="model_path",
            )
        return checkpoint

    async def check_sampled(self, caller: Caller, path: str, snapshot_id: str) -> None:
        """Raises NotFound once the weights of an open sampling session have expired, been deleted or taken back."""
        checkpoint = self._sampled.get(path)
        if checkpoint is None or not _is_readable(checkpoint, caller):
            checkpoint = await self.find_sampler(caller, path)
            if len(self._sampled) >= _REMEMBERED:
                self._sampled.clear()
            self._sampled[path] = checkpoint
        if checkpoint.snapshot_id != snapshot_id:
            raise NotFound(f"{path} was saved anew; create a sampling client on it again", field="model_path")

    async def of_run(self, caller: Caller, model_id: str) -> list[Checkpoint]:
        """A model's checkpoints that the caller may read, newest first.

        Raises NotFound for an unknown model, and for somebody else's without any.
        """
        return (await self.run(caller, model_id, with_public=True))[1]

    async def run(self, caller: Caller, model_id: str, with_public: bool) -> tuple[Model, list[Checkpoint]]:
        """A training run and its checkpoints that the caller may read, newest first. Raises NotFound.

        Args:
            with_public: Whether somebody else's run is shown if one of its checkpoints is published.
        """
        model = await self._database.read(lambda connection: model_rows.get(connection, model_id))
        if model is not None and (with_public or model.owner == caller.owner):
            listed = await self._readable(caller, [model_id])
            if listed or model.owner == caller.owner:
                return model, listed
        raise NotFound(f"there is no training run {model_id!r}", field="training_run_id")

    async def runs(
        self, caller: Caller, limit: int, offset: int, with_public: bool
    ) -> tuple[list[tuple[Model, list[Checkpoint]]], int]:
        """A page of training runs with their checkpoints that the caller may read, and how many runs there are."""
        page, total = await self._database.read(
            lambda connection: model_rows.of_owner(connection, caller.owner, limit, offset, with_public)
        )
        of_model: dict[str, list[Checkpoint]] = {model.model_id: [] for model in page}
        for checkpoint in await self._readable(caller, list(of_model)):
            of_model[checkpoint.model_id].append(checkpoint)
        return [(model, of_model[model.model_id]) for model in page], total

    async def page(self, caller: Caller, limit: int, offset: int) -> tuple[list[Checkpoint], int]:
        """A page of the caller's checkpoints, newest first, and how many there are."""
        return await self._database.read(lambda connection: rows.of_owner(connection, caller.owner, limit, offset))

    async def delete(self, caller: Caller, path: str) -> None:
        """Forgets a checkpoint and removes its folder."""
        await self._drop(await self.find_own(caller, path))

    async def set_ttl(self, caller: Caller, path: str, ttl_s: int | None) -> None:
        """Sets when a checkpoint expires; None keeps it."""
        expires_at = check_ttl_or_none(ttl_s)
        await self.find_own(caller, path)
        await self._database.write(lambda connection: rows.set_expiry(connection, path, expires_at))
        self._sampled.pop(path, None)

    async def set_public(self, caller: Caller, path: str, public: bool) -> None:
        """Lets everybody read a checkpoint, or its owner alone; neither is an error twice."""
        await self.find_own(caller, path)
        await self._database.write(lambda connection: rows.set_public(connection, path, public))
        self._sampled.pop(path, None)

    async def sweep(self) -> None:
        """Drops expired checkpoints."""
        now = time.time()
        for checkpoint in await self._database.read(lambda connection: rows.expired(connection, now)):
            await self._drop(checkpoint)

    async def remove_folder(self, uri: str) -> None:
        """Removes a folder that no checkpoint names any more."""
        await self.storage.remove(uri)

    async def _readable(self, caller: Caller, model_ids: list[str]) -> list[Checkpoint]:
        listed = await self._database.read(lambda connection: rows.of_models(connection, model_ids))
        return [checkpoint for checkpoint in listed if _is_readable(checkpoint, caller)]

    async def _drop(self, checkpoint: Checkpoint) -> None:
        await self._database.write(lambda connection: rows.delete(connection, checkpoint))
        self._sampled.pop(checkpoint.path, None)
        await self.remove_folder(checkpoint.uri)
        logger.info("checkpoint %s is gone", checkpoint.path)


def _is_expired(checkpoint: Checkpoint) -> bool:
    return checkpoint.expires_at is not None and checkpoint.expires_at <= time.time()


def _is_readable(checkpoint: Checkpoint, caller: Caller) -> bool:
    return (checkpoint.public or checkpoint.owner == caller.owner) and not _is_expired(checkpoint)
