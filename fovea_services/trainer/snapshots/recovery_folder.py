"""Where recovery is kept: the newest durable point of each model and its unnamed snapshots, as files.

    ROOT/MODEL/SEQ_ID/               a state as SaveState writes it, and `fovea_point.json`
    ROOT/MODEL/snapshots/SNAPSHOT/   a snapshot as TakeSnapshot writes it

Names are quoted. A folder of a point that lacks what its description lists is none. Whether the
files hold what was written is looked at before a model is made from them.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Self
from urllib.parse import quote, unquote

from fovea.wire.conventions import REPLACED_SUFFIX, STAGING_SUFFIX
from fovea_services.trainer.snapshots.checkpoint_folder import Checksums, Folder

logger = logging.getLogger(__name__)

POINT = "fovea_point.json"
SNAPSHOTS = "snapshots"


@dataclass(frozen=True)
class Point:
    """What a durable point is.

    Args:
        seq_id: The last numbered command that is in it.
        step: Steps that the model has taken.
        answer: Of that command, as JSON holds it.
        lora: Settings of an adapter; None of full parameters.
        base: Digest of the base's files.
        written_at: Seconds since 1970, for people who look.
        files: Bytes of each other file, by path.
        numerics: Of the trainer that wrote it.
        checksums: Of the same files.
    """

    seq_id: int
    step: int
    answer: Any
    lora: dict[str, Any] | None
    base: str
    written_at: float
    files: dict[str, int]
    numerics: dict[str, str] = field(default_factory=dict)
    checksums: Checksums = field(default_factory=dict)

    def write_to(self, folder: Folder) -> None:
        """Puts the description beside the files that it describes."""
        folder.write(POINT, json.dumps(asdict(self)).encode())

    @classmethod
    def of(cls, folder: Folder) -> Self | None:
        """The point in a folder, if it is whole."""
        sizes = folder.sizes()
        if sizes.pop(POINT, None) is None:
            return None
        try:
            found = cls(**json.loads(folder.read(POINT)))
        except (ValueError, TypeError) as error:
            logger.warning("%s/%s cannot be read: %s", folder.path, POINT, error)
            return None
        if found.files != sizes:
            logger.warning("%s is not whole: it has %s of %s", folder.path, sizes, found.files)
            return None
        return found


class RecoveryFolder:
    """Files of recovery. Methods block; several threads may call them, one at a time for each model.

    Args:
        uri: Folder or fsspec URL. Raises InvalidInput for an unknown protocol.
    """

    def __init__(self, uri: str) -> None:
        self._root = Folder.at(uri, "recovery")
        self._root.make_private()  # every tenant's weights and moments lie in it

    def point_url(self, model_id: str, seq_id: int) -> str:
        """Where a point is written."""
        return self._root.url(_quoted(model_id), str(seq_id))

    def snapshot_url(self, model_id: str, snapshot_id: str) -> str:
        """Where a snapshot is written."""
        return self._root.url(_quoted(model_id), SNAPSHOTS, _quoted(snapshot_id))

    def newest(self, model_id: str) -> tuple[str, Point] | None:
        """URL and description of the newest whole point of a model."""
        return next(self._whole(model_id), None)

    def whole(self, model_id: str) -> list[tuple[str, Point]]:
        """The same of all whole points, the newest first: there are several if it was just being replaced."""
        return list(self._whole(model_id))

    def drop_older(self, model_id: str, seq_id: int) -> None:
        """Removes all points of a model but one."""
        for other in self._points(model_id):
            if other != seq_id:
                Folder.at(self.point_url(model_id, other)).discard()

    def find_snapshot(self, snapshot_id: str) -> str | None:
        """URL of a snapshot that is kept."""
        for model in self._names(self._root):
            if _quoted(snapshot_id) in self._names(Folder.at(self._root.url(model, SNAPSHOTS))):
                return self._root.url(model, SNAPSHOTS, _quoted(snapshot_id))
        return None

    def remove_snapshot(self, snapshot_id: str) -> None:
        """Unknown ones are no error."""
        if url := self.find_snapshot(snapshot_id):
            Folder.at(url).discard()

    def remove_model(self, model_id: str) -> None:
        """Unknown ones are no error."""
        Folder.at(self._root.url(_quoted(model_id))).discard()

    def model_ids(self) -> list[str]:
        """Models of which there are files."""
        return [unquote(name) for name in self._names(self._root)]

    def size_bytes(self, model_id: str) -> int:
        """Size of all files of a model."""
        return Folder.at(self._root.url(_quoted(model_id))).size_bytes()

    def sweep(self) -> None:
        """At a start: removes what an earlier instance was writing.

        Which models are over the gateway alone knows, and says: their age says nothing, if the clock may be wrong.
        """
        for model_id in self.model_ids():
            folder = Folder.at(self._root.url(_quoted(model_id)))
            for parent in (folder, Folder.at(folder.url(SNAPSHOTS))):
                for name in self._names(parent):
                    if STAGING_SUFFIX in name or REPLACED_SUFFIX in name:
                        Folder.at(parent.url(name)).discard()

    def _whole(self, model_id: str) -> Iterator[tuple[str, Point]]:
        for seq_id in sorted(self._points(model_id), reverse=True):
            url = self.point_url(model_id, seq_id)
            if found := Point.of(Folder.at(url)):
                yield url, found

    def _points(self, model_id: str) -> list[int]:
        names = self._names(Folder.at(self._root.url(_quoted(model_id))))
        return [int(name) for name in names if name.isdecimal()]

    def _names(self, folder: Folder) -> list[str]:
        folder.files.invalidate_cache()
        try:
            listed = folder.files.ls(folder.path, detail=False)
        except FileNotFoundError:
            return []
        return [name.rstrip("/").rpartition("/")[2] for name in listed]


def _quoted(name: str) -> str:
    """As one segment of a path that means nothing else."""
    return quote(name, safe="").replace(".", "%2E")
