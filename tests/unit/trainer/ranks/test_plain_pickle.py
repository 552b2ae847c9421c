"""Data that others can write never runs code: neither data of other ranks nor checkpoint metadata."""

import collections
import functools
import io
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fovea.api.v1 import weights_pb2
from fovea.wire.errors import FeatureEvicted, InvalidInput
from fovea_trainer import command_queue
from fovea_trainer.batches.datum_decoding import DatumSize
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.ranks.control_group import (
    MessagePickler,
    MessageUnpickler,
    MetadataUnpickler,
    NotPlain,
    exchange_plain_data,
)
from fovea_trainer.ranks.peer_monitor import Peer
from fovea_trainer.weights.torch_checkpoint import PlainReader, TensorPlanner


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def attacks(target: Path) -> dict[str, Any]:
    """Returns objects, by refused name, with pickles that create `target` or obtain a function that could."""
    return {
        "posix.system": Call(os.system, f"touch {target}"),
        "builtins.eval": Call(eval, f"open({str(target)!r}, 'w')"),
        "subprocess.Popen": Call(subprocess.Popen, ["touch", str(target)]),
        "functools.partial": Call(functools.partial, os.mkdir, str(target)),
        "builtins.getattr": Call(getattr, "", "format"),
        "builtins.type": Call(type, "name", (), {}),
        "torch.storage._load_from_bytes": torch.UntypedStorage(1),
        "collections.namedtuple": Call(collections.namedtuple, "n", "a"),
        "builtins.SystemExit": SystemExit(1),
    }


NAMES = sorted(attacks(Path("x")))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reader", [MetadataUnpickler, MessageUnpickler])
def test_an_attack_is_refused_by_name(name: str, reader: type[pickle.Unpickler], tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(NotPlain, match=name.replace(".", r"\.")):
        reader(io.BytesIO(pickle.dumps({"a": [attacks(target)[name]]}))).load()
    assert not target.exists()


@pytest.mark.parametrize(
    "name",
    [
        "fovea_trainer.ranks.rank_launcher tempfile.mkdtemp",  # dotted: reaches an attribute of a module's import
        "fovea_trainer.ranks.rank_launcher asyncio.create_subprocess_exec",
        "fovea_trainer.ranks.rank_launcher _exit",  # one of our functions
        "fovea_trainer.ranks.control_group Enum",  # creates classes
        "torch.distributed.checkpoint.filesystem FileSystemReader",
        "torch load",
        "torch hub.load",
        "builtins exec",
    ],
)
@pytest.mark.parametrize("reader", [MetadataUnpickler, MessageUnpickler])
def test_what_is_reached_through_known_modules_is_refused(name: str, reader: type[pickle.Unpickler]) -> None:
    module, attribute = (part.encode() for part in name.split())
    for pickled in (
        b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(attribute)]) + attribute + b"\x93.",
        b"c" + module + b"\n" + attribute + b"\n.",
    ):
        with pytest.raises(NotPlain, match="which plain data does not need"):
            reader(io.BytesIO(pickled)).load()


@pytest.mark.parametrize("reader", [MetadataUnpickler, MessageUnpickler])
def test_members_of_enums_may_be_read_by_getattr_and_nothing_else(reader: type[pickle.Unpickler]) -> None:
    """Python 3.11.2 of Debian 12 pickles members this way, including those in the metadata of DCP's checkpoints."""

    def pickled(name: bytes) -> bytes:
        planner = b"ctorch.distributed.checkpoint.planner\nWriteItemType\n"
        return b"cbuiltins\ngetattr\n(" + planner + b"V" + name + b"\ntR."

    assert reader(io.BytesIO(pickled(b"TENSOR"))).load() is WriteItemType.TENSOR
    with pytest.raises(KeyError):
        reader(io.BytesIO(pickled(b"__init__"))).load()
    with pytest.raises(NotPlain, match="which plain data does not need"):
        reader(io.BytesIO(b"cbuiltins\ngetattr\n(Vtext\nVformat\ntR.")).load()


def test_torchs_collectives_of_objects_refuse_it_too(tmp_path: Path, install: None) -> None:
    """This covers the received data of gather_object, all_gather_object and broadcast_object_list, also within DCP."""
    target = tmp_path / "made"
    raw = bytearray(pickle.dumps(Call(os.mkdir, str(target))))
    with pytest.raises(NotPlain, match=r"posix\.mkdir"):
        distributed_c10d._tensor_to_object(torch.frombuffer(raw, dtype=torch.uint8), len(raw), None)
    assert not target.exists()


@pytest.mark.parametrize(
    "said",
    [
        command_queue.Heartbeat(),
        command_queue.CreateModel("m", LoraSettings(4, 8.0, 1, True, False, True, False)),
        command_queue.ForwardBackward("m", b"header", True, False, [b"datum"], [DatumSize(3, 4)]),
        command_queue.LoadState("m", "/uri", True),
        Peer(1, 0),
        weights_pb2.Snapshot(snapshot_id="s", size_bytes=3),
        {"a.safetensors": bytes(1000)},
        [{3: np.arange(6, dtype=np.float32).reshape(2, 3)}, {"loss:sum": np.float64(2.5)}, None, {1, 2}],
        [np.zeros((2, 3), np.float32)[:, ::2], torch.Size([1, 2]), torch.bfloat16],
        FileNotFoundError(2, "no such file"),
    ],
    ids=lambda said: type(said).__name__,
)
def test_messages_between_ranks_arrive(said: Any, install: None) -> None:
    tensor, size = distributed_c10d._object_to_tensor(said, torch.device("cpu"), None)
    heard = distributed_c10d._tensor_to_object(tensor, int(size), None)
    assert repr(heard) == repr(said)


def test_errors_arrive_as_themselves_and_those_of_others_as_their_text() -> None:
    class Theirs(Exception):
        pass

    told = io.BytesIO()
    MessagePickler(told).dump((FeatureEvicted("gone", digest="abc"), Theirs("no such bucket")))
    ours, theirs = MessageUnpickler(io.BytesIO(told.getvalue())).load()
    assert (type(ours), ours.metadata) == (FeatureEvicted, {"digest": "abc"})
    assert repr(theirs) == "RuntimeError('Theirs: no such bucket')"


def test_which_rank_could_not_write_a_checkpoint_arrives() -> None:
    told = io.BytesIO()
    MessagePickler(told).dump(CheckpointException("write", {1: _wrap_exception(OSError(28, "full"))}))
    heard = MessageUnpickler(io.BytesIO(told.getvalue())).load()
    assert isinstance(heard, CheckpointException)
    (failure, _), errno = heard.failures[1], 28
    assert (type(failure), failure.args) == (OSError, (errno, "full"))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the restricted unpickler as in a rank, for one test."""
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    exchange_plain_data()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint that torch itself wrote."""
    folder = tmp_path / "dcp"
    save({"weights": {"a": torch.arange(6.0)}}, storage_writer=FsspecWriter(str(folder)), no_dist=True)
    return folder


def test_a_checkpoint_is_read(checkpoint: Path) -> None:
    state = {"weights": {"a": torch.zeros(6)}}
    load(state, storage_reader=PlainReader(str(checkpoint)), planner=TensorPlanner(), no_dist=True)
    assert torch.equal(state["weights"]["a"], torch.arange(6.0))


@pytest.mark.parametrize("name", NAMES)
def test_a_description_that_is_an_attack_is_refused_by_name(checkpoint: Path, name: str, tmp_path: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(attacks(tmp_path / "made")[name]))
    with pytest.raises(InvalidInput, match=f"not the metadata of a checkpoint: it names {name}"):
        PlainReader(str(checkpoint)).read_metadata()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda metadata: pickle.dumps({"a": 1}), "refers to files outside its own folder"),
        (lambda metadata: pickle.dumps(_elsewhere(metadata)), "refers to files outside its own folder"),
        (lambda metadata: pickle.dumps(metadata)[:-30], "not the metadata of a checkpoint"),
        (lambda metadata: b"", "not the metadata of a checkpoint"),
    ],
)
def test_a_description_that_is_none_is_refused(
    checkpoint: Path, change: Callable[[Metadata], bytes], said: str
) -> None:
    file = checkpoint / ".metadata"
    file.write_bytes(change(PlainReader(str(checkpoint)).read_metadata()))
    with pytest.raises(InvalidInput, match=said):
        PlainReader(str(checkpoint)).read_metadata()


def test_an_entry_that_is_no_tensor_is_not_unpickled(checkpoint: Path, tmp_path: Path) -> None:
    """The metadata describe a tensor to readers of the description, but the entry is a pickle."""
    target = tmp_path / "made"
    state: dict[str, Any] = {"a": Call(os.mkdir, str(target))}
    save(state, storage_writer=FsspecWriter(str(checkpoint)), no_dist=True)
    assert not isinstance(PlainReader(str(checkpoint)).read_metadata().state_dict_metadata["a"], TensorStorageMetadata)
    with pytest.raises(BaseException, match="a is not a tensor"):
        load({"a": 1}, storage_reader=PlainReader(str(checkpoint)), planner=TensorPlanner(), no_dist=True)
    assert not target.exists()


def _elsewhere(metadata: Metadata) -> Metadata:
    (index,) = metadata.storage_data
    info: _StorageInfo = metadata.storage_data[index]
    metadata.storage_data[index] = _StorageInfo("../../other/__0_0.distcp", info.offset, info.length)
    return metadata
