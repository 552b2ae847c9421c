"""Checkpoint folders at local paths or fsspec URLs, written atomically and only below the configured roots."""

import logging
import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from fovea.runtime.durable import PIECE_BYTES, SteadyFile, naming_full_disk, sync_folder, sync_place
from fovea.wire.conventions import REPLACED_SUFFIX, STAGING_SUFFIX
from fovea.wire.errors import InvalidInput, NotFound
from fovea_trainer.ranks.control_group import ControlGroup

logger = logging.getLogger(__name__)

Chunks = Iterable[bytes | memoryview]
"""The content of a file as consecutive chunks."""

Checksums = dict[str, int]
"""CRC-32 of each file, keyed by the path of the file within its folder."""

_READ_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Folder:
    """A folder in a file system.

    Args:
        files: The fsspec file system.
        path: Path within that file system, without protocol or trailing slash.
    """

    files: Any
    path: str

    @classmethod
    def at(cls, uri: str, field: str = "uri") -> "Folder":
        """Returns the folder at a path or URL. The folder need not exist.

        Args:
            uri: Path or fsspec URL.
            field: Name of the request field that an error reports.

        Raises:
            InvalidInput: `uri` is empty or has an unknown protocol.
        """
        if not uri.strip():
            raise InvalidInput(f"{field} is empty: give the path or URL of a folder", field=field)
        try:
            files, path = fsspec.core.url_to_fs(uri)
        except (ValueError, ImportError) as error:
            raise InvalidInput(f"{field} {uri!r} cannot be opened: {error}", field=field) from None
        return cls(files, path.rstrip("/"))

    @property
    def is_local(self) -> bool:
        """True if the folder is on a local disk."""
        return isinstance(self.files, LocalFileSystem)

    def url(self, *names: str) -> str:
        """Returns the fsspec URL of a file or folder below this one."""
        return str(self.files.unstrip_protocol("/".join([self.path, *names])))

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Returns the content of a file, or only its bytes [`start`, `end`).

        Raises:
            NotFound: There is no such file.
        """
        try:
            return bytes(self.files.cat_file(f"{self.path}/{name}", start=start or None, end=end))
        except FileNotFoundError:
            raise NotFound(f"{self.path} has no {name}: nothing was saved there", field="uri") from None

    def exists(self, name: str) -> bool:
        """Returns True if the file exists."""
        return bool(self.files.exists(f"{self.path}/{name}"))

    def write(self, name: str, data: bytes | Chunks, is_summed: bool = False) -> int:
        """Writes one file of a folder that `stage` created. Returns its CRC-32 if `is_summed`, else 0.

        Raises:
            DiskFull: The disk is full.
        """
        with naming_full_disk(self.path.partition(STAGING_SUFFIX)[0]):
            if isinstance(data, bytes) and len(data) < PIECE_BYTES:
                self.files.pipe_file(f"{self.path}/{name}", data)
                return zlib.crc32(data) if is_summed else 0
            with SteadyFile(self.files.open(f"{self.path}/{name}", "wb"), is_summed) as file:
                for part in [data] if isinstance(data, bytes) else data:
                    file.write(part)
            return file.checksum

    def share(self, name: str, other: "Folder") -> None:
        """Gives this folder a file of another folder of the same file system, without copying it where possible.

        Raises:
            NotFound: The other folder has no such file.
        """
        source, target = f"{other.path}/{name}", f"{self.path}/{name}"
        try:
            if self.is_local:
                try:
                    return os.link(source, target)
                except FileNotFoundError:
                    raise
                except OSError as error:
                    logger.debug("%s cannot have a second name, so it is copied: %s", source, error)
            self.files.cp_file(source, target)
        except FileNotFoundError:
            raise NotFound(f"{other.path} has no {name}", field="uri") from None

    def checksum(self, name: str) -> int | None:
        """Returns the CRC-32 of a file, or None if the file cannot be read."""
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
        """Returns the size in bytes of each file, keyed by its path within the folder.

        Returns an empty mapping if the folder does not exist.
        """
        self.files.invalidate_cache()  # other processes write here too
        found = self.files.find(self.path, detail=True)
        return {path.removeprefix(f"{self.path}/"): int(entry["size"]) for path, entry in found.items()}

    def size_bytes(self) -> int:
        """Returns the total size of all files in bytes."""
        return sum(self.sizes().values())

    def make_private(self) -> None:
        """Creates a local folder that only this user can read.

        Does nothing on an object store, which has its own access rules. A failure is only logged.
        """
        if self.is_local:
            try:
                os.makedirs(self.path, mode=0o700, exist_ok=True)
                os.chmod(self.path, 0o700)
            except OSError as error:  # a later write reports the failure if it matters
                logger.warning("the permissions of %s could not be restricted: %s", self.path, error)

    def stage(self) -> "Folder":
        """Returns a new, empty staging folder beside this one. Fill it, then `commit` it to replace this folder.

        Raises:
            NotFound: The bucket does not exist.
            DiskFull: The disk is full.
        """
        staging = Folder(self.files, f"{self.path}{STAGING_SUFFIX}{uuid.uuid4().hex[:8]}")
        if not self.files.async_impl:
            with naming_full_disk(self.path):
                self.files.makedirs(staging.path, exist_ok=True)
        elif not self.files.exists(bucket := self.path.partition("/")[0]):  # `makedirs` would create the bucket
            raise NotFound(f"bucket {bucket} does not exist, or these credentials may not list it", field="uri")
        return staging

    def commit(self, staging: "Folder") -> None:
        """Replaces this folder by a filled staging folder.

        On a disk this takes two renames. After a power failure between them, the folder is missing, and the old one has
        a name with `REPLACED_SUFFIX`. After any other power failure it is the old or the new one.

        Object stores have no folders to rename, so the files are copied one by one. Until the copy is complete, files
        are missing, but the files of two staging folders are never mixed.
        """
        self.files.invalidate_cache()  # the gateway may have removed the old folder
        with naming_full_disk(self.path):  # with delayed allocation, a full disk may show only at the sync
            sync_folder(self.files, staging.path)
        old = Folder(self.files, f"{self.path}{REPLACED_SUFFIX}{uuid.uuid4().hex[:8]}")
        replaced = self.files.exists(self.path)
        if replaced:
            self.move_to(old)
        staging.move_to(self)
        sync_place(self.files, self.path)
        if replaced:
            old.discard()

    def replace(self, staging: "Folder", fill: Callable[["Folder"], None]) -> int:
        """Fills a staging folder and commits it, or discards it if that fails. Returns its total size in bytes."""
        try:
            fill(staging)
            size_bytes = staging.size_bytes()
            self.commit(staging)
        except BaseException:
            staging.discard()
            raise
        return size_bytes

    def move_to(self, target: "Folder") -> None:
        """Gives this folder the name of another one, which must not exist."""
        if not self.files.async_impl:
            self.files.mv(self.path, target.path, recursive=True)
            return
        # Object stores: `mv` would also try to copy the folder itself, which is not an object (fsspec 2026.9).
        self.files.invalidate_cache()
        names = self.files.find(self.path)
        self.files.copy(names, [target.path + name.removeprefix(self.path) for name in names])
        self.files.rm(names)

    def discard(self) -> None:
        """Deletes this folder if it exists."""
        if self.files.exists(self.path):
            self.files.rm(self.path, recursive=True)


def chunks_of(tensors: Iterable[Tensor]) -> Chunks:
    """Yields the bytes of tensors. Tensors that follow each other in memory are one chunk.

    A thread that writes many chunks waits for the GIL after each, up to 5 ms while another thread runs Python.
    """
    joined = torch.empty(0, dtype=torch.uint8)
    for tensor in tensors:
        part = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        is_same = part.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr()
        if is_same and part.storage_offset() == joined.storage_offset() + len(joined):
            joined = joined.as_strided((len(joined) + len(part),), (1,))
            continue
        if len(joined):
            yield joined.numpy().data
        joined = part
    if len(joined):
        yield joined.numpy().data


Describe = Callable[[Folder, Checksums], None]
"""Writes a description of the files in a folder, such as a manifest. Receives the filled folder and its checksums."""


def write_folder(
    uri: str,
    files: Mapping[str, bytes | Chunks],
    last: Describe | None = None,
    shared: Mapping[str, Folder] | None = None,
) -> int:
    """Writes all files into a staging folder, moves it to `uri` in one step, and returns the total size in bytes.

    Args:
        uri: Path or fsspec URL of the folder.
        files: Content of each file, keyed by file name.
        last: Writes a description of the files, after all files are written.
        shared: Other folders that have further files, keyed by file name; see `Folder.share`.
    """
    target = Folder.at(uri)
    sums: Checksums = {}

    def fill(staging: Folder) -> None:
        for name, other in (shared or {}).items():
            staging.share(name, other)
        for name, data in files.items():
            sums[name] = staging.write(name, data, is_summed=last is not None)
        if last is not None:
            last(staging, sums)

    return target.replace(target.stage(), fill)


def stage_together(control: ControlGroup, uri: str) -> tuple[Folder, Folder]:
    """Returns the folder at `uri` and a new staging folder beside it, both identical on all ranks.

    Raises the same errors as `Folder.stage`.
    """
    target = control.agree(lambda: Folder.at(uri))
    suffix = control.on_rank_0(lambda: target.stage().path.removeprefix(target.path))
    return target, Folder(target.files, target.path + suffix)


class CheckpointRoots:
    """The folders and fsspec URLs below which all checkpoints must be stored.

    Raises:
        InvalidInput: A root has an unknown protocol.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self._listed = ", ".join(roots)
        self._protocols = {_protocol(root) for root in roots}
        self._roots = [_real(Folder.at(root, "checkpoints")) for root in roots]

    def check(self, uri: str) -> None:
        """Raises InvalidInput unless `uri` is below a root after its symbolic links are resolved.

        If no root has the protocol of `uri`, it is rejected before its file system is opened.
        """
        protocol = _protocol(uri)
        if protocol not in self._protocols:
            raise self._refusal(f"uri {uri!r} has the protocol {protocol}")
        if ".." in uri.split("/"):
            raise self._refusal(f"uri {uri!r} contains ..")
        found = _real(Folder.at(uri))
        if not any(_is_below(found, root) for root in self._roots):
            raise self._refusal(f"uri {uri!r} is outside the checkpoint roots")

    def _refusal(self, what: str) -> InvalidInput:
        return InvalidInput(
            f"{what}: this trainer reads and writes only below {self._listed} (--checkpoints)", field="uri"
        )


def _protocol(uri: str) -> str:
    """Returns the canonical protocol name of a URL.

    For a chained URL such as filecache::s3://b this is the whole chain, which matches no root.
    """
    if "::" in uri:
        return uri.rpartition("://")[0] or uri
    name = fsspec.core.split_protocol(uri)[0] or "file"
    return {"local": "file", "s3a": "s3", "gs": "gcs"}.get(name, name)


def _real(folder: Folder) -> Folder:
    """Returns the folder with symbolic links resolved, if it is on a local disk."""
    if folder.is_local:
        return Folder(folder.files, os.path.realpath(folder.path).rstrip("/"))
    return folder


def _is_below(found: Folder, root: Folder) -> bool:
    # Equal only for the same server and the same credentials. fsspec's own `==` also compares the creating threads.
    server, own = ((type(one), one.storage_args, one.storage_options) for one in (found.files, root.files))
    return server == own and found.path.startswith(f"{root.path}/" if root.path else "") and found.path != root.path
