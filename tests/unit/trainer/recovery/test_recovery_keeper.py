"""The order of durable points: the real keeper, queue and writer, with slow or unwritable storage."""

import asyncio
import errno
import multiprocessing
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from fovea.api.v1 import weights_pb2
from fovea.runtime import durable
from fovea.wire.errors import NotFound, StorageBehind, Unavailable
from fovea_trainer.command_queue import CommandQueue, KeepState, Shutdown, resolve
from fovea_trainer.model.lora import LoraInjector, LoraSettings
from fovea_trainer.model.model_family import LoraTarget, Role
from fovea_trainer.model.trained_model import AdapterModel
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.recovery import recovery_keeper
from fovea_trainer.recovery.recovery_folder import RecoveryFolder
from fovea_trainer.recovery.recovery_keeper import RecoveryKeeper
from fovea_trainer.recovery.recovery_writer import RecoveryWriter
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.weights import checkpoint_folder
from fovea_trainer.weights.snapshot_store import PACKED, SnapshotStore, StoredSnapshot, packed, specs_of
from tests.waiting import eventually

CPU = torch.device("cpu")
LORA = LoraSettings(2, 32.0, 1, True, True, False, False)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclass
class Engine:
    """The parts of a `TrainingEngine` that the keeper uses, with adapters of one small module."""

    adapters: SnapshotStore
    folder: InitVar[RecoveryFolder]
    models: dict[str, AdapterModel] = field(default_factory=dict)

    def __post_init__(self, folder: RecoveryFolder) -> None:
        self.recovery = RecoveryWriter(folder, ControlGroup(), CPU, "base", {}, {}, self.adapters)


class Trainer:
    """A trainer's rank 0: commands run on a thread, which records the durable points at each copy.

    Args:
        root: Folder of recovery data.
        lag_s: The value of `--recovery-lag-s`.
    """

    def __init__(self, root: Path, lag_s: float = 0.0) -> None:
        self.folder = RecoveryFolder(str(root))
        self.engine = Engine(SnapshotStore(2**20), self.folder)
        self.queue = CommandQueue(60)
        self.queue.open()
        settings = TrainerSettings(model="base", recovery_lag_s=lag_s)
        self.keeper = RecoveryKeeper(settings, self.queue, lambda: self.engine.recovery)
        self.copied: list[tuple[str, int, list[str]]] = []
        self.snapshots: list[str] = []
        self.before_copy: Callable[[], None] = lambda: None
        self._gates: list[threading.Event] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def create(self, model_id: str) -> None:
        targets = [LoraTarget("model.layers.0.mlp.up_proj", nn.Linear(6, 8, bias=False), Role.MLP, False)]
        self.engine.models[model_id] = AdapterModel(
            model_id, LORA, targets, LoraInjector(targets), CPU, torch.float32, None
        )

    def change(self, model_id: str, *seq_ids: int) -> None:
        """Changes a model, as steps do."""
        for seq_id in seq_ids:
            self.engine.recovery.changed(model_id, seq_id, {"seq_id": seq_id})
            self.keeper.changed(model_id)

    async def take(self, model_id: str, snapshot_id: str) -> None:
        """Takes a snapshot, as TakeSnapshot does without a path."""
        async with self.keeper.snapshotting(model_id, snapshot_id, self.engine.models[model_id].snapshot_bytes):
            self.freeze(model_id, snapshot_id)

    def freeze(self, model_id: str, snapshot_id: str) -> None:
        """Copies the weights, as the rank's thread does."""
        tensors = dict(self.engine.models[model_id].weights.named(self.engine.models[model_id].weights.flat.detach()))
        specs = specs_of(tensors)
        identity = weights_pb2.Snapshot(snapshot_id=snapshot_id, model_id=model_id)
        held = StoredSnapshot(identity, {PACKED: packed(specs, tensors.values())}, specs, LORA.message())
        self.engine.adapters.put(held)
        self.snapshots.append(snapshot_id)

    def hold(self) -> threading.Event:
        """Makes storage slow: nothing is written until the returned event is set."""
        gate = threading.Event()
        self._gates.append(gate)
        self.engine.recovery.in_order(gate.wait)
        return gate

    def durable(self, **wanted: int) -> bool:
        """Returns whether exactly these commands are in the points, according to both the keeper and the folder."""
        found = {model_id: self.folder.newest(model_id) for model_id in wanted}
        kept = {model_id: each[1].seq_id for model_id, each in found.items() if each}
        return self.keeper.durable_seq_ids == kept == wanted

    def stop(self) -> None:
        for gate in self._gates:  # for a test that failed
            gate.set()
        self.queue.shut_down()
        self._thread.join()
        self.engine.recovery.close()

    def _serve(self) -> None:
        while not isinstance((job := self.queue.next()[0]).command, Shutdown):
            assert isinstance(job.command, KeepState)
            model_id = job.command.model_id
            self.before_copy()
            if model_id not in self.engine.models:
                resolve(job.result, error=NotFound(f"{model_id} is gone"))
                continue
            kept = self.engine.recovery.write_state(self.engine.models[model_id], job.command.change_count)
            if kept is None:
                resolve(job.result)
                continue
            self.copied.append((model_id, kept.seq_id, list(filter(self.folder.find_snapshot, self.snapshots))))
            resolve(job.result, kept)


@pytest.fixture
async def trainer(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Trainer]:
    made = Trainer(tmp_path / "recovery", *getattr(request, "param", ()))
    for model_id in ("a", "b"):
        made.create(model_id)
    running = asyncio.create_task(made.keeper.run())
    yield made
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    made.stop()


def block(root: Path) -> None:
    """Replaces the recovery folder by a file, so that writes fail."""
    if root.exists():
        root.rmdir()
    root.write_text("no folder can be made here")


async def test_snapshots_come_before_states_and_what_changed_first_comes_first(trainer: Trainer) -> None:
    slow = trainer.hold()
    await trainer.take("b", "b@1")
    await eventually(lambda: trainer.engine.adapters.get("b@1") is not None)
    trainer.change("a", 1, 2)
    trainer.change("b", 1)
    await trainer.take("a", "a@1")
    trainer.change("a", 3)
    slow.set()
    await eventually(lambda: trainer.durable(a=3, b=1))
    assert trainer.copied == [("b", 1, ["b@1"]), ("a", 3, ["b@1", "a@1"])]


async def test_changes_while_storage_is_busy_are_written_once_and_delay_no_caller(trainer: Trainer) -> None:
    await eventually(lambda: not trainer.copied)
    slow = trainer.hold()
    trainer.change("a", 1)
    await eventually(lambda: len(trainer.copied) == 1)
    again = trainer.hold()
    trainer.change("a", 2, 3, 4)
    trainer.change("b", 1)
    slow.set()
    await eventually(lambda: len(trainer.copied) == 2)
    trainer.change("a", 5, 6)  # it keeps changing
    again.set()
    await eventually(lambda: trainer.durable(a=6, b=1))
    assert [each[:2] for each in trainer.copied] == [("a", 1), ("b", 1), ("a", 6)], (
        "b had no point, so it must come first"
    )


@pytest.mark.parametrize("trainer", [(3600.0,)], indirect=True)
async def test_a_lag_delays_points_unless_a_caller_waits(trainer: Trainer) -> None:
    trainer.change("a", 1)
    await eventually(lambda: trainer.durable(a=1))
    trainer.change("a", 2)
    trainer.change("b", 1)
    await eventually(lambda: trainer.durable(a=1, b=1))
    seq_id, size_bytes = await trainer.keeper.flush("a")
    assert (seq_id, size_bytes) == (2, trainer.folder.size_bytes("a"))
    assert [each[:2] for each in trainer.copied] == [("a", 1), ("b", 1), ("a", 2)]


async def test_storage_that_fails_costs_nothing_but_time(trainer: Trainer, tmp_path: Path) -> None:
    await trainer.keeper.stored("a")  # the sweep at the start is over
    in_the_way = tmp_path / "recovery"
    block(in_the_way)
    await trainer.take("a", "a@1")
    trainer.change("a", 1)
    with pytest.raises(Unavailable, match="cannot be made durable"):
        await trainer.keeper.flush("a")
    in_the_way.unlink()
    seq_id, _ = await trainer.keeper.flush("a")
    assert seq_id == 1
    assert trainer.durable(a=1)
    assert trainer.copied == [("a", 1, ["a@1"])]


async def test_pending_writes_of_a_freed_model_are_dropped(trainer: Trainer) -> None:
    slow = trainer.hold()
    trainer.change("b", 1)
    await eventually(lambda: len(trainer.copied) == 1)
    await trainer.take("a", "a@1")
    trainer.change("a", 1)
    del trainer.engine.models["a"]
    trainer.engine.recovery.forget("a")
    trainer.keeper.forget("a")
    slow.set()
    await eventually(lambda: trainer.durable(b=1))
    await trainer.keeper.flush("b")
    assert await trainer.keeper.stored("a") == (0, 0)
    assert [each[0] for each in trainer.copied] == ["b"]


async def test_a_model_that_is_freed_while_its_point_is_written_is_no_failure_of_storage(trainer: Trainer) -> None:
    slow = trainer.hold()
    trainer.change("a", 1)
    await eventually(lambda: len(trainer.copied) == 1)
    del trainer.engine.models["a"]
    trainer.engine.recovery.forget("a")
    trainer.keeper.forget("a")
    waits = asyncio.create_task(trainer.keeper.flush("b"))
    trainer.change("b", 1)
    slow.set()
    assert (await waits)[0] == 1
    assert trainer.durable(b=1)


async def test_snapshots_that_wait_take_no_more_than_their_bound_and_models_are_told_to_wait_in_turn(
    trainer: Trainer,
) -> None:
    size_bytes = trainer.engine.models["a"].snapshot_bytes
    trainer.engine.adapters.max_bytes = 2 * size_bytes
    slow = trainer.hold()
    await trainer.take("a", "a@1")
    await trainer.take("a", "a@2")
    for model_id in ("b", "a"):
        with pytest.raises(StorageBehind, match="snapshot-memory-mib"):
            await trainer.take(model_id, f"{model_id}@3")
    assert trainer.keeper.waiting_bytes == 2 * size_bytes
    slow.set()
    await eventually(lambda: not trainer.keeper.waiting_bytes)
    again = trainer.hold()
    trainer.engine.adapters.max_bytes = size_bytes
    with pytest.raises(StorageBehind):
        await trainer.take("a", "a@3")  # b has asked before it
    await trainer.take("b", "b@3")
    again.set()
    await eventually(lambda: not trainer.keeper.waiting_bytes)
    await trainer.take("a", "a@3")
    await trainer.keeper.flush("a")
    assert list(filter(trainer.folder.find_snapshot, trainer.snapshots)) == ["a@1", "a@2", "b@3", "a@3"]


async def test_storage_that_fails_makes_no_snapshot_wait(trainer: Trainer, tmp_path: Path) -> None:
    await trainer.keeper.stored("a")
    block(tmp_path / "recovery")
    trainer.engine.adapters.max_bytes = trainer.engine.models["a"].snapshot_bytes
    await trainer.take("a", "a@1")
    with pytest.raises(Unavailable):
        await trainer.keeper.flush("a")
    for number in (2, 3, 4):
        await trainer.take("a", f"a@{number}")
    assert trainer.keeper.waiting_bytes == 0


async def test_storage_that_does_not_return_counts_as_failing_until_it_does(trainer: Trainer) -> None:
    """Each model may change and be sampled meanwhile; a caller that needs a durable point gets an error."""
    state = trainer.engine.models["a"].state_bytes
    await trainer.keeper.stored("a")  # the sweep at the start is over
    trainer.keeper._speed.most_lag_s = trainer.keeper._speed.least_patience_s = 0.05  # 3 MB, until storage is measured
    trainer.engine.adapters.max_bytes = trainer.engine.models["a"].snapshot_bytes
    hangs = trainer.hold()
    async with trainer.keeper.changing("a", 2**30):
        trainer.change("a", 1)
    with pytest.raises(StorageBehind):
        async with trainer.keeper.changing("b", 2**30):
            raise AssertionError("it was admitted")
    await eventually(lambda: "has not returned for" in trainer.keeper.failure)
    async with trainer.keeper.changing("b", state):
        trainer.change("b", 1)
    for number in (1, 2, 3):
        await trainer.take("b", f"b@{number}")
    assert trainer.keeper.waiting_bytes == 0, "memory must not keep a snapshot for storage that may never return"
    assert trainer.keeper.lag_seconds > 0
    with pytest.raises(Unavailable, match="has not returned for"):
        await trainer.keeper.flush("b")
    with pytest.raises(Unavailable, match="has not returned for"):
        await trainer.keeper.stored("c")
    await trainer.keeper.remove_model("c")  # it is removed later
    trainer.keeper._speed.least_patience_s = 60.0
    hangs.set()
    await eventually(lambda: trainer.durable(a=1, b=1) and not trainer.keeper.failure)


async def test_a_state_waits_for_a_snapshot_that_is_being_taken_before_it(trainer: Trainer) -> None:
    async with trainer.keeper.snapshotting("a", "a@1", 1):
        trainer.change("a", 1)
        await trainer.keeper.stored("a")  # its turn has come
        trainer.freeze("a", "a@1")
    await eventually(lambda: trainer.durable(a=1))
    assert trainer.copied == [("a", 1, ["a@1"])]


async def test_a_snapshot_of_the_newest_point_shares_its_file_and_outlives_it(trainer: Trainer, tmp_path: Path) -> None:
    def file_of(*names: str) -> os.stat_result:
        return tmp_path.joinpath("recovery", "a", *names, "adapter_model.safetensors").stat()

    trainer.change("a", 1)
    await eventually(lambda: trainer.durable(a=1))
    await trainer.take("a", "later")  # after the point
    await trainer.keeper.flush("a")
    slow = trainer.hold()
    trainer.change("a", 2)
    await trainer.take("a", "before")  # before the point
    slow.set()
    await trainer.keeper.flush("a")
    assert trainer.durable(a=2)
    assert file_of("snapshots", "before").st_ino == file_of("2").st_ino
    assert file_of("snapshots", "later").st_nlink == 1, "its point must be gone"
    slow = trainer.hold()
    trainer.change("a", 3)
    await trainer.take("a", "outgrown")
    trainer.change("a", 4)
    slow.set()
    await trainer.keeper.flush("a")
    assert file_of("snapshots", "outgrown").st_nlink == 1, "a separate file"
    assert file_of("snapshots", "before").st_nlink == 1
    assert [each[2] for each in trainer.copied] == [[], ["later"], ["later", "before", "outgrown"]]


async def test_a_state_that_has_outgrown_a_snapshot_comes_after_it(trainer: Trainer) -> None:
    """The model changes between the keeper's check and the copy."""
    slow = trainer.hold()
    trainer.change("b", 1)  # it occupies storage
    await eventually(lambda: len(trainer.copied) == 1)
    trainer.change("a", 1)
    await trainer.take("a", "a@1")
    trainer.before_copy = lambda: trainer.engine.recovery.changed("a", 2, {"seq_id": 2})
    slow.set()
    await trainer.keeper.flush("a")
    assert trainer.copied[1:] == [("a", 2, ["a@1"])]


async def test_a_durable_model_waits_while_storage_is_behind(trainer: Trainer) -> None:
    state = trainer.engine.models["a"].state_bytes
    trainer.create("c")
    trainer.keeper._speed.most_lag_s = 2.5 * state / 6e7  # until storage is measured, the keeper assumes 100 MB/s
    slow = trainer.hold()
    for step in (1, 2):
        for model_id in ("a", "b"):
            async with trainer.keeper.changing(
                model_id, state
            ):  # it may change again, since its state will be written anyway
                trainer.change(model_id, step)
    with pytest.raises(StorageBehind, match="recovery-most-lag-s"):
        async with trainer.keeper.changing("c", state):
            raise AssertionError("it was admitted")
    slow.set()
    await trainer.keeper.flush("a")
    await trainer.keeper.flush("b")
    async with trainer.keeper.changing("c", state):
        trainer.change("c", 1)
    await eventually(lambda: trainer.durable(a=2, b=2, c=1))


@pytest.mark.parametrize("trainer", [(3600.0,)], indirect=True)
async def test_states_that_are_put_off_make_no_model_wait(trainer: Trainer) -> None:
    state = trainer.engine.models["a"].state_bytes
    trainer.create("c")
    for step in (1, 2):
        for model_id in ("a", "b"):
            async with trainer.keeper.changing(model_id, state):
                trainer.change(model_id, step)
            await eventually(lambda model_id=model_id: model_id in trainer.keeper.durable_seq_ids)
    trainer.keeper._speed.most_lag_s = 0.0
    async with trainer.keeper.changing("c", state):
        trainer.change("c", 1)
    await eventually(lambda: trainer.durable(a=1, b=1, c=1))


@pytest.mark.slow
async def test_every_model_gets_points_however_many_are_sampled_after_each_step(trainer: Trainer) -> None:
    """Storage is always too slow here: each model takes its next step as soon as its last snapshot is admitted."""
    model_ids, steps = [f"m{number}" for number in range(6)], 16
    for model_id in model_ids:
        trainer.create(model_id)
    most = trainer.engine.adapters.max_bytes = 4 * trainer.engine.models["m0"].snapshot_bytes
    held: list[int] = []

    async def train(model_id: str) -> None:
        for step in range(1, steps + 1):
            trainer.change(model_id, step)
            while True:
                try:
                    await trainer.take(model_id, f"{model_id}@{step}")
                    break
                except StorageBehind:
                    held.append(trainer.keeper.waiting_bytes)
                    await asyncio.sleep(0.001)

    await asyncio.gather(*map(train, model_ids))
    while_training = list(trainer.copied)
    for model_id in model_ids:
        await trainer.keeper.flush(model_id)
    assert trainer.durable(**dict.fromkeys(model_ids, steps))
    assert most / 2 < max(held) <= most
    for model_id in model_ids:
        kept = [seq_id for copied, seq_id, _ in while_training if copied == model_id]
        gaps = [after - before for before, after in pairwise([0, *kept, steps])]
        assert max(gaps) <= 6, f"points of {model_id}: {kept}"


async def test_a_failed_step_gives_its_admission_back(trainer: Trainer) -> None:
    state = trainer.engine.models["a"].state_bytes
    trainer.keeper._speed.most_lag_s = 1.5 * state / 6e7  # room for one state; the keeper assumes 100 MB/s
    slow = trainer.hold()
    with pytest.raises(RuntimeError):
        async with trainer.keeper.changing("a", state):
            raise RuntimeError("the step failed")
    async with trainer.keeper.changing("b", state):
        trainer.change("b", 1)
    with pytest.raises(StorageBehind):
        async with trainer.keeper.changing("a", state):
            raise AssertionError("it was admitted")
    slow.set()
    await trainer.keeper.flush("b")


def weights_of(root: Path, model_id: str, seq_id: int) -> dict[str, Tensor]:
    return load_file(root / model_id / str(seq_id) / "adapter_model.safetensors")


async def step(trainer: Trainer, model_id: str, seq_id: int) -> dict[str, Tensor]:
    """Changes the weights of a model, as optim_step does. Returns them."""
    model = trainer.engine.models[model_id]
    async with trainer.keeper.changing(model_id, model.state_bytes):
        model.weights.flat.detach().uniform_()
        trainer.change(model_id, seq_id)
    return {name: part.clone() for name, part in model.weights.named(model.weights.flat.detach())}


async def test_one_state_is_copied_while_another_is_written_and_no_more(trainer: Trainer, tmp_path: Path) -> None:
    trainer.create("c")
    slow = trainer.hold()
    expected = {model_id: await step(trainer, model_id, 1) for model_id in ("a", "b", "c")}
    await eventually(lambda: len(trainer.copied) == 2)
    await eventually(lambda: trainer.keeper._speed.owed_bytes == 2 * trainer.engine.models["a"].state_bytes)
    assert trainer.keeper.durable_seq_ids == {}
    again = trainer.hold()
    slow.set()
    await eventually(lambda: len(trainer.copied) == 3)
    assert trainer.folder.newest("a") is not None, "the third copy must wait until its buffer is free"
    again.set()
    await eventually(lambda: trainer.durable(a=1, b=1, c=1))
    assert [each[:2] for each in trainer.copied] == [("a", 1), ("b", 1), ("c", 1)]
    for model_id, weights in expected.items():
        stored = weights_of(tmp_path / "recovery", model_id, 1)
        assert stored.keys() == weights.keys()
        assert all(torch.equal(stored[name], part) for name, part in weights.items())


async def test_large_states_are_copied_one_at_a_time(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy would wait for the write before it, and delay all commands."""
    monkeypatch.setattr(recovery_keeper, "AHEAD_BYTES", trainer.engine.models["a"].state_bytes - 1)
    slow = trainer.hold()
    for model_id in ("a", "b"):
        await step(trainer, model_id, 1)
    await eventually(lambda: trainer.keeper._speed.owed_bytes > 0)
    await asyncio.sleep(0.1)  # enough for a second copy, if one were asked for
    assert trainer.copied == [("a", 1, [])]
    slow.set()
    await eventually(lambda: trainer.durable(a=1, b=1))


async def test_a_state_whose_sync_fails_is_not_durable(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await step(trainer, "a", 1)
    await eventually(lambda: trainer.durable(a=1))
    real = os.fdatasync

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(durable, "PIECE_BYTES", 64)
    monkeypatch.setattr(os, "fdatasync", broken)
    for model_id in ("a", "b"):
        await step(trainer, model_id, 2)
    with pytest.raises(Unavailable, match="the disk is broken"):
        await trainer.keeper.flush("a")
    await trainer.keeper.stored("a")  # after both writes
    assert trainer.durable(a=1)
    assert trainer.folder.newest("b") is None
    stored = weights_of(tmp_path / "recovery", "a", 1)
    assert all(torch.equal(stored[name], part) for name, part in first.items())
    monkeypatch.setattr(os, "fdatasync", real)
    await trainer.keeper.flush("a")
    await trainer.keeper.flush("b")
    assert trainer.durable(a=2, b=2)


def _die_before_the_folder_has_its_name(root: Path) -> None:
    """Writes a point, and ends the process when its data is synced and its folder has not its name yet."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = Trainer(root)
    made.create("a")
    recovery = made.engine.recovery
    for seq_id in (1, 2):
        recovery.changed("a", seq_id, {})
        if seq_id == 2:
            checkpoint_folder.Folder.move_to = lambda *_: os._exit(9)  # type: ignore[method-assign]
        pending = recovery.write_state(made.engine.models["a"])
        assert pending is not None
        pending.written.result()


@pytest.mark.slow
def test_a_kill_before_the_folder_has_its_name_leaves_the_earlier_state(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_die_before_the_folder_has_its_name, args=(tmp_path / "recovery",)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    folder, model = RecoveryFolder(str(tmp_path / "recovery")), tmp_path / "recovery" / "a"
    assert {path.name.partition(".")[0] for path in model.iterdir()} == {"1", "2"}, "the data of both is on the disk"
    folder.sweep("a")
    assert [path.name for path in model.iterdir()] == ["1"]
    found = folder.newest("a")
    assert found is not None
    assert found[1].seq_id == 1
