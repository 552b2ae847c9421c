"""Where a trainer may read and write checkpoints: below the roots that it was given, nowhere else."""

import os
from collections.abc import Sequence
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from fovea.wire.errors import InvalidInput
from services.trainer.snapshots.checkpoint_folder import Folder


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
