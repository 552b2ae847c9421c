"""Folders of checkpoints at a path or an fsspec URL, written whole or not at all, below the roots of this trainer."""

import logging
import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from fovea.runtime.durable import naming_full_disk, sync_folder, sync_place
from fovea.wire.conventions import REPLACED_SUFFIX, STAGING_SUFFIX
from fovea.wire.errors import InvalidInput, NotFound
from fovea_services.trainer.ranks.control_group import ControlGroup

logger = logging.getLogger(__name__)

Parts = Iterable[bytes | memoryview]
"""What a file holds, one after the other."""

Checksums = dict[str, int]
"""CRC-32 of files, by path within their folder."""

_READ_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Folder:
    """A folder in some file system.

    Args:
        files: The fsspec file system.
        path: Path within it, without protocol and trailing slash.
    """

    files: Any
    path: str

    @classmethod
    def at(cls, uri: str, field: str = "uri") -> "Folder":
        """The folder at a path or URL, which need not exist. Raises InvalidInput for an unknown protocol."""
        if not uri.strip():
            raise InvalidInput(f"{field} is empty: name a folder", field=field)
        try:
            files, path = fsspec.core.url_to_fs(uri)
        except (ValueError, ImportError) as error:
            raise InvalidInput(f"{field} {uri!r} cannot be opened: {error}", field=field) from None
        return cls(files, path.rstrip("/"))

    def url(self, *names: str) -> str:
        """fsspec URL of a file below."""
        return str(self.files.unstrip_protocol("/".join([self.path, *names])))

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """A file, or its bytes from `start` to `end`. Raises NotFound if there is none."""
        try:
            return bytes(self.files.cat_file(f"{self.path}/{name}", start=start or None, end=end))
        except FileNotFoundError:
            raise NotFound(f"{self.path} has no {name}: nothing was saved there", field="uri") from None

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return bool(self.files.exists(f"{self.path}/{name}"))

    def write(self, name: str, data: bytes | Parts) -> None:
        """Writes one file of a folder that `stage` made. Raises DiskFull if the disk is full."""
        with naming_full_disk(self.path.partition(STAGING_SUFFIX)[0]):
            if isinstance(data, bytes):
                self.files.pipe_file(f"{self.path}/{name}", data)
                return
            with self.files.open(f"{self.path}/{name}", "wb") as file:
                for part in data:
                    file.write(part)

    def checksum(self, name: str) -> int | None:
        """CRC-32 of a file; None if it cannot be read."""
        found = 0
        try:
            with self.files.open(f"{self.path}/{name}", "rb") as file:
                while part := file.read(_READ_BYTES):
                    found = zlib.crc32(part, found)
        except OSError as error:
            logger.warning("%s/%s cannot be read: %s", self.path, name, error)
            return None
        return found

    def sizes(self) -> dict[str, int]:
        """Bytes of each file below, by its path within the folder; nothing if there is no such folder."""
        self.files.invalidate_cache()  # others write here too
        found = self.files.find(self.path, detail=True)
        return {path.removeprefix(f"{self.path}/"): int(entry["size"]) for path, entry in found.items()}

    def size_bytes(self) -> int:
        """Size of all files below."""
        return sum(self.sizes().values())

    def make_private(self) -> None:
        """Creates the folder for this user alone if it lies on a local disk; an object store has rights of its own."""
        if isinstance(self.files, LocalFileSystem):
            try:
                os.makedirs(self.path, mode=0o700, exist_ok=True)
                os.chmod(self.path, 0o700)
            except OSError as error:  # whatever is written there says so again, and storage that fails only costs time
                logger.warning("%s cannot be made private: %s", self.path, error)

    def stage(self) -> "Folder":
        """Makes an empty folder beside this one, to be filled and then put in its place by `commit`.

        Raises NotFound for a bucket that does not exist, DiskFull if the disk is full.
        """
        staging = Folder(self.files, f"{self.path}{STAGING_SUFFIX}{uuid.uuid4().hex[:8]}")
        if not self.files.async_impl:
            with naming_full_disk(self.path):
                self.files.makedirs(staging.path, exist_ok=True)
        elif not self.files.exists(bucket := self.path.partition("/")[0]):  # `makedirs` would make one
            raise NotFound(f"there is no bucket {bucket}, or these credentials may not list it", field="uri")
        return staging

    def commit(self, staging: "Folder") -> None:
        """Puts a filled staging folder in the place of this one, replacing what is there. A power cut finds it whole.

        Where folders are only names, in object stores, its files come one by one: until then some cannot be found, but
        those of two staging folders are never mixed.
        """
        self.files.invalidate_cache()  # the gateway may have removed what was here
        with naming_full_disk(self.path):  # where files are given their blocks at last
            sync_folder(self.files, staging.path)
        old = Folder(self.files, f"{self.path}{REPLACED_SUFFIX}{uuid.uuid4().hex[:8]}")
        replaced = self.files.exists(self.path)
        if replaced:
            self._move_to(old)
        staging._move_to(self)
        sync_place(self.files, self.path)
        if replaced:
            old.discard()

    def _move_to(self, target: "Folder") -> None:
        if not self.files.async_impl:
            self.files.mv(self.path, target.path, recursive=True)
            return
        # Of object stores: `mv` would also copy the folder, which is no object (fsspec 2026.9).
        self.files.invalidate_cache()
        names = self.files.find(self.path)
        self.files.copy(names, [target.path + name.removeprefix(self.path) for name in names])
        self.files.rm(names)

    def discard(self) -> None:
        """Removes a staging folder that will not be committed."""
        if self.files.exists(self.path):
            self.files.rm(self.path, recursive=True)


Describe = Callable[[Folder, Checksums], None]
"""Writes what describes the files of a folder, given it with them in it, and their checksums."""


def write_folder(uri: str, files: Mapping[str, bytes | Parts], last: Describe | None = None) -> int:
    """Writes all files and puts them at `uri` at once; returns their size in bytes.

    Args:
        uri: Where.
        files: What each file holds, by name.
        last: Writes what describes them.
    """
    target = Folder.at(uri)
    staging = target.stage()
    sums: Checksums = {}
    try:
        for name, data in files.items():
            staging.write(name, data if last is None else _summed(name, data, sums))
        if last is not None:
            last(staging, sums)
        size_bytes = staging.size_bytes()
        target.commit(staging)
    except BaseException:
        staging.discard()
        raise
    return size_bytes


def _summed(name: str, data: bytes | Parts, sums: Checksums) -> Iterator[bytes | memoryview]:
    """What a file holds, whose checksum is noted as it passes."""
    sums[name] = 0
    for part in [data] if isinstance(data, bytes) else data:
        sums[name] = zlib.crc32(part, sums[name])
        yield part


class SummedFile:
    """A file that is written from its beginning to its end, and the CRC-32 of what it was given."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.checksum = 0

    def write(self, data: bytes | memoryview) -> int:
        """As the file does."""
        self.checksum = zlib.crc32(data, self.checksum)
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def stage_together(control: ControlGroup, uri: str) -> tuple[Folder, Folder]:
    """The folder at `uri` and a new staging folder beside it, the same on all ranks. Raises as `Folder.stage` does."""
    target = control.agree(lambda: Folder.at(uri))
    suffix = control.on_rank_0(lambda: target.stage().path.removeprefix(target.path))
    return target, Folder(target.files, target.path + suffix)


class CheckpointRoots:
    """The folders and fsspec URLs below which everything must lie.

    Raises InvalidInput for a root of an unknown protocol.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self._said = ", ".join(roots)
        self._protocols = {_protocol(root) for root in roots}
        self._roots = [_real(Folder.at(root, "checkpoints")) for root in roots]

    def check(self, uri: str) -> None:
        """Raises InvalidInput unless `uri` lies below a root, whatever its symbolic links lead to.

        Nothing of another protocol is opened to find out.
        """
        protocol = _protocol(uri)
        if protocol not in self._protocols:
            raise self._refusal(f"uri {uri!r} is of {protocol}")
        if ".." in uri.split("/"):
            raise self._refusal(f"uri {uri!r} has .. in it")
        found = _real(Folder.at(uri))
        if not any(_is_below(found, root) for root in self._roots):
            raise self._refusal(f"uri {uri!r} does not lie there")

    def _refusal(self, what: str) -> InvalidInput:
        return InvalidInput(
            f"{what}: this trainer reads and writes below {self._said} alone (--checkpoints)", field="uri"
        )


def _protocol(uri: str) -> str:
    """Its canonical name; of a chained URL, such as filecache::s3://b, all of them, which no root has."""
    if "::" in uri:
        return uri.rpartition("://")[0] or uri
    name = fsspec.core.split_protocol(uri)[0] or "file"
    return {"local": "file", "s3a": "s3", "gs": "gcs"}.get(name, name)


def _real(folder: Folder) -> Folder:
    """The folder without symbolic links, where there are such."""
    if isinstance(folder.files, LocalFileSystem):
        return Folder(folder.files, os.path.realpath(folder.path).rstrip("/"))
    return folder


def _is_below(found: Folder, root: Folder) -> bool:
    same: Any = found.files == root.files  # the same server too, with the same credentials
    return bool(same) and found.path.startswith(f"{root.path}/" if root.path else "") and found.path != root.path
