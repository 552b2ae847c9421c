"""A gateway frees the objects of an earlier one that was killed or stopped, and no others."""

import asyncio
from pathlib import Path

import pytest

from fovea.wire.errors import Unavailable
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.keeping import KeepingTrainer
from tests.contract.gateway.requests import Rest
from tests.contract.gateway.test_checkpoints import save
from tests.waiting import eventually


async def test_a_session_that_ends_while_the_gateway_stops_leaves_no_model(stand: Stand, rest: Rest) -> None:
    kept = await rest.create_model()
    async with stand.http() as http:
        other = Rest(http)
        await other.open_session()
        model_id = await other.create_model()
        await eventually(lambda: kept in stand.trainer.models and model_id in stand.trainer.models)
        await other.snapshot(model_id, 1)
        await eventually(lambda: f"{model_id}@1" in stand.sampler.adapters)
        stand.trainer.open.clear()
        await other.optim_step(model_id, 2)
        await eventually(lambda: "OptimStep" in stand.trainer.names())
        # Its model is freed once the running command has ended; the gateway stops before that.
        await other.ok(f"sessions/{other.session_id}/finish", reason={"type": "success"}, detail=None)
    await stand.stop()
    stand.trainer.open.set()
    await stand.start()
    await eventually(lambda: list(stand.trainer.models) == [kept])
    await eventually(lambda: not stand.sampler.adapters)


async def test_a_model_that_is_over_and_still_held_is_freed(stand: Stand, rest: Rest) -> None:
    model_id, kept = await rest.create_model(0), await rest.create_model(1)
    stand.trainer.models["somebody-elses"] = {"step": 0, "gradients": 0, "is_full": False}
    gateway = stand.gateway
    assert gateway is not None
    # The row is written before the trainer's command, and a kill may come between.
    await gateway.components.models.end(await gateway.components.models.load(model_id), "its session is over")
    await gateway.components.orphans.sweep(with_folders=False)
    assert set(stand.trainer.models) == {kept, "somebody-elses"}


async def test_an_adapter_that_a_sampler_was_too_busy_to_drop_is_dropped_later(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await rest.snapshot(model_id, 1)
    await eventually(lambda: stand.sampler.adapters == {f"{model_id}@1"})
    stand.sampler.failures["DropSnapshot"] = [Unavailable("not now")]
    gateway = stand.gateway
    assert gateway is not None
    await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"}, detail=None)
    await eventually(lambda: not stand.sampler.failures["DropSnapshot"])
    await eventually(lambda: gateway.components.models.find(model_id) is None)
    assert stand.sampler.adapters
    await gateway.components.orphans.sweep(with_folders=False)
    assert not stand.sampler.adapters


async def test_an_adapter_that_an_earlier_gateway_had_pushed_is_dropped_with_its_session(
    stand: Stand, rest: Rest
) -> None:
    model_id = await rest.create_model()
    await rest.snapshot(model_id, 1)
    snapshot_id = f"{model_id}@1"
    await eventually(lambda: stand.sampler.adapters == {snapshot_id})
    stand.sampler.adapters.clear()
    await stand.stop()
    await stand.start()
    stand.sampler.adapters.add(snapshot_id)  # a push that was started for the previous gateway
    gateway = stand.gateway
    assert gateway is not None
    samplers = gateway.components.base_models.default.samplers
    await eventually(lambda: any(snapshot_id in sampler.adapters for sampler in samplers.up))
    await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"}, detail=None)
    await eventually(lambda: not stand.sampler.adapters)


async def test_an_adapter_that_a_gateway_pushed_without_its_database_is_dropped_after_its_session(
    stand: Stand, rest: Rest
) -> None:
    """Such a gateway, cut off while another one took over, could not write the snapshot's row. An adapter with files
    stays: other sessions may sample from it.
    """
    model_id = await rest.create_model()
    sampling = await rest.ok(
        "create_sampling_session", session_id=rest.session_id, sampling_session_seq_id=0,
        model_path=await save(rest, model_id, 1, "named", "save_weights_for_sampler"),
    )  # fmt: skip
    await rest.sample(sampling["sampling_session_id"], 1)
    await eventually(lambda: len(stand.sampler.adapters) == 1)
    (kept,) = stand.sampler.adapters
    await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"}, detail=None)
    stand.sampler.adapters.add(f"{model_id}@77")
    gateway = stand.gateway
    assert gateway is not None
    samplers = gateway.components.base_models.default.samplers
    await eventually(lambda: any(f"{model_id}@77" in sampler.adapters for sampler in samplers.up))
    await gateway.components.orphans.sweep(with_folders=False)
    assert stand.sampler.adapters == {kept}


def plant(folder: Path) -> None:
    """Creates a folder with a file."""
    folder.mkdir(parents=True)
    (folder / "part").write_text("x")


def below(folder: Path) -> set[Path]:
    """Lists the files of a folder."""
    return set(folder.iterdir())


async def test_folders_that_no_checkpoint_names_are_removed(tmp_path: Path) -> None:
    root, foreign = tmp_path / "kept", tmp_path / "kept" / "sess-ffffffffffffffff_train_0" / "weights" / "other"
    stand = Stand(tmp_path)
    stand.trainer = KeepingTrainer(lambda: stand.samplers)
    async with running(stand, checkpoint_dir=str(root)), stand.http() as http:
        rest = Rest(http)
        await rest.open_session()
        model_id = await rest.create_model()
        saved = await rest.ok("save_weights", model_id=model_id, seq_id=1, path="good")
        await rest.result(saved["request_id"])
        good = Path(stand.trainer.of("SaveState")[0].uri)
        for name in ("lost.0123abcd", "lost.0123abcd.tmp-1", "lost.0123abce.old-1", "lost.0123abcf.plain"):
            plant(good.parent / name)
        plant(foreign)
        # A folder that is being written now, however long this takes.
        stand.trainer.open.clear()
        running_save = await rest.ok("save_weights", model_id=model_id, seq_id=2, path="running")
        await eventually(lambda: len(stand.trainer.of("SaveState")) == 2)
        draft = Path(stand.trainer.of("SaveState")[1].uri + ".tmp-2")
        plant(draft)
        gateway = stand.gateway
        assert gateway is not None
        await gateway.components.orphans.remove_folders()
        assert len(below(good.parent)) == 6, "the first sweep removes nothing: a row may still follow"
        await gateway.components.orphans.remove_folders()
        assert below(good.parent) == {good, draft}
        assert below(foreign), "their rows are in another database"
        stand.trainer.open.set()
        assert "error" not in await rest.result(running_save["request_id"])


async def test_nothing_of_a_session_that_is_over_stays_in_memory(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await rest.result((await rest.optim_step(model_id, 1))["request_id"])
    await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"}, detail=None)
    gateway = stand.gateway
    assert gateway is not None
    await eventually(lambda: gateway.components.models.find(model_id) is None)
    assert (await rest.post("session_heartbeat", session_id=rest.session_id)).status_code == 410
    assert (await rest.post("get_info", model_id=model_id)).status_code == 200
    assert (await rest.forward_backward(model_id, 2)).status_code == 410
    assert gateway.components.models.find(model_id) is None
    await eventually(lambda: rest.session_id not in gateway.components.sessions._sessions)


async def test_a_moved_state_folder_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows name their files, so the trainer refuses the checkpoints of a backup that is restored elsewhere."""
    stand = Stand(tmp_path)
    stand.trainer = KeepingTrainer(lambda: stand.samplers)
    async with running(stand, checkpoint_dir=str(tmp_path / "before")), stand.http() as http:
        rest = Rest(http)
        await rest.open_session()
        path = await save(rest, await rest.create_model(), 1, "good")
        assert path
        await stand.stop()
        await stand.start()
        await asyncio.sleep(0.5)
        assert "cannot be loaded" not in caplog.text
        await stand.stop()
        await stand.start(checkpoint_dir=str(tmp_path / "after"))
        await eventually(lambda: "cannot be loaded" in caplog.text)
    assert f"saved outside {tmp_path / 'after'}: 1, such as {tmp_path / 'before'}/" in caplog.text
