"""Restart of a trainer with recovery: commands wait and then continue without an error."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fovea.api.v1 import trainer_pb2
from fovea.client import GatewayClient
from fovea.wire.errors import (
    DiskFull,
    InvalidInput,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    StorageBehind,
    Unavailable,
)
from fovea_gateway.access.api_keys import Scope
from fovea_gateway.sessions.future import Kind, Pending
from fovea_gateway.sessions.futures import Futures
from fovea_gateway.training import housekeeping
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.recovering import RecoveringTrainer
from tests.contract.gateway.requests import Rest, image_datum, text_datum
from tests.waiting import eventually


class RecoveringStand(Stand):
    """A stand that has a trainer with recovery."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(state_dir)
        self.trainer: RecoveringTrainer = RecoveringTrainer(lambda: self.samplers)

    async def kill_trainer(self) -> None:
        """Stops the trainer as SIGKILL does, and starts another one at its address."""
        await self.trainer.stop()
        self.trainer.restart()
        await self.trainer.start()


@pytest.fixture
async def stand(tmp_path: Path, database_url: str) -> AsyncIterator[RecoveringStand]:
    async with running(RecoveringStand(tmp_path), database_url=database_url) as stand:
        assert isinstance(stand, RecoveringStand)
        yield stand


Answers = list[dict[str, Any]]


async def submit(rest: Rest, model_id: str, first: int, rounds: int = 3) -> list[str]:
    """Submits training rounds from request `first` on, with three requests each."""
    ids = []
    for seq_id in range(first, first + 3 * rounds, 3):
        datums = [text_datum(4 + seq_id % 5), image_datum()]
        ids += [(await rest.forward_backward(model_id, seq_id + i, data=datums)).json()["request_id"] for i in (0, 1)]
        ids.append((await rest.optim_step(model_id, seq_id + 2, learning_rate=seq_id / 10))["request_id"])
    return ids


async def answers(rest: Rest, ids: list[str]) -> Answers:
    return [await rest.result(request_id) for request_id in ids]


async def undisturbed(stand: RecoveringStand, rounds: int = 3) -> Answers:
    """Returns the final weights of a model of another session that meets no fault."""
    async with stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        return await answers(rest, await submit(rest, model_id, 1, rounds))


async def test_steps_wait_for_no_write_before_they_are_sent(
    stand: RecoveringStand, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer with recovery records the start of a step itself. A write between two steps would idle its device."""
    noted: list[Kind] = []
    set_running = Futures.set_running

    async def noting(futures: Futures, pending: Pending, also: Any = ()) -> None:
        noted.append(pending.submission.kind)
        await set_running(futures, pending, also)

    monkeypatch.setattr(Futures, "set_running", noting)
    model_id = await rest.create_model()
    await answers(rest, await submit(rest, model_id, 1, 2))
    await rest.snapshot(model_id, 7)
    assert noted == [Kind.CREATE_MODEL, Kind.SAVE_FOR_SAMPLER]


@pytest.mark.parametrize("is_disk_slow", [False, True])
async def test_training_goes_on_as_if_nothing_had_been(stand: RecoveringStand, rest: Rest, is_disk_slow: bool) -> None:
    expected = await undisturbed(stand, 6)
    stand.trainer.is_disk_slow = is_disk_slow
    model_id = await rest.create_model()
    done = await answers(rest, await submit(rest, model_id, 1, 3))
    half = (await rest.forward_backward(model_id, 10, data=[text_datum(4), image_datum()])).json()["request_id"]
    done.append(await rest.result(half))
    await stand.kill_trainer()
    rest_ids = await submit(rest, model_id, 10, 3)
    done = done[:9] + await answers(rest, rest_ids)
    assert done == expected


async def test_a_trainer_that_restarts_while_commands_run_again_loses_no_model(
    stand: RecoveringStand, rest: Rest
) -> None:
    class Restarting(list[NotFound]):
        """Restarts the trainer with each failure."""

        def pop(self, index: Any = -1) -> NotFound:
            stand.trainer.restart()
            return super().pop(index)

    expected = await undisturbed(stand, 2)
    stand.trainer.is_disk_slow = True
    model_id = await rest.create_model()
    done = await answers(rest, await submit(rest, model_id, 1, 1))
    await stand.trainer.stop()
    stand.trainer.restart()
    stand.trainer.failures["OptimStep"] = Restarting([NotFound("there is no model")])
    await stand.trainer.start()
    assert done + await answers(rest, await submit(rest, model_id, 4, 1)) == expected
    assert not stand.trainer.failures["OptimStep"]


async def test_a_trainer_restores_two_models_at_a_time(stand: RecoveringStand, rest: Rest) -> None:
    expected = (await undisturbed(stand, 2))[3:]
    model_ids = [await rest.create_model(number) for number in range(5)]
    for model_id in model_ids:
        await answers(rest, await submit(rest, model_id, 1, 1))
    await stand.trainer.stop()
    stand.trainer.restart()
    stand.trainer.gated = {"RestoreModel"}
    stand.trainer.open.clear()
    await stand.trainer.start()
    ids = {model_id: await submit(rest, model_id, 4, 1) for model_id in model_ids}
    await eventually(lambda: stand.trainer.waiting == 2)
    assert len(stand.trainer.of("RestoreModel")) == 2
    last = (await rest.poll(ids[model_ids[-1]][0])).json()
    assert last["queue_state_reason"] == "other models of this trainer are restored first"
    stand.trainer.open.set()
    for model_id in model_ids:
        assert await answers(rest, ids[model_id]) == expected
    restored = [request.model_id for request in stand.trainer.of("RestoreModel")]
    assert set(restored) >= set(model_ids)
    assert len(set(restored)) == len(restored), "each of them once"


async def test_commands_in_flight_and_behind_wait_for_the_trainer(stand: RecoveringStand, rest: Rest) -> None:
    expected = await undisturbed(stand)
    model_id = await rest.create_model()
    stand.trainer.open.clear()
    ids = await submit(rest, model_id, 1)
    await eventually(lambda: stand.trainer.waiting == 1)
    await stand.trainer.stop()

    async def is_paused() -> bool:
        waiting = (await rest.poll(ids[0])).json()
        return (
            waiting["queue_state"] == "paused_capacity" and "waiting for the trainer" in waiting["queue_state_reason"]
        )

    await eventually(is_paused)
    stand.trainer.restart()
    stand.trainer.open.set()
    await stand.trainer.start()
    assert await answers(rest, ids) == expected


async def test_a_step_with_a_lost_answer_runs_once(stand: RecoveringStand, rest: Rest) -> None:
    expected = await undisturbed(stand)
    model_id = await rest.create_model()
    stand.trainer.answers_lost = 1
    ids = await submit(rest, model_id, 1)
    await eventually(lambda: len(stand.trainer.of("OptimStep")) == 4)
    await stand.kill_trainer()
    assert await answers(rest, ids) == expected
    mine = [request.seq_id for request in stand.trainer.of("OptimStep") if request.model_id == model_id]
    assert mine == [3, 6, 9], "the step was durable, so only its result is asked for again"


async def test_a_batch_that_was_being_rendered_waits_for_what_is_run_again(stand: RecoveringStand, rest: Rest) -> None:
    expected = await undisturbed(stand, 2)
    model_id = await rest.create_model()
    stand.trainer.is_disk_slow = True
    ids = await submit(rest, model_id, 1, 1)
    await answers(rest, ids)
    stand.renderer.open.clear()
    ids += await submit(rest, model_id, 4, 1)
    await eventually(lambda: stand.renderer.waiting == 2)
    await stand.kill_trainer()
    await eventually(lambda: stand.renderer.waiting == 3)  # the replay comes after the new request
    stand.renderer.open.set()
    assert await answers(rest, ids) == expected


async def test_a_save_that_waits_for_room_waits_for_what_is_run_again(stand: RecoveringStand, rest: Rest) -> None:
    model_id = await rest.create_model()
    stand.trainer.is_disk_slow = True
    await answers(rest, await submit(rest, model_id, 1, 1))
    weights = stand.trainer.models[model_id]["weights"]
    stand.trainer.failures["SaveState"] = [DiskFull("full", place="/kept")] * 1000
    saving = (await rest.ok("save_weights", model_id=model_id, seq_id=4, path="a"))["request_id"]
    await eventually(lambda: "SaveState" in stand.trainer.names())
    stand.renderer.open.clear()
    await stand.kill_trainer()
    await eventually(lambda: stand.renderer.waiting == 1)
    stand.trainer.failures["SaveState"] = []

    async def goes_on() -> bool:
        answer = await rest.poll(saving)
        return answer.status_code != 408 or "run again" in answer.json().get("queue_state_reason", "")

    await eventually(goes_on)
    stand.renderer.open.set()
    await rest.result(saving)
    (saved,) = stand.trainer.saved.values()
    assert saved["weights"] == weights


async def test_gateway_and_trainer_die_together(stand: RecoveringStand, rest: Rest) -> None:
    expected = await undisturbed(stand, 4)
    model_id = await rest.create_model()
    stand.trainer.is_disk_slow = True
    ids = await submit(rest, model_id, 1, 2)
    await answers(rest, ids)
    stand.trainer.open.clear()
    ids += await submit(rest, model_id, 7, 2)
    await eventually(lambda: stand.trainer.waiting == 1)
    await stand.stop()
    stand.trainer.open.set()
    await stand.kill_trainer()
    stand.trainer.open.clear()  # the replay starts
    await stand.start()
    await eventually(lambda: stand.trainer.waiting > 0)
    await stand.stop()
    stand.trainer.open.set()
    await stand.start()
    assert await answers(rest, ids) == expected


async def test_models_are_replayed_side_by_side_and_snapshots_with_them(stand: RecoveringStand, rest: Rest) -> None:
    stand.trainer.is_disk_slow = True
    models = [await rest.create_model(number) for number in range(3)]
    for model_id in models:
        await answers(rest, await submit(rest, model_id, 1, 1))
    samplings = [await rest.snapshot(model_id, 4) for model_id in models]
    ids = [await submit(rest, model_id, 5, 1) for model_id in models]
    for each in ids:
        await answers(rest, each)
    await stand.kill_trainer()
    stand.sampler.restart()
    await stand.sampler.stop()
    await stand.sampler.start()
    for sampling_id in samplings:
        sampled = await rest.sample(sampling_id, 0)
        assert "sequences" in await rest.result(sampled.json()["request_id"]), "no request needed the models meanwhile"


async def test_durable_commands_leave_the_journal(stand: RecoveringStand, rest: Rest) -> None:
    gateway = stand.gateway
    assert gateway is not None
    journal = gateway.components.journal
    model_id = await rest.create_model()
    stand.trainer.is_disk_slow = True
    await answers(rest, await submit(rest, model_id, 1, 1))
    assert [entry.seq_id for entry in await journal.entries(model_id)] == [0, 1, 2, 3]
    stand.trainer.is_disk_slow = False
    await answers(rest, await submit(rest, model_id, 4, 1))
    last = (await rest.forward_backward(model_id, 7)).json()["request_id"]
    await rest.result(last)

    async def is_trimmed() -> bool:
        return [entry.seq_id for entry in await journal.entries(model_id)] == [7]

    await eventually(is_trimmed)
    await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"}, detail=None)

    async def is_empty() -> bool:
        return not await journal.entries(model_id)

    await eventually(is_empty)


async def tend(stand: RecoveringStand) -> None:
    """Runs the gateway's periodic housekeeping."""
    assert stand.gateway is not None
    parts = stand.gateway.components
    (trainer,) = parts.base_models.trainers
    await trainer.look_again()
    await parts.journal.trim(trainer)
    await parts.journal.bound()


async def test_a_full_journal_gives_up_when_storage_has_failed_for_long_and_says_so(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fovea_gateway.fronts.app._JOURNAL_S", 3600.0)  # it fails once, below
    stand = RecoveringStand(tmp_path)
    stand.trainer.is_disk_slow = True
    async with running(stand, database_url=database_url, max_journal_bytes=1000) as _, stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        await answers(rest, await submit(rest, model_id, 1, 2))
        gateway = stand.gateway
        assert gateway is not None
        journal, models = gateway.components.journal, gateway.components.models
        stand.trainer.failure = "the disk is gone"
        await tend(stand)
        assert (await models.load(model_id)).journaled_since == 0, "the failure must be temporary"
        monkeypatch.setattr("fovea_gateway.training.journal._STALLED_S", 0.0)
        await journal.bound()
        assert (await models.load(model_id)).journaled_since == 7
        await stand.kill_trainer()
        lost = await rest.result((await rest.forward_backward(model_id, 7)).json()["request_id"])
        assert lost["reason"] == "MODEL_LOST"
        assert "no durable point" in lost["error"]


async def test_a_full_journal_gives_nothing_up_while_storage_works(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds after a restart of the gateway, which has not seen a durable point yet."""
    monkeypatch.setattr("fovea_gateway.fronts.app._JOURNAL_S", 3600.0)
    monkeypatch.setattr("fovea_gateway.training.journal._STALLED_S", 0.0)
    stand = RecoveringStand(tmp_path)
    stand.trainer.is_disk_slow = True
    async with running(stand, database_url=database_url, max_journal_bytes=1000) as _, stand.http() as http:
        model_id = await Rest(http).create_model()
        await answers(Rest(http), await submit(Rest(http), model_id, 1, 2))
        await stand.stop()
        await stand.start(database_url=database_url, max_journal_bytes=1000)
        assert stand.gateway is not None
        async with stand.http() as again:
            rest = Rest(again)
            await tend(stand)
            assert (await stand.gateway.components.models.load(model_id)).journaled_since == 0
            assert [e.seq_id for e in await stand.gateway.components.journal.entries(model_id)] == list(range(7))
            waits = (await rest.forward_backward(model_id, 7)).json()["request_id"]
            await eventually(lambda: _is_paused(rest, waits))
            stand.trainer.is_disk_slow = False
            stand.trainer._keep(model_id, 6, trainer_pb2.OptimStepResponse())
            await tend(stand)
            assert "error" not in await rest.result(waits)


async def _is_paused(rest: Rest, request_id: str) -> bool:
    return (await rest.poll(request_id)).json().get("queue_state") == "paused_capacity"


async def test_losses_without_a_step_that_fill_the_journal_cost_a_request_and_no_model(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fovea_gateway.fronts.app._JOURNAL_S", 3600.0)
    stand = RecoveringStand(tmp_path)
    async with running(stand, database_url=database_url, max_journal_bytes=1000) as _, stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        await answers(rest, await submit(rest, model_id, 1, 1))
        for seq_id in range(4, 10):
            assert "error" not in await rest.result(
                (await rest.forward_backward(model_id, seq_id)).json()["request_id"]
            )
        await tend(stand)
        refused = await rest.result((await rest.forward_backward(model_id, 10)).json()["request_id"])
        assert "max_journal_bytes" in refused["error"]
        step = await rest.result((await rest.optim_step(model_id, 11))["request_id"])
        assert "partial" in step["error"]
        assert stand.gateway is not None
        parts = stand.gateway.components
        assert [entry.seq_id for entry in await parts.journal.entries(model_id)] == [11], "the losses are discarded"
        await tend(stand)
        await stand.kill_trainer()
        assert not [each for each in await answers(rest, await submit(rest, model_id, 12, 1)) if "error" in each]
        assert (await parts.models.load(model_id)).state == "ready"


async def test_a_full_journal_waits_for_points_while_they_come(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fovea_gateway.fronts.app._JOURNAL_S", 3600.0)  # the test runs housekeeping
    stand = RecoveringStand(tmp_path)
    async with running(stand, database_url=database_url, max_journal_bytes=1000) as _, stand.http() as http:
        rest = Rest(http)
        quick, slow = await rest.create_model(), await rest.create_model(1)
        gateway = stand.gateway
        assert gateway is not None
        parts = gateway.components
        await answers(rest, await submit(rest, quick, 1, 1))
        stand.trainer.is_disk_slow = True
        await answers(rest, await submit(rest, slow, 1, 2))
        await tend(stand)  # a durable point of the other model arrived
        waits = (await rest.forward_backward(slow, 7)).json()["request_id"]

        async def says_why() -> bool:
            answer = (await rest.poll(waits)).json()
            return (
                answer.get("queue_state") == "paused_capacity" and "max_journal_bytes" in answer["queue_state_reason"]
            )

        await eventually(says_why)
        assert (await parts.models.load(slow)).journaled_since == 0, "no model may be given up"
        assert [entry.seq_id for entry in await parts.journal.entries(slow)] == list(range(7))
        stand.trainer.is_disk_slow = False
        stand.trainer._keep(slow, 6, trainer_pb2.OptimStepResponse())
        await tend(stand)
        assert "error" not in await rest.result(waits)


async def test_a_snapshot_waits_for_storage_and_says_why(stand: RecoveringStand, rest: Rest) -> None:
    model_id = await rest.create_model()
    words = "recovery's storage is behind: 4096 MiB of snapshots wait to be written"
    stand.trainer.failures["TakeSnapshot"] = [StorageBehind(words)] * 1000
    saving = await rest.ok("save_weights_for_sampler", model_id=model_id, seq_id=1, sampling_session_seq_id=0)
    step = (await rest.optim_step(model_id, 2))["request_id"]

    async def says_why() -> bool:
        answer = (await rest.poll(saving["request_id"])).json()
        return answer.get("queue_state") == "paused_capacity" and words in answer["queue_state_reason"]

    await eventually(says_why)
    stand.trainer.failures["TakeSnapshot"] = []
    assert "sampling_session_id" in await rest.result(saving["request_id"])
    assert "error" not in await rest.result(step)
    assert stand.trainer.names().index("OptimStep") > stand.trainer.names().index("TakeSnapshot")


async def test_a_step_waits_for_storage_says_why_and_keeps_its_gradients(stand: RecoveringStand, rest: Rest) -> None:
    expected = await undisturbed(stand, 2)
    words = "recovery storage is behind: 30000 MiB of states and snapshots wait to be written"
    model_id = await rest.create_model()
    ids = await submit(rest, model_id, 1, 1)
    await answers(rest, ids)
    stand.trainer.failures["OptimStep"] = [StorageBehind(words)] * 1000
    ids += await submit(rest, model_id, 4, 1)

    async def says_why() -> bool:
        answer = (await rest.poll(ids[-1])).json()
        return answer.get("queue_state") == "paused_capacity" and words in answer["queue_state_reason"]

    await eventually(says_why)
    stand.trainer.failures["OptimStep"] = []
    assert await answers(rest, ids) == expected


async def test_a_replay_that_waits_for_storage_says_so(stand: RecoveringStand, rest: Rest) -> None:
    expected = await undisturbed(stand, 2)
    stand.trainer.is_disk_slow = True
    words = "recovery storage is behind: 30000 MiB of states and snapshots wait to be written"
    model_id = await rest.create_model()
    ids = await submit(rest, model_id, 1, 1)
    await answers(rest, ids)
    stand.trainer.failures["OptimStep"] = [StorageBehind(words)] * 1000
    await stand.kill_trainer()
    ids += await submit(rest, model_id, 4, 1)
    reasons: set[str] = set()

    async def says_why() -> bool:
        answer = (await rest.poll(ids[3])).json()
        reasons.add(answer.get("queue_state_reason", ""))
        return answer.get("queue_state") == "paused_capacity" and words in answer["queue_state_reason"]

    await eventually(says_why)
    assert not any("no room" in reason for reason in reasons)
    stand.trainer.failures["OptimStep"] = []
    assert await answers(rest, ids) == expected


async def test_what_failed_is_not_run_again(stand: RecoveringStand, rest: Rest) -> None:
    """A refused step discards the gradients, in the replay too. An invalid loss adds none."""
    stand.trainer.is_disk_slow = True

    async def scenario(rest: Rest, first: bool) -> Answers:
        model_id = await rest.create_model(5)
        good = [(await rest.forward_backward(model_id, 1)).json()["request_id"]]
        good.append((await rest.forward_backward(model_id, 2, loss_fn="dro")).json()["request_id"])
        good.append((await rest.optim_step(model_id, 3))["request_id"])
        good.append((await rest.forward_backward(model_id, 4)).json()["request_id"])
        done = await answers(rest, good)
        assert ["error" in each for each in done] == [False, True, True, False]
        if first:
            await stand.kill_trainer()
        return done + await answers(rest, await submit(rest, model_id, 5, 1))

    disturbed = await scenario(rest, True)
    async with stand.http() as http:
        other = Rest(http)
        await other.open_session()
        calm = await scenario(other, False)
    assert [each.get("metrics") for each in disturbed] == [each.get("metrics") for each in calm]


async def test_a_checkpoint_that_is_gone_is_named(stand: RecoveringStand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await answers(rest, await submit(rest, model_id, 1, 1))
    saved = await rest.result((await rest.ok("save_weights", model_id=model_id, seq_id=4, path="a"))["request_id"])
    path = saved["path"]

    async def made_from_it(number: int) -> str:
        body = {"session_id": rest.session_id, "model_seq_id": number, "path": path, "optimizer": True}
        return str((await rest.result((await rest.ok("load_weights", **body))["request_id"]))["model_id"])

    durable = await made_from_it(1)
    stand.trainer.is_disk_slow = True
    lost = await made_from_it(2)
    deleted = await rest.http.delete(f"training_runs/{model_id}/checkpoints/weights/a")
    assert deleted.status_code == 200, deleted.text
    await stand.kill_trainer()
    good = await rest.result((await rest.forward_backward(durable, 1)).json()["request_id"])
    assert "error" not in good, "the durable point must contain the loaded weights"
    bad = await rest.result((await rest.forward_backward(lost, 1)).json()["request_id"])
    assert bad["reason"] == "MODEL_LOST"
    assert path in bad["error"]


async def test_an_answer_that_differs_is_an_alarm(
    stand: RecoveringStand, rest: Rest, caplog: pytest.LogCaptureFixture
) -> None:
    stand.trainer.is_disk_slow = True
    model_id = await rest.create_model()
    first = await answers(rest, await submit(rest, model_id, 1, 1))
    stand.trainer.chance = "another kernel"
    await stand.kill_trainer()
    with caplog.at_level(logging.ERROR):
        await rest.result((await rest.forward_backward(model_id, 4)).json()["request_id"])
    assert any("another answer" in record.message for record in caplog.records)
    assert (await rest.result(f"{model_id}:3")) == first[-1], "answered requests stay answered"


async def test_a_trainer_with_other_ranks_goes_on_without_an_alarm(
    stand: RecoveringStand, rest: Rest, caplog: pytest.LogCaptureFixture
) -> None:
    stand.trainer.is_disk_slow = True
    model_id = await rest.create_model()
    await answers(rest, await submit(rest, model_id, 1, 1))
    stand.trainer.numerics["ranks"], stand.trainer.chance = "1", "summed in another order"
    for first in (4, 7):  # in the second round, the journal still contains the first trainer's commands
        caplog.clear()
        await stand.kill_trainer()
        done = await answers(rest, await submit(rest, model_id, first, 1))
        assert not any("error" in each for each in done)
        said = [
            record.message for record in caplog.records if "other numerics (ranks 1 instead of 2)" in record.message
        ]
        assert len(said) == 1
        assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_unordered_kernels_of_a_gpu_raise_no_alarm(
    stand: RecoveringStand, rest: Rest, caplog: pytest.LogCaptureFixture
) -> None:
    stand.trainer.numerics["attention"] = "FlashAttention 4"
    await stand.kill_trainer()
    assert stand.gateway is not None
    (link,) = stand.gateway.components.base_models.trainers
    # A fake trainer is back before the gateway has read its numerics.
    await eventually(lambda: link.info is not None and link.info.numerics.get("attention") == "FlashAttention 4")
    stand.trainer.is_disk_slow = True
    model_id = await rest.create_model()
    first = await answers(rest, await submit(rest, model_id, 1, 1))
    stand.trainer.chance = "another order"
    await stand.kill_trainer()
    assert "error" not in await rest.result((await rest.forward_backward(model_id, 4)).json()["request_id"])
    assert [record.message for record in caplog.records if "another answer" in record.message] == []
    assert (await rest.result(f"{model_id}:3")) == first[-1], "answered requests stay answered"


async def test_a_trainer_with_another_model_is_refused_by_name(stand: RecoveringStand, rest: Rest) -> None:
    stand.trainer.model_files = {"config.json": "a"}
    await stand.stop()
    await stand.start()
    model_id = await rest.create_model()
    stand.trainer.model_files = {"config.json": "b"}
    await stand.kill_trainer()
    refused = await rest.result((await rest.forward_backward(model_id, 1)).json()["request_id"])
    assert "another config.json" in refused["error"]
    assert refused["reason"] == "FAILED_PRECONDITION"
    stand.trainer.model_files = {"config.json": "a"}
    await stand.kill_trainer()
    await eventually(lambda: model_id in stand.trainer.models)
    await rest.result((await rest.optim_step(model_id, 2))["request_id"])  # refused, because its gradients are partial
    assert "error" not in await rest.result((await rest.forward_backward(model_id, 3)).json()["request_id"])


async def test_the_end_of_a_session_ends_its_waiting_commands(stand: RecoveringStand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await stand.trainer.stop()
    ids = await submit(rest, model_id, 1, 1)
    await asyncio.sleep(0.2)
    await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"}, detail=None)
    for each in await answers(rest, ids):
        assert each["reason"] == "SESSION_ENDED"
    await stand.trainer.start()


async def test_a_model_that_ended_while_the_trainer_was_away_leaves_no_files(
    stand: RecoveringStand, rest: Rest, caplog: pytest.LogCaptureFixture
) -> None:
    gone, kept = await rest.create_model(0), await rest.create_model(1)
    for model_id in (gone, kept):
        await answers(rest, await submit(rest, model_id, 1, 1))
    assert stand.trainer.points.keys() == {gone, kept}
    gateway = stand.gateway
    assert gateway is not None
    await gateway.components.models.end(await gateway.components.models.load(gone), "its session is over")
    await stand.kill_trainer()
    await eventually(lambda: kept in stand.trainer.models)
    assert gone not in stand.trainer.models
    stand.trainer.points["of a lost database"] = stand.trainer.points[kept]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await gateway.components.orphans.sweep(with_folders=False)
    assert stand.trainer.points.keys() == {kept, "of a lost database"}
    assert (
        sum("recovery files of 1 models that this gateway does not know" in each.message for each in caplog.records)
        == 1
    )


@pytest.mark.parametrize("has_gradients", [False, True])
async def test_a_silent_session_is_parked_and_goes_on_hours_later(
    stand: RecoveringStand, rest: Rest, has_gradients: bool
) -> None:
    expected = await undisturbed(stand, 4)
    await stand.stop()
    await stand.start(session_ttl_s=0.8)
    model_id = await rest.create_model()
    done = await answers(rest, await submit(rest, model_id, 1, 2))
    if has_gradients:
        done.append(await rest.result((await submit(rest, model_id, 7, 1))[0]))

    async def is_parked() -> bool:
        found = {"size_bytes": 1000, "training_run_ids": [model_id], "session_id": rest.session_id}
        return any(found.items() <= each.items() for each in await parked_sessions(rest))

    await eventually(is_parked)
    await stand.stop()
    await stand.kill_trainer()
    await stand.start(session_ttl_s=600.0)
    assert model_id not in stand.trainer.models, "no request needs it"
    done += await answers(rest, (await submit(rest, model_id, 7, 2))[len(done) - 6 :])
    assert done == expected
    assert not await is_parked()


async def parked_sessions(rest: Rest) -> list[dict[str, Any]]:
    answer = (await rest.http.get("parked_sessions")).json()
    sessions: list[dict[str, Any]] = answer["sessions"]
    return sessions


async def test_parked_sessions_end_above_their_bytes_and_by_hand(stand: RecoveringStand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(session_ttl_s=0.5)
    first = await rest.create_model()
    await answers(rest, await submit(rest, first, 1, 1))
    await eventually(lambda: first not in stand.trainer.models)
    await rest.open_session()
    second = await rest.create_model()
    await answers(rest, await submit(rest, second, 1, 1))
    await eventually(lambda: second not in stand.trainer.models)
    await stand.stop()
    await stand.start(session_ttl_s=0.5, parked_bytes=1500)
    await eventually(lambda: [request.model_id for request in stand.trainer.of("DeleteModel")] == [first])
    assert [each["session_id"] for each in await parked_sessions(rest)] == [rest.session_id]
    await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"}, detail=None)
    await eventually(lambda: second not in stand.trainer.points)
    assert (await rest.post("session_heartbeat", session_id=rest.session_id)).status_code == 410


async def ending_at(stand: RecoveringStand, monkeypatch: pytest.MonkeyPatch, length: int) -> list[str]:
    """Makes the trainer end at each batch that starts with a datum of `length` tokens; returns
    their models in order.
    """
    deaths: list[str] = []
    note = stand.trainer.note

    async def end(name: str, request: Any) -> None:
        await note(name, request)
        if name == "ForwardBackward" and len(request[1][0].input.tokens) == 4 * length:
            deaths.append(request[0].model_id)
            stand.trainer.restart()
            raise Unavailable("rank 1 of the trainer died")

    monkeypatch.setattr(stand.trainer, "note", end)
    return deaths


async def test_a_command_at_which_the_trainer_always_ends_fails_and_all_models_go_on(
    stand: RecoveringStand, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await undisturbed(stand)
    deadly, neighbour = await rest.create_model(0), await rest.create_model(1)
    done = await answers(rest, await submit(rest, neighbour, 1, 1))
    deaths = await ending_at(stand, monkeypatch, 13)
    ids = [(await rest.forward_backward(deadly, 1, data=[text_datum(13)])).json()["request_id"]]
    ids.append((await rest.optim_step(deadly, 2, learning_rate=0.1))["request_id"])
    done += await answers(rest, await submit(rest, neighbour, 4, 2))
    failed, not_taken = await answers(rest, ids)
    assert "the trainer ended 3 times while it ran request 1 (forward_backward)" in failed["error"]
    assert "was not taken" in not_taken["error"]
    assert set(deaths) == {deadly}
    assert 3 <= len(deaths) <= 6, "another command of the owner may have been suspected before it"
    assert done == expected
    assert not any("error" in each for each in await answers(rest, await submit(rest, deadly, 3, 1)))


async def test_a_healthy_command_beside_a_deadly_one_is_not_blamed(
    stand: RecoveringStand, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The healthy command always reaches the trainer first, and still runs when the deadly one ends the trainer."""
    deadly, healthy = await rest.create_model(0), await rest.create_model(1)
    deaths = await ending_at(stand, monkeypatch, 13)
    note_or_end, is_there, has_ended = stand.trainer.note, asyncio.Event(), asyncio.Event()

    async def note(name: str, request: Any) -> None:
        if name == "ForwardBackward" and request[0].model_id == healthy:
            is_there.set()
            has_ended.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(has_ended.wait(), 0.5)
                raise Unavailable("the trainer ended while it ran another command")
        try:
            await note_or_end(name, request)
        except Unavailable:
            has_ended.set()
            raise

    monkeypatch.setattr(stand.trainer, "note", note)
    ids = [(await rest.forward_backward(healthy, 1)).json()["request_id"]]
    await is_there.wait()
    ids.append((await rest.forward_backward(deadly, 1, data=[text_datum(13)])).json()["request_id"])
    done, failed = await answers(rest, ids)
    assert "error" not in done
    assert "the trainer ended 3 times while it ran request 1 (forward_backward)" in failed["error"]
    assert deaths == [deadly] * 3


async def test_a_model_that_kills_the_trainer_at_its_restore_is_given_up(
    stand: RecoveringStand, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await undisturbed(stand)
    deadly, neighbour = await rest.create_model(0), await rest.create_model(1)
    done = await answers(rest, await submit(rest, neighbour, 1, 1))
    stand.trainer.is_disk_slow = True
    first = (await rest.forward_backward(deadly, 1, data=[text_datum(13)])).json()["request_id"]
    assert "error" not in await rest.result(first)
    deaths = await ending_at(stand, monkeypatch, 13)
    await stand.kill_trainer()
    done += await answers(rest, await submit(rest, neighbour, 4, 2))
    lost = await rest.result((await rest.optim_step(deadly, 2, learning_rate=0.1))["request_id"])
    assert "request 1 (forward_backward)" in lost["error"]
    assert "could not run again: the trainer ended 5 times" in lost["error"]
    assert set(deaths) == {deadly}
    assert 5 <= len(deaths) <= 10
    assert done == expected


async def test_a_model_outlives_a_trainer_whose_settings_refuse_its_creation(
    stand: RecoveringStand, rest: Rest
) -> None:
    stand.trainer.is_disk_slow = True
    model_id = await rest.create_model()
    assert not any("error" in one for one in await answers(rest, await submit(rest, model_id, 1, 1)))
    stand.trainer.failures["CreateModel"] = [InvalidInput("this trainer trains adapters only")] * 100
    await stand.kill_trainer()
    for refused in await answers(rest, await submit(rest, model_id, 4, 1)):
        assert "returned with other settings" in refused["error"]
        assert "this trainer trains adapters only" in refused["error"]
    stand.trainer.failures["CreateModel"] = []
    await stand.kill_trainer()
    assert not any("error" in one for one in await answers(rest, await submit(rest, model_id, 7, 1)))


async def test_many_parked_sessions_of_one_owner_end_none_of_another(stand: RecoveringStand, tmp_path: Path) -> None:
    await stand.stop()
    await stand.start(session_ttl_s=0.5, api_key=["alice=tml-alice", "bob=tml-bob"], parked_bytes=3500)
    async with stand.http("tml-alice") as alices, stand.http("tml-bob") as bobs:
        alice, models = Rest(alices), []
        for rest in (alice, *(Rest(bobs) for _ in range(5))):
            models.append(await rest.create_model())
            await answers(rest, await submit(rest, models[-1], 1, 1))
            await eventually(lambda: models[-1] not in stand.trainer.models)
        await eventually(lambda: len(stand.trainer.of("DeleteModel")) == 3)
        assert [request.model_id for request in stand.trainer.of("DeleteModel")] == models[1:4], "bob's oldest"
        assert [each["session_id"] for each in await parked_sessions(alice)] == [alice.session_id]


async def test_creations_that_come_at_once_find_the_room_that_one_of_them_makes(
    stand: RecoveringStand, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = stand.trainer.note

    async def note_if_there_is_room(name: str, request: Any) -> None:
        await note(name, request)
        await asyncio.sleep(0.05)
        if name == "CreateModel" and len(stand.trainer.models) >= 2:
            raise ResourceExhausted("2 models exist, which is the limit")

    for number in range(2):
        await rest.create_model(number)
    monkeypatch.setattr(stand.trainer, "note", note_if_there_is_room)
    monkeypatch.setattr(housekeeping, "_QUIET_S", 0.0)
    monkeypatch.setattr(housekeeping, "_LATE_S", 0.0)
    async with stand.http() as http:
        others = [Rest(http) for _ in range(20)]
        for other in others:
            await other.open_session()
        made = await asyncio.gather(*(other.create_model() for other in others), return_exceptions=True)
    assert sum(isinstance(each, str) for each in made) >= 2


async def test_parked_models_wait_for_their_owners_share(stand: RecoveringStand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(session_ttl_s=0.5, max_models_per_owner=2)
    parked = [await rest.create_model(number) for number in range(2)]
    for model_id in parked:
        await answers(rest, await submit(rest, model_id, 1, 1))
    await eventually(lambda: not stand.trainer.models)
    await stand.stop()
    await stand.start(session_ttl_s=600.0)
    async with stand.http() as http:
        other = Rest(http)
        await other.open_session()
        await other.create_model()
        ids = [(await submit(rest, model_id, 4, 1))[0] for model_id in parked]

        async def reasons() -> list[str]:
            found = [(await rest.poll(request_id)).json() for request_id in ids]
            return [each.get("queue_state_reason", "") for each in found]

        async def is_told_why() -> bool:
            return any("no room" in each and "max_models_per_owner is 2" in each for each in await reasons())

        await eventually(is_told_why)
        assert len(stand.trainer.models) == 2, "one of the two must find a place beside the other session's"
        await other.ok(f"sessions/{other.session_id}/finish", reason={"type": "success"}, detail=None)
    assert not any("error" in each for each in await answers(rest, ids))


async def test_models_of_a_client_that_is_gone_make_room_before_their_time(
    stand: RecoveringStand, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "_QUIET_S", 0.5)
    gone = await rest.create_model()
    done = await answers(rest, await submit(rest, gone, 1, 1))
    async with stand.http() as http:
        other = Rest(http)
        await other.open_session()
        with pytest.raises(AssertionError, match="other models exist"):
            await other.create_model(0, rank=0)  # its client sent a heartbeat a moment ago
        monkeypatch.setattr(housekeeping, "_LATE_S", 0.0)
        await other.create_model(1, rank=0)
        assert list(stand.trainer.models) == [f"{other.session_id}:train:1"]
        assert [each["training_run_ids"] for each in await parked_sessions(rest)] == [[gone]]
        await other.ok(f"sessions/{other.session_id}/finish", reason={"type": "success"}, detail=None)
    done += await answers(rest, await submit(rest, gone, 4, 1))
    assert not any("error" in each for each in done), "the model must return with its client"


async def test_parked_sessions_are_seen_and_ended_over_grpc_and_by_command(stand: RecoveringStand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(session_ttl_s=0.5)
    model_id = await rest.create_model()
    await answers(rest, await submit(rest, model_id, 1, 1))
    gateway = stand.gateway
    assert gateway is not None
    ring = gateway.components.keys
    owner = ring.identify(KEY).owner
    admin, _ = await ring.create("root", "", Scope.ADMIN, None)
    other, _ = await ring.create("bob", "", Scope.TRAIN, None)
    async with GatewayClient(gateway.grpc.address, KEY) as mine, GatewayClient(gateway.grpc.address, other) as bobs:

        async def is_parked() -> bool:
            return bool(await mine.parked_sessions())

        await eventually(is_parked)
        (found,) = await mine.parked_sessions()
        assert (found.session_id, found.owner, found.size_bytes) == (rest.session_id, owner, 1000)
        assert list(found.model_ids) == [model_id]
        assert await bobs.parked_sessions() == []
        with pytest.raises(PermissionDenied, match="sessions of other owners"):
            await bobs.parked_sessions("*")
        with pytest.raises(NotFound):
            await bobs.finish_session(rest.session_id)
    assert rest.session_id in await sessions_command(stand, admin, "list", "--owner", "*")
    await sessions_command(stand, admin, "end", rest.session_id)
    await eventually(lambda: model_id not in stand.trainer.points)


async def sessions_command(stand: RecoveringStand, key: str, *arguments: str) -> str:
    """Runs `fovea sessions`; returns its output."""
    assert stand.gateway is not None
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fovea.cli.main", "sessions", *arguments, "--gateway", stand.gateway.grpc.address,
        env={**os.environ, "TINKER_API_KEY": key, "COLUMNS": "200"}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def test_unnamed_snapshots_of_full_parameters_are_taken_again_or_named(
    stand: RecoveringStand, rest: Rest
) -> None:
    """They are in no storage. Replay restores those that are newer than the durable point."""
    model_id = await rest.create_model(rank=0)
    await answers(rest, await submit(rest, model_id, 1, 1))
    older = await rest.snapshot(model_id, 4, 0)
    await answers(rest, await submit(rest, model_id, 5, 1))
    newer = await rest.snapshot(model_id, 8, 1)
    await stand.kill_trainer()
    await stand.sampler.stop()
    stand.sampler.restart()
    await stand.sampler.start()
    sampled = await rest.result((await rest.sample(newer, 0)).json()["request_id"])
    assert "sequences" in sampled
    gone = await rest.result((await rest.sample(older, 0)).json()["request_id"])
    assert gone["reason"] == "MODEL_LOST"
    assert "full parameters" in gone["error"]
    assert "save_weights_for_sampler" in gone["error"]


async def test_an_older_point_than_was_durable_is_not_gone_on_from(stand: RecoveringStand, rest: Rest) -> None:
    """The trainer falls back to an older point if the newest is damaged, but the journal no longer has the commands
    between.
    """
    model_id = await rest.create_model()
    await answers(rest, await submit(rest, model_id, 1, 1))
    older = stand.trainer.points[model_id]
    await answers(rest, await submit(rest, model_id, 4, 1))
    gateway = stand.gateway
    assert gateway is not None
    journal = gateway.components.journal

    async def is_trimmed() -> bool:
        return not await journal.entries(model_id)

    await eventually(is_trimmed)
    await stand.stop()
    stand.trainer.points[model_id] = older
    await stand.kill_trainer()
    await stand.start()
    lost = await rest.result((await rest.forward_backward(model_id, 7)).json()["request_id"])
    assert lost["reason"] == "MODEL_LOST"
    assert "is from request 3" in lost["error"]
    assert "damaged" in lost["error"]
