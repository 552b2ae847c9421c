"""The recovery store: the newest durable point of each model and its unnamed snapshots, as files.

    ROOT/fovea_store.json            the id of the store
    ROOT/MODEL/SEQ_ID/               a state as SaveState writes it, and `fovea_point.json`
    ROOT/MODEL/snapshots/SNAPSHOT/   a snapshot as TakeSnapshot writes it

Model and snapshot names are percent-encoded. A point is ignored if the files in its folder or their sizes differ from
its description. Checksums are compared only before a model is restored from a point.

Several trainers may share a store; each model is in one of them. A trainer therefore touches the files of its own
models only, and never removes a point that is newer than its own: the gateway may have handed the model over.
"""

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Self, TypeVar
from urllib.parse import quote, unquote

import torch

import fovea
from fovea.wire.conventions import REPLACED_SUFFIX, STAGING_SUFFIX
from fovea.wire.errors import StorageBehind, Unavailable
from fovea_trainer.model.packed_attention import kernel_of
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.weights.checkpoint_folder import Checksums, Folder

logger = logging.getLogger(__name__)
T = TypeVar("T")

POINT = "fovea_point.json"
SNAPSHOTS = "snapshots"
STORE = "fovea_store.json"
"""The file with the id of the store. No model's folder has a dot in its name."""
_ID_TRIES, _ID_PAUSE_S = 100, 0.05
"""Reads of an id that another trainer has begun to write, and the pause in seconds between them."""

_FIRST_BYTES_PER_S = 1e8  # until a write has been measured
_NEWEST, _PATIENCE = 0.2, 4.0
"""Weight of the newest write in the measured speed, and how many times as long the next one may take."""
LINE_S = 20.0
"""Seconds after which a model that was refused, and has not asked again, loses its position in the line."""

_ROUNDING = (
    "threads", "head_dtype", "replicas", "expert_parallel", "token_budget", "patch_budget", "datum_ranks",
    "memory_limit_mib", "recompute", "logit_chunk_mib", "keep_gathered",
)  # fmt: skip
"""Settings that decide which values are computed together, and so the order in which floats are added."""


@dataclass(frozen=True)
class Point:
    """The description of a durable point.

    Args:
        seq_id: Number of the last numbered command that the point includes.
        step: Optimizer steps that the model has taken.
        answer: The response to that command, as a JSON value.
        lora: Settings of an adapter; None for full parameters.
        base: Digest of the base checkpoint's files.
        written_at: Seconds since 1970, for information only.
        files: Size in bytes of every other file, keyed by path.
        numerics: Facts about the writing trainer that affect rounding, keyed by their names.
        checksums: CRC-32 of the same files, keyed by path.
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
        """Writes the description into the folder that it describes."""
        folder.write(POINT, json.dumps(asdict(self)).encode())

    @classmethod
    def of(cls, folder: Folder) -> Self | None:
        """Returns the point in a folder, or None if the folder has no complete point."""
        sizes = folder.sizes()
        if sizes.pop(POINT, None) is None:
            return None
        try:
            found = cls(**json.loads(folder.read(POINT)))
        except (ValueError, TypeError) as error:
            logger.warning("%s/%s cannot be read: %s", folder.path, POINT, error)
            return None
        if found.files != sizes:
            logger.warning("%s is incomplete: found files and sizes %s, expected %s", folder.path, sizes, found.files)
            return None
        return found


def numerics_of(settings: TrainerSettings, dtype: torch.dtype, device: torch.device, world_size: int) -> dict[str, str]:
    """Returns the facts that affect the rounding of a trainer's results, keyed by setting."""
    is_cpu = device.type == "cpu"
    found = {
        "fovea": fovea.__version__,
        "torch": torch.__version__,
        "ranks": world_size,
        "device": torch.backends.cpu.get_cpu_capability() if is_cpu else torch.cuda.get_device_name(device),
        "dtype": dtype,
        "attention": kernel_of(device, dtype)[0],
        **{name: getattr(settings, name) for name in _ROUNDING},
    }
    return {name: str(value) for name, value in found.items()}


class StorageSpeed:
    """The speed of storage by its last writes, of which the newest has the largest weight. They end in order.

    Args:
        most_lag_s: Seconds in which storage must be able to write all that is owed.
        clock: Returns seconds since an arbitrary moment.
    """

    def __init__(self, most_lag_s: float, clock: Callable[[], float]) -> None:
        self.most_lag_s, self.least_patience_s, self._clock = most_lag_s, most_lag_s, clock
        self._bytes = self._seconds = self._idle_s = 0.0
        self._ended_at = -math.inf
        self.owed_bytes = 0
        """Bytes of the writes that were submitted and are not over."""

    async def written(
        self, write: "Future[T]", size_bytes: int, late: Callable[[str], Awaitable[None]], wanted_s: float = 0.0
    ) -> T:
        """Waits for a write of `size_bytes` and measures it, unless its size is 0.

        Args:
            write: The write.
            size_bytes: Its size; 0 if it shares a file.
            late: Called with a message whenever this write has taken `patience_s` of all pending bytes longer.
            wanted_s: Seconds since the write was wanted. Storage was idle from then, or from the end of the write
                before if that is later.
        """
        began, waiting, is_late = self._clock(), asyncio.wrap_future(write), False
        self.owed_bytes += size_bytes
        try:
            while not (await asyncio.wait([waiting], timeout=self.patience_s(self.owed_bytes)))[0]:
                is_late, seconds = True, self._clock() - began
                await late(f"a write of {size_bytes / 2**20:.1f} MiB has not returned for {seconds:.0f} s")
        finally:
            self.owed_bytes -= size_bytes
            before, self._ended_at = self._ended_at, self._clock()
        if size_bytes and not is_late:
            idle_s = max(0.0, began - max(began - wanted_s, before))
            self._bytes += _NEWEST * (size_bytes - self._bytes)
            self._seconds += _NEWEST * (self._ended_at - max(began, before) - self._seconds)
            self._idle_s += _NEWEST * (idle_s - self._idle_s)
        return waiting.result()

    async def in_time(self, action: "Future[T]") -> T:
        """Waits for a file operation after all earlier writes. If storage does not return in time, it still runs later.

        Raises:
            Unavailable: Storage did not return in time.
        """
        waiting, patience_s = asyncio.wrap_future(action), self.patience_s(self.owed_bytes)
        if not (await asyncio.wait([waiting], timeout=patience_s))[0]:
            raise Unavailable(f"recovery storage has not returned for {patience_s:.0f} s: look at --recovery")
        return waiting.result()

    def most_bytes(self, share: float) -> float:
        """Returns the bytes that storage writes in a share of the longest lag, with its waits between writes."""
        return share * self.most_lag_s * self._bytes_per_s(self._seconds + self._idle_s)

    def patience_s(self, size_bytes: int) -> float:
        """Returns the seconds after which storage that does not return from a write counts as failing."""
        return max(self.least_patience_s, _PATIENCE * size_bytes / self._bytes_per_s(self._seconds))

    def _bytes_per_s(self, seconds: float) -> float:
        return self._bytes / seconds if self._seconds else _FIRST_BYTES_PER_S


class WaitingLine:
    """Refused models in order, with the bytes that each wants. It drops those that have not asked again for `LINE_S`
    seconds. Urgent models precede those that have waited for less than that, so new models cannot hold up all others.

    Args:
        clock: Returns seconds since an arbitrary moment.
        debt: The things that are owed, for messages.
        limit: The setting of the limit, for messages.
    """

    def __init__(self, clock: Callable[[], float], debt: str, limit: str) -> None:
        self._clock, self._debt, self._limit = clock, debt, limit
        self._entries: dict[str, tuple[int, float, float]] = {}  # the bytes, when it becomes urgent, when it asked last

    def admit(
        self, model_id: str, size_bytes: int, owed_bytes: int, most_bytes: float, is_urgent: bool = False
    ) -> None:
        """Checks that bytes fit within a limit, after those that are owed and those of models ahead in the line.

        Raises:
            StorageBehind: They do not fit. The model is then in the line.
        """
        now, taken, is_ahead = self._clock(), owed_bytes, True
        for name, (_, _, asked_at) in list(self._entries.items()):
            if asked_at <= now - LINE_S:
                del self._entries[name]
        _, urgent_at, _ = self._entries.get(model_id, (0, now if is_urgent else now + LINE_S, now))
        is_urgent = urgent_at <= now
        for name, (wanted, at, _) in self._entries.items():
            is_ahead, urgent = is_ahead and name != model_id, at <= now
            if name != model_id and ((is_ahead and urgent >= is_urgent) or urgent > is_urgent):
                taken += wanted
        if not taken or taken + size_bytes <= most_bytes:
            self._entries.pop(model_id, None)
            return
        self._entries[model_id] = (size_bytes, urgent_at, now)
        owed, most = owed_bytes / 2**20, most_bytes / 2**20
        raise StorageBehind(
            f"recovery storage is behind: {owed:.0f} MiB of {self._debt} wait to be written, the limit is {most:.0f} "
            f"MiB ({self._limit}), and {len(self._entries)} models wait: the request waits until storage has caught up"
        )


class RecoveryFolder:
    """The files of the recovery store. Methods block. Several threads may call them, but only one at a time per model.

    Args:
        uri: Folder or fsspec URL.

    Raises:
        InvalidInput: `uri` has an unknown protocol.
    """

    def __init__(self, uri: str) -> None:
        self._root = Folder.at(uri, "recovery")
        self._root.make_private()  # it contains the weights and optimizer moments of every tenant
        self._thread, self._id = ThreadPoolExecutor(1, "recovery store"), Future[str]()
        self._id.set_result("")

    def point_url(self, model_id: str, seq_id: int) -> str:
        """Returns the URL of the point of a model at a sequence number."""
        return self._root.url(_quoted(model_id), str(seq_id))

    def snapshot_url(self, model_id: str, snapshot_id: str) -> str:
        """Returns the URL of a snapshot."""
        return self._root.url(_quoted(model_id), SNAPSHOTS, _quoted(snapshot_id))

    def newest(self, model_id: str) -> tuple[str, Point] | None:
        """Returns the URL and description of the newest complete point of a model, or None."""
        return next(self._whole(model_id), None)

    def whole(self, model_id: str) -> list[tuple[str, Point]]:
        """Returns URL and description of all complete points of a model, the newest first.

        There are several if the trainer stopped after it wrote the newest and before it removed the older ones.
        """
        return list(self._whole(model_id))

    def known_id(self) -> str:
        """Returns the id of the store, which its first trainer creates; empty until a thread has read it."""
        if not self._id.done():
            return ""
        if error := self._id.exception():
            logger.warning("the recovery store %s has no readable %s yet: %s", self._root.path, STORE, error)
        if found := "" if error else self._id.result():
            return found
        self._id = self._thread.submit(self._find_id)
        return ""

    def _find_id(self) -> str:
        files, path = self._root.files, f"{self._root.path}/{STORE}"
        for _ in range(_ID_TRIES):
            if not self._root.exists(STORE):
                self._write_id(json.dumps({"id": uuid.uuid4().hex}).encode())
            if text := self._root.read(STORE):
                return str(json.loads(text)["id"])
            time.sleep(_ID_PAUSE_S)
            files.invalidate_cache()
        raise Unavailable(f"{path} is empty: remove it, then start the trainer again")

    def _write_id(self, text: bytes) -> None:
        if not self._root.is_local:  # an object appears whole
            self._root.write(STORE, text)
            return
        with suppress(FileExistsError), open(f"{self._root.path}/{STORE}", "xb") as file:
            file.write(text)

    def drop_older(self, model_id: str, seq_id: int) -> None:
        """Removes all points of a model before the one at `seq_id`."""
        for other in self._points(model_id):
            if other < seq_id:
                Folder.at(self.point_url(model_id, other)).discard()

    def find_snapshot(self, snapshot_id: str) -> str | None:
        """Returns the URL of a stored snapshot, or None."""
        own = _quoted(snapshot_id)
        for model_id in self.model_ids():
            folder = Folder.at(self._root.url(_quoted(model_id), SNAPSHOTS))
            names = self._names(folder)
            if own not in names and any(name.startswith(f"{own}{REPLACED_SUFFIX}") for name in names):
                self.sweep(model_id)
                names.append(own)
            if own in names:
                return folder.url(own)
        return None

    def remove_snapshot(self, snapshot_id: str) -> None:
        """Removes a snapshot. Does nothing if it is unknown."""
        if url := self.find_snapshot(snapshot_id):
            Folder.at(url).discard()

    def remove_model(self, model_id: str) -> None:
        """Removes all files of a model. Does nothing if it is unknown."""
        Folder.at(self._root.url(_quoted(model_id))).discard()

    def model_ids(self) -> list[str]:
        """Returns the ids of all models that have files."""
        return [unquote(name) for name in self._names(self._root) if name != STORE]

    def size_bytes(self, model_id: str) -> int:
        """Returns the total size in bytes of the files of a model."""
        return Folder.at(self._root.url(_quoted(model_id))).size_bytes()

    def sweep(self, model_id: str) -> None:
        """Removes folders of a model that an earlier instance did not finish or remove. Call it before a restore.

        If that instance ended while it replaced a folder, the replaced one gets its name back.

        Finished models stay, because only the gateway knows which models are finished. A rule about the age of files
        would depend on a clock that may be wrong.
        """
        folder = Folder.at(self._root.url(_quoted(model_id)))
        for parent in (folder, Folder.at(folder.url(SNAPSHOTS))):
            names = self._names(parent)
            for name in names:
                own, is_replaced, _ = name.partition(REPLACED_SUFFIX)
                if is_replaced and own not in names:
                    Folder.at(parent.url(name)).move_to(Folder.at(parent.url(own)))
                    names.append(own)
                elif is_replaced or STAGING_SUFFIX in name:
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
    """Encodes a name as one path segment, so that it can contain neither a separator nor `..`."""
    return quote(name, safe="").replace(".", "%2E")
