"""A checkpoint: stored weights that a `tinker://` path names, and the storage of its files.

The storage lists, streams, copies and removes folders at a path or an fsspec URL. The trainer writes them.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import fsspec

from fovea.api.v1 import weights_pb2
from fovea.runtime.durable import SteadyFile, naming_full_disk, sync_folder
from fovea.wire.conventions import PIECE_BYTES, REPLACED_SUFFIX, STAGING_SUFFIX
from fovea.wire.errors import Internal, InvalidInput, NotFound

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_THREADS = 8

SCHEME = "tinker://"
TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
_SEGMENTS = (TRAINING, SAMPLER, EXTERNAL)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-+=@]{0,199}")


@dataclass(eq=False)
class Checkpoint:
    """Stored weights under a name.

    `snapshot_id` is set for weights to sample from. Every caller can read a `public` checkpoint.
    """

    path: str
    model_id: str
    owner: str
    segment: str
    name: str
    uri: str
    base_model: str
    lora: weights_pb2.LoraConfig
    snapshot_id: str = ""
    step: int = 0
    size_bytes: int = 0
    user_metadata: dict[str, str] = field(default_factory=dict)
    created_at: float = field(default_factory=time.time)
    expires_at: float | None = None
    public: bool = False


class CheckpointPath(NamedTuple):
    """The components of a `tinker://` path."""

    model_id: str
    segment: str
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.segment}/{self.name}"


def folder_name(model: str) -> str:
    """Returns the name of the folder that holds a model's checkpoints."""
    return model.replace(":", "_")


def check_name(name: str, field: str) -> str:
    """Returns a checkpoint's name. Raises InvalidInput if the name could not be the name of a folder."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{field} {name[:_SHOWN]!r} is not a name: use 1 to 200 letters, digits or _ . - + = @, not starting "
            "with a dot",
            field=field,
        )
    return name


_SHOWN = 300
"""Characters of a wrong path that an error message repeats."""


def parse_path(path: str, field: str) -> CheckpointPath:
    """Splits a `tinker://` path. Raises InvalidInput if it is not one."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in _SEGMENTS or not all(parts):
        raise InvalidInput(
            f"{field} {path[:_SHOWN]!r} is not a checkpoint: expected {SCHEME}<run id>/weights/<name>, "
            f"{SCHEME}<run id>/sampler_weights/<name> or {SCHEME}<run id>/external_weights/<name>",
            field=field,
        )
    return CheckpointPath(*parts)


class _Place(NamedTuple):
    """A path within a file system."""

    files: Any
    path: str


class Storage:
    """The gateway's operations on stored folders. They run in their own threads, because remote storage responds
    slowly.

    Args:
        root: Folder or fsspec URL below which all checkpoints are stored; the trainer must see the same storage.
    """

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._threads = ThreadPoolExecutor(_THREADS, "storage")

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Runs a function in one of the threads. Raises DiskFull if the function finds the disk full."""
        with naming_full_disk(self.root):
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def problem(self) -> str:
        """Returns why files cannot be stored below the root; empty if a file can be written and removed there."""
        place = _place(f"{self.root}/probe-{uuid.uuid4().hex[:8]}")
        try:
            await self.run(_probe, place)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    async def sizes(self, uri: str) -> dict[str, int]:
        """Returns the sizes in bytes of a folder's files, keyed by path relative to it; empty if there is no folder."""
        return await self.run(_sizes, uri)

    async def entries(self, uri: str) -> list[str]:
        """Returns the names of the files and folders directly below a folder; empty if there is no folder."""
        return await self.run(_entries, uri)

    async def stream(self, uri: str, name: str, start: int, length: int) -> AsyncIterator[bytes]:
        """Returns `length` bytes of a file from `start` on, in chunks. The file is open once this returns. Raises
        NotFound.
        """
        place = _place(uri)
        try:
            file = await self.run(place.files.open, f"{place.path}/{name}", "rb")
        except FileNotFoundError:
            raise NotFound(f"{name} is gone") from None
        return self._pieces(file, name, start, length)

    async def _pieces(self, file: Any, name: str, start: int, length: int) -> AsyncIterator[bytes]:
        try:
            await self.run(file.seek, start)
            while length > 0:
                piece = await self.run(file.read, min(length, PIECE_BYTES))
                if not piece:
                    raise Internal(f"{name} ends {length} bytes early")
                length -= len(piece)
                yield piece
        finally:
            file.close()

    async def copy(self, source: str, target: str) -> int:
        """Copies a folder within the storage; returns its size in bytes. Raises NotFound if it has no files."""
        try:
            return await self.run(_copy, source, target)
        except BaseException:
            await self.remove(target)
            raise

    async def read(self, uri: str, name: str) -> bytes:
        """Returns the content of a small file."""
        place = _place(uri)
        return bytes(await self.run(place.files.cat_file, f"{place.path}/{name}"))

    async def write(self, uri: str, name: str, data: bytes) -> None:
        """Replaces a small file."""
        place = _place(uri)
        await self.run(place.files.pipe_file, f"{place.path}/{name}", data)

    async def make_folder(self, uri: str) -> None:
        """Creates a folder, if the storage has folders."""
        await self.run(_make_folder, _place(uri))

    @asynccontextmanager
    async def receiving(self, uri: str, name: str) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
        """Creates a file and yields a function that appends bytes to it. Removes the file if the block fails. Raises
        DiskFull.
        """
        place = _place(uri)
        path = f"{place.path}/{name}"
        file = SteadyFile(await self.run(place.files.open, path, "wb"))

        async def write(piece: bytes) -> None:
            await self.run(file.write, piece)

        try:
            yield write
            await self.run(file.close)
        except BaseException:
            await self.run(_give_up, place.files, file, path)
            raise

    async def rename(self, uri: str, name: str, new_name: str) -> None:
        """Renames a file within its folder, replacing any file with the new name."""
        place = _place(uri)
        await self.run(_move, place.files, f"{place.path}/{name}", f"{place.path}/{new_name}")

    async def rewrite(
        self, source: str, name: str, target: str, new_name: str, rewrite: Callable[[Any, Any], None]
    ) -> None:
        """Creates a file from a file of another folder. `rewrite` receives both, open for reading and writing bytes."""
        await self.run(_rewrite, _place(source), name, _place(target), new_name, rewrite)

    async def sync(self, uri: str) -> None:
        """Flushes a folder to disk. Call this before committing a row that names the folder."""
        place = _place(uri)
        await self.run(sync_folder, place.files, place.path)

    async def remove_file(self, uri: str, name: str) -> None:
        place = _place(uri)
        await self.run(place.files.rm_file, f"{place.path}/{name}")

    async def remove(self, uri: str) -> None:
        """Removes a folder below the root that no row names any more, and unfinished or replaced copies beside it.

        A failure is only logged, because no caller can act on it.
        """
        if not uri.startswith(f"{self.root}/") or ".." in uri.split("/"):
            logger.warning("%s is not below %s, so it is not removed", uri, self.root)
            return
        try:
            await self.run(_remove, uri)
        except Exception:
            logger.exception("%s could not be removed", uri)


def _move(files: Any, source: str, target: str) -> None:
    # Object stores first consult a cached listing, which another task may have cached before the file was written.
    files.invalidate_cache()
    files.mv(source, target)


def _place(uri: str) -> _Place:
    files, path = fsspec.core.url_to_fs(uri)
    return _Place(files, path.rstrip("/"))


def _probe(place: _Place) -> None:
    _make_folder(_Place(place.files, place.path.rpartition("/")[0]))
    place.files.pipe_file(place.path, b"")
    place.files.rm_file(place.path)


def _make_folder(place: _Place) -> None:
    if not place.files.async_impl:  # an object store has no folders and would create a bucket
        place.files.makedirs(place.path, exist_ok=True)


def _give_up(files: Any, file: Any, path: str) -> None:
    try:
        file.close()
    except OSError as error:
        logger.info("%s was not written: %s", path, error)
    if files.exists(path):
        files.rm_file(path)


def _entries(uri: str) -> list[str]:
    files, path = _place(uri)
    files.invalidate_cache()
    try:
        listed = files.ls(path, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name.rstrip("/").rpartition("/")[2] for name in listed]


def _sizes(uri: str) -> dict[str, int]:
    files, path = _place(uri)
    # The trainer is another process, so an earlier listing may be stale.
    files.invalidate_cache()
    return {
        name.removeprefix(path).lstrip("/"): int(entry["size"])
        for name, entry in sorted(files.find(path, detail=True).items())
    }


def _copy(source: str, target: str) -> int:
    sizes = _sizes(source)
    if not sizes:
        raise NotFound(f"{source} no longer exists")
    (files, old), (_, new) = _place(source), _place(target)
    for name in sizes:
        files.makedirs(f"{new}/{name}".rpartition("/")[0], exist_ok=True)
        files.cp_file(f"{old}/{name}", f"{new}/{name}")
    return sum(sizes.values())


def _remove(uri: str) -> None:
    files, path = _place(uri)
    files.invalidate_cache()
    parent, _, own = path.rpartition("/")
    try:
        beside = files.ls(parent, detail=False)
    except FileNotFoundError:
        return
    for found in beside:
        name = found.rstrip("/").rpartition("/")[2]
        if name == own or name.startswith((own + STAGING_SUFFIX, own + REPLACED_SUFFIX)):
            files.rm(found, recursive=True)


def _rewrite(source: _Place, name: str, target: _Place, new_name: str, rewrite: Callable[[Any, Any], None]) -> None:
    path = f"{target.path}/{new_name}"
    target.files.makedirs(path.rpartition("/")[0], exist_ok=True)
    with source.files.open(f"{source.path}/{name}", "rb") as reader, target.files.open(path, "wb") as writer:
        rewrite(reader, writer)
