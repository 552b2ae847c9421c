"""Snapshots in memory: what is kept, what goes, and what a digest covers."""

import torch

from fovea.api.v1 import weights_pb2
from services.trainer.snapshots import HeldSnapshot, SnapshotMemory, digest_of


def _held(name: str, size_bytes: int = 10) -> HeldSnapshot:
    identity = weights_pb2.Snapshot(snapshot_id=name, model_id=name.partition("@")[0], size_bytes=size_bytes)
    return HeldSnapshot(identity, {}, [], None)


def _names(memory: SnapshotMemory, *names: str) -> list[str]:
    return [name for name in names if memory.get(name)]


def test_least_recently_used_goes_first() -> None:
    memory = SnapshotMemory(30)
    for name in ("a@1", "a@2", "a@3"):
        memory.put(_held(name))
    assert memory.get("a@1")
    memory.put(_held("a@4"))
    assert _names(memory, "a@1", "a@2", "a@3", "a@4") == ["a@1", "a@3", "a@4"]


def test_newest_of_a_model_stays_above_the_limit() -> None:
    memory = SnapshotMemory(15)
    for name in ("a@1", "b@1", "b@2", "c@1"):
        memory.put(_held(name))
    assert _names(memory, "a@1", "b@1", "b@2", "c@1") == ["a@1", "b@2", "c@1"]
    memory.release_model("a")
    memory.put(_held("c@2"))
    assert _names(memory, "a@1", "b@2", "c@1", "c@2") == ["b@2", "c@2"]


def test_dropping() -> None:
    memory = SnapshotMemory(100)
    memory.put(_held("a@1"))
    memory.drop("a@1")
    memory.drop("a@1")
    assert memory.get("a@1") is None


def test_digest_covers_names_types_shapes_bytes_and_order() -> None:
    one, two = torch.arange(6, dtype=torch.float32), torch.ones(2)
    base, size_bytes = digest_of([("x", one), ("y", two)])
    assert size_bytes == 32
    assert digest_of([("x", one.clone()), ("y", two)])[0] == base
    others = [
        [("z", one), ("y", two)],
        [("x", one.view(2, 3)), ("y", two)],
        [("x", one.view(torch.int32)), ("y", two)],
        [("x", one + 1), ("y", two)],
        [("y", two), ("x", one)],
    ]
    digests = {digest_of(other)[0] for other in others}
    assert len(digests) == len(others)
    assert base not in digests
