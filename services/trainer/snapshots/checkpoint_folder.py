"""Folders at a path or an fsspec URL, written whole or not at all."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import fsspec

from fovea.runtime.durable import sync_folder, sync_place
from fovea.wire.errors import InvalidInput, NotFound
from fovea.wire.names import REPLACED_SUFFIX, STAGING_SUFFIX


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

    def read(self, name: str) -> bytes:
        """A whole file. Raises NotFound if there is none."""
        try:
            return bytes(self.files.cat_file(f"{self.path}/{name}"))
        except FileNotFoundError:
            raise NotFound(f"{self.path} has no {name}: nothing was saved there", field="uri") from None

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return bool(self.files.exists(f"{self.path}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        """Writes one file of a folder that `begin` made."""
        self.files.pipe_file(f"{self.path}/{name}", data)

    def size_bytes(self) -> int:
        """Size of all files below."""
        self.files.invalidate_cache()  # other ranks have written too
        return int(self.files.du(self.path, total=True))

    def begin(self) -> "Folder":
        """Makes an empty folder beside this one, to be filled and then put in its place by `commit`.

        Raises NotFound for a bucket that does not exist.
        """
        draft = Folder(self.files, f"{self.path}{STAGING_SUFFIX}{uuid.uuid4().hex[:8]}")
        if not self.files.async_impl:
            self.files.makedirs(draft.path, exist_ok=True)
        elif not self.files.exists(bucket := self.path.partition("/")[0]):  # `makedirs` would make one
            raise NotFound(f"there is no bucket {bucket}, or these credentials may not list it", field="uri")
        return draft

    def commit(self, draft: "Folder") -> None:
        """Puts a filled draft in the place of this folder, replacing what is there. A power cut finds it whole.

        Where folders are only names, in object stores, its files come one by one: until then some cannot be found, but
        those of two drafts are never mixed.
        """
        self.files.invalidate_cache()  # the gateway may have removed what was here
        sync_folder(self.files, draft.path)
        old = Folder(self.files, f"{self.path}{REPLACED_SUFFIX}{uuid.uuid4().hex[:8]}")
        replaced = self.files.exists(self.path)
        if replaced:
            self._move_to(old)
        draft._move_to(self)
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
        """Removes a draft that will not be committed."""
        if self.files.exists(self.path):
            self.files.rm(self.path, recursive=True)


def write_folder(uri: str, files: Mapping[str, bytes | Callable[[], bytes]]) -> int:
    """Writes all files and puts them at `uri` at once; returns their size in bytes."""
    target = Folder.at(uri)
    draft = target.begin()
    try:
        for name, data in files.items():
            draft.write(name, data if isinstance(data, bytes) else data())
        size_bytes = draft.size_bytes()
        target.commit(draft)
    except BaseException:
        draft.discard()
        raise
    return size_bytes
