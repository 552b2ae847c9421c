"""Snapshots in memory: retention, eviction, and the content of a digest."""

import torch

from fovea.api.v1 import weights_pb2
from fovea.wire.manifest import SnapshotDigest
from fovea_trainer.weights.snapshot_store import (
    SnapshotStore,
    StoredSnapshot,
    digest_of,
    packed_buckets,
    specs_of,
)


def _held(name: str, size_bytes: int = 10) -> StoredSnapshot:
    identity = weights_pb2.Snapshot(snapshot_id=name, model_id=name.partition("@")[0], size_bytes=size_bytes)
    return StoredSnapshot(identity, {}, [], None)


def _names(memory: SnapshotStore, *names: str) -> list[str]:
    return [name for name in names if memory.get(name)]


def test_least_recently_used_goes_first() -> None:
    memory = SnapshotStore(30)
    for name in ("a@1", "a@2", "a@3"):
        memory.put(_held(name))
    assert memory.get("a@1")
    memory.put(_held("a@4"))
    assert _names(memory, "a@1", "a@2", "a@3", "a@4") == ["a@1", "a@3", "a@4"]


def test_newest_of_a_model_stays_above_the_limit() -> None:
    memory = SnapshotStore(15)
    for name in ("a@1", "b@1", "b@2", "c@1"):
        memory.put(_held(name))
    assert _names(memory, "a@1", "b@1", "b@2", "c@1") == ["a@1", "b@2", "c@1"]
    memory.release_model("a")
    memory.put(_held("c@2"))
    assert _names(memory, "a@1", "b@2", "c@1", "c@2") == ["b@2", "c@2"]


def test_dropping() -> None:
    memory = SnapshotStore(100)
    memory.put(_held("a@1"))
    memory.drop("a@1")
    memory.drop("a@1")
    assert memory.get("a@1") is None


def _digest(**tensors: torch.Tensor) -> str:
    return digest_of(specs_of(tensors), tensors.values())


def test_digest_covers_names_types_shapes_bytes_and_order() -> None:
    one, two = torch.arange(6, dtype=torch.float32), torch.ones(2)
    base = _digest(x=one, y=two)
    assert _digest(x=one.clone(), y=two) == base
    others = [
        {"z": one, "y": two},
        {"x": one.view(2, 3), "y": two},
        {"x": one.view(torch.int32), "y": two},
        {"x": one + 1, "y": two},
        {"x": one.flip(0), "y": two},
        {"x": -one, "y": two},
        {"y": two, "x": one},
    ]
    digests = {_digest(**other) for other in others}
    assert len(digests) == len(others)
    assert base not in digests


def test_digest_does_not_depend_on_how_tensors_are_sent() -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(3, dtype=torch.uint8), "c": torch.randn(7).bfloat16()}
    specs = specs_of(tensors)
    for bucket_bytes in (1, 64, 1 << 20):
        builder = SnapshotDigest()
        for bucket, data in packed_buckets(specs, tensors.values(), bucket_bytes):
            builder.add(bucket, data.view(torch.int64).numpy())
        assert builder.hexdigest() == digest_of(specs, tensors.values())


def test_room_is_made_of_the_models_own_last_snapshot_but_not_of_others() -> None:
    memory = SnapshotStore(25)
    for name in ("a@1", "b@1"):
        memory.put(_held(name))
    memory.make_room(weights_pb2.Snapshot(snapshot_id="a@2", model_id="a"), 10)
    assert _names(memory, "a@1", "b@1") == ["b@1"]


def test_a_snapshot_stays_in_memory_while_it_is_being_sent() -> None:
    memory = SnapshotStore(15)
    memory.put(_held("a@1"))
    memory.pin("a@1")
    memory.make_room(weights_pb2.Snapshot(snapshot_id="a@2", model_id="a"), 10)
    memory.put(_held("a@2"))
    assert not memory.drop_older()
    assert _names(memory, "a@1", "a@2") == ["a@1", "a@2"]
    memory.unpin("a@1")
    assert _names(memory, "a@1", "a@2") == ["a@2"]
