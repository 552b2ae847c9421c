"""Power cuts from a record: the disk operations of processes on a folder, and its possible contents after any moment.

recorder.c writes the record. A cut keeps all data synced before it and any part of the rest, as in ALICE (Pillai et
al., "All File Systems Are Not Created Equal", OSDI 2014): each block of a write without a later fsync of its file may
be lost, and each change of a folder (a created, moved or removed name) without a later fsync of that folder, in any
order. A rename is atomic.
"""

import json
import os
import random
import struct
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

_HEADER = struct.Struct("<BQQII")  # as in recorder.c
_BLOCK_BYTES = 4096


class Kind(IntEnum):
    """The kind of a record, as in recorder.c."""

    LINK = 1
    WRITE = 2
    TRUNCATE = 3
    EXTEND = 4
    SYNC_BEGIN = 5
    SYNC_END = 6
    RENAME = 7
    UNLINK = 8
    MKDIR = 9
    RMDIR = 10
    MARK = 11


@dataclass(frozen=True)
class Event:
    """One record. `number` is an offset, a size or the kind of a sync; `path` is relative to the folder."""

    kind: Kind
    inode: int
    number: int
    path: str
    data: bytes

    def told(self) -> dict[str, str]:
        """Returns the content of a mark."""
        found: dict[str, str] = json.loads(self.data)
        return found


@dataclass
class Change:
    """A change of a file (a write or a new size) or of folders (a name set to a node, or removed if `node` is None).

    Attributes:
        at: Its position in the record.
        names: For folders: the folder, the name and its new node.
        event: For files: the record.
    """

    at: int
    names: list[tuple["Node", str, "Node | None"]] = field(default_factory=list)
    event: Event | None = None


@dataclass(eq=False)
class Node:
    """A file or a folder: its changes, and the record position before which they are certainly on disk."""

    is_folder: bool
    changes: list[Change] = field(default_factory=list)
    synced: int = -1
    links: int = 0
    now: dict[str, "Node"] = field(default_factory=dict)


def build(folder: Path) -> Path:
    """Compiles recorder.c with `cc`; returns the library."""
    library = folder / "recorder.so"
    source = Path(__file__).with_name("recorder.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


class Recording:
    """Records the operations of processes with the variables `environment` below a new, empty folder."""

    def __init__(self, library: Path, root: Path, record: Path) -> None:
        self.root, self._record = root, record
        self.environment = {
            "LD_PRELOAD": str(library),
            "FOVEA_RECORD": str(record),
            "FOVEA_RECORD_ROOT": str(root),
        }

    def mark(self, **told: Any) -> None:
        """Records an acknowledgement that a client has received."""
        data = json.dumps(told).encode()
        with self._record.open("ab", buffering=0) as file:
            file.write(_HEADER.pack(Kind.MARK, 0, 0, 0, len(data)) + data)

    def events(self) -> list[Event]:
        """Returns all records in order."""
        return list(_parse(self._record.read_bytes(), str(self.root)))


def _parse(content: bytes, root: str) -> Iterator[Event]:
    at = 0
    while at < len(content):
        kind, inode, number, path_size, data_size = _HEADER.unpack_from(content, at)
        at += _HEADER.size
        path, data = content[at : at + path_size], content[at + path_size : at + path_size + data_size]
        at += path_size + data_size
        if kind == Kind.RENAME:
            data = _relative(data, root).encode()
        yield Event(Kind(kind), inode, number, _relative(path, root) if path else "", data)


def _relative(path: bytes, root: str) -> str:
    return os.path.normpath(path.decode()).removeprefix(root).lstrip("/")


class Disk:
    """The operations up to some moment, and the possible contents after a cut there."""

    def __init__(self) -> None:
        self._root = Node(is_folder=True)
        self._by_inode: dict[int, Node] = {}
        self._syncs: dict[int, tuple[Node, int]] = {}
        self._count = 0

    def do(self, event: Event, does_sync: bool = True) -> None:
        """Adds one event; marks change nothing.

        Args:
            does_sync: Whether a sync has any effect.
        """
        self._count += 1
        match event.kind:
            case Kind.LINK | Kind.MKDIR:
                self._link(event)
            case Kind.WRITE | Kind.TRUNCATE | Kind.EXTEND:
                if event.inode in self._by_inode:  # otherwise it has no name below our folder
                    self._by_inode[event.inode].changes.append(Change(self._count, event=event))
            case Kind.SYNC_BEGIN:
                if event.inode in self._by_inode and does_sync:
                    self._syncs[event.number] = (self._by_inode[event.inode], self._count)
            case Kind.SYNC_END:
                if event.number in self._syncs:
                    node, begun = self._syncs.pop(event.number)
                    node.synced = max(node.synced, begun)
            case Kind.RENAME:
                self._rename(event)
            case Kind.UNLINK | Kind.RMDIR:
                parent, name = self._parent(event.path)
                self._change((parent, name, None))

    def files(self) -> dict[str, bytes]:
        """Returns the files that processes see now, by path."""
        return dict(_walk(self._root, lambda _node, _change: True, None))

    def cut(self, chance: random.Random) -> dict[str, bytes]:
        """Returns the possible contents of the disk after a cut here, by path."""
        share = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        kept: dict[int, bool] = {}

        def is_kept(node: Node, change: Change) -> bool:
            nodes = {folder for folder, _, _ in change.names} or {node}
            if any(change.at < one.synced for one in nodes):
                return True
            return kept.setdefault(change.at, chance.random() < share)

        return dict(_walk(self._root, is_kept, (chance, share)))

    def _link(self, event: Event) -> None:
        parent, name = self._parent(event.path)
        node = self._by_inode.get(event.inode)
        if name in parent.now and parent.now[name] is node:
            return
        if node is None or node.links == 0:  # the number may be reused
            node = self._by_inode[event.inode] = Node(event.kind is Kind.MKDIR)
        self._change((parent, name, node))

    def _rename(self, event: Event) -> None:
        source, old = self._parent(event.path)
        target, new = self._parent(event.data.decode())
        self._change((source, old, None), (target, new, source.now[old]))

    def _change(self, *names: tuple[Node, str, Node | None]) -> None:
        change = Change(self._count, names=list(names))
        for folder, name, node in names:
            if (before := folder.now.pop(name, None)) is not None:
                before.links -= 1
            if node is not None:
                folder.now[name] = node
                node.links += 1
        for folder in {folder for folder, _, _ in names}:
            folder.changes.append(change)

    def _parent(self, path: str) -> tuple[Node, str]:
        *above, name = path.split("/")
        node = self._root
        for each in above:
            node = node.now[each]
        return node, name

    def sees_root(self, inode: int) -> None:
        """Registers the inode of the folder itself, so that syncs of it count."""
        self._by_inode[inode] = self._root


def _walk(node: Node, is_kept: Any, torn: Any, path: str = "") -> Iterator[tuple[str, bytes]]:
    names: dict[str, Node] = {}
    for change in node.changes:
        if not is_kept(node, change):
            continue
        for folder, name, to in change.names:
            if folder is not node:
                continue
            names.pop(name, None)
            if to is not None:
                names[name] = to
    for name, below in names.items():
        place = f"{path}/{name}" if path else name
        if below.is_folder:
            yield from _walk(below, is_kept, torn, place)
        else:
            yield place, _content(below, torn)


def _content(node: Node, torn: tuple[random.Random, float] | None) -> bytes:
    data = bytearray()
    for change in node.changes:
        event = change.event
        assert event is not None
        is_safe = torn is None or change.at < node.synced
        if event.kind is Kind.WRITE:
            for begin, end in _blocks(event.number, len(event.data)):
                if is_safe or torn is None or torn[0].random() < torn[1]:
                    data.extend(bytes(max(0, end - len(data))))
                    data[begin:end] = event.data[begin - event.number : end - event.number]
        elif is_safe or torn is None or torn[0].random() < torn[1]:
            if event.kind is Kind.TRUNCATE:
                del data[event.number :]
            data.extend(bytes(max(0, event.number - len(data))))
    return bytes(data)


def _blocks(offset: int, size: int) -> Iterator[tuple[int, int]]:
    at = offset
    while at < offset + size:
        end = min(offset + size, (at // _BLOCK_BYTES + 1) * _BLOCK_BYTES)
        yield at, end
        at = end


def write_files(files: Mapping[str, bytes], folder: Path, prefix: str = "") -> None:
    """Writes the files that have a prefix below a folder, at the same paths."""
    for path, data in files.items():
        if path.startswith(prefix):
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
