"""A full disk: new work is refused, saves wait, deletions work, and everything recovers once there is space."""

from pathlib import Path

import pyrage  # type: ignore[import-untyped]
import pytest
import tinker

from chaos import client
from chaos.history import History, Recorder
from fovea.wire.errors import DiskFull
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import IMAGE_TOKENS, MODEL
from tests.contract.gateway.keeping import WEIGHT_BYTES, KeepingTrainer
from tests.contract.gateway.requests import Rest
from tests.small_disk import fill
from tests.waiting import eventually


async def test_on_a_full_disk_sessions_end_and_nothing_new_begins(small_disk: Path) -> None:
    async with running(Stand(small_disk), session_ttl_s=600.0) as stand, stand.http() as http:
        rest = Rest(http)
        await rest.open_session()
        model_id = await rest.create_model()
        waits = (await rest.optim_step(model_id, 2))["request_id"]
        fill(small_disk / "junk")
        body = {"tags": ["x" * 4000], "user_metadata": None, "sdk_version": "0.38.0"}
        statuses = [(await rest.post("create_session", **body)).status_code for _ in range(200)]
        assert statuses[-1] == 503
        assert "disk" in (await rest.post("optim_step", model_id=model_id, seq_id=1, adam_params={})).text
        await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"}, detail=None)
        assert "has ended" in (await rest.result(waits))["error"], "accepted requests keep their outcome"
        (small_disk / "junk").unlink()
        assert stand.gateway is not None
        await stand.gateway.components.database.look_for_room()

        async def is_accepted() -> bool:
            return (await rest.post("create_session", **body)).status_code == 200

        await eventually(is_accepted)


async def test_on_a_nearly_full_disk_nothing_new_begins_and_promised_outcomes_are_kept(small_disk: Path) -> None:
    async with running(Stand(small_disk), session_ttl_s=600.0) as stand, stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        assert stand.gateway is not None
        database = stand.gateway.components.database
        stand.trainer.open.clear()
        promised = (await rest.optim_step(model_id, 1))["request_id"]
        fill(small_disk / "junk", spare_bytes=8 * 2**20)
        await database.look_for_room()
        for refused in (
            await rest.post("optim_step", model_id=model_id, seq_id=2, adam_params={}),
            await rest.post("create_session", tags=[], user_metadata=None, sdk_version="0.38.0"),
        ):
            assert refused.status_code == 503
            assert "end sessions or delete checkpoints" in refused.text
        stand.trainer.open.set()
        assert "metrics" in await rest.result(promised), "a request accepted before runs, and its outcome is stored"
        assert (await http.get(f"sessions/{rest.session_id}")).status_code == 200, "reads must still work"
        (small_disk / "junk").unlink()
        await database.look_for_room()
        assert "metrics" in await rest.result((await rest.optim_step(model_id, 2))["request_id"])


async def test_writes_of_the_gateway_report_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    root = small_disk / "kept"
    stand = Stand(tmp_path)
    stand.trainer = KeepingTrainer(lambda: stand.samplers)
    async with running(stand, checkpoint_dir=str(root), disk_wait_s=0.0) as stand, stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        submitted = await rest.ok("save_weights", model_id=model_id, seq_id=1, path="state")
        path = (await rest.result(submitted["request_id"]))["path"]
        body = {"source_path": path, "session_id": rest.session_id, "model_seq_id": 1}
        recipients = [str(pyrage.x25519.Identity.generate().to_public())]
        export = {"path": "out", "age_encryption_recipients": recipients}
        fill(small_disk / "junk")
        refused = await rest.post("copy_weights", **body)
        assert refused.status_code == 507, refused.text
        (small_disk / "junk").unlink()
        fill(small_disk / "junk", spare_bytes=WEIGHT_BYTES + 2**19)  # the trainer has space, the gateway none
        failed = await rest.result(
            (await rest.ok("save_weights_external", model_id=model_id, seq_id=2, **export))["request_id"]
        )
        for told in (refused.text, failed["error"]):
            assert "the disk of the checkpoints is full" in told
            assert str(small_disk) not in told, "paths of the server belong in its logs only"
            assert "delete checkpoints" in told
        assert failed["category"] == "server"
        (small_disk / "junk").unlink()
        assert await rest.ok("copy_weights", **body)
        again = await rest.ok("save_weights_external", model_id=model_id, seq_id=3, **export)
        assert "error" not in await rest.result(again["request_id"])
        kept = {place.name.partition(".")[0] for place in root.glob("*/*/*")}
        assert kept == {"state", "out"}, "a failed save must leave no files"
        assert len(list(root.glob("*/*/*"))) == 3


@pytest.mark.parametrize("route", ["save_weights", "save_weights_for_sampler"])
async def test_a_save_waits_for_room_and_what_comes_after_it_for_its_turn(stand: Stand, rest: Rest, route: str) -> None:
    model_id = await rest.create_model()
    method = "SaveState" if route == "save_weights" else "TakeSnapshot"
    stand.trainer.failures[method] = [DiskFull("the disk of /kept is full", place="/kept")] * 1000
    saving = (await rest.ok(route, model_id=model_id, seq_id=1, path="a"))["request_id"]
    step = (await rest.optim_step(model_id, 2))["request_id"]

    async def says_why() -> bool:
        answer = (await rest.poll(saving)).json()
        return answer.get("queue_state") == "paused_capacity" and "checkpoints is full" in answer["queue_state_reason"]

    await eventually(says_why)
    assert (await rest.poll(step)).status_code == 408
    stand.trainer.failures[method] = []
    assert "error" not in await rest.result(saving)
    assert "error" not in await rest.result(step)
    *saves, last = [name for name in stand.trainer.names() if name in (method, "OptimStep")]
    assert (set(saves), last) == ({method}, "OptimStep")


async def test_a_session_that_ends_does_not_wait_for_room(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    stand.trainer.failures["SaveState"] = [DiskFull("full", place="/kept")] * 1000
    saving = (await rest.ok("save_weights", model_id=model_id, seq_id=1, path="a"))["request_id"]
    await eventually(lambda: "SaveState" in stand.trainer.names())
    await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"}, detail=None)
    assert "has ended" in (await rest.result(saving))["error"]


async def test_a_client_of_chaos_notes_every_answer_though_a_save_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "IMAGE_TOKENS", IMAGE_TOKENS)
    file = tmp_path / "history.jsonl"

    def use(service: tinker.ServiceClient) -> None:
        with file.open("w") as lines:
            client.train(service, MODEL, "samples-1", Recorder(lines, "samples-1"), range(4))

    async with running(Stand(tmp_path / "state"), disk_wait_s=0.0) as stand:
        stand.trainer.failures["SaveState"] = [DiskFull("full", place="/kept")]
        with pytest.raises(tinker.TinkerError, match="full"):
            await stand.sdk(use)
    commands = History.read([file]).commands.values()
    failed = [one.operation for one in commands if one.answers[0].error]
    assert failed == ["save_state"]
    assert {one.arguments.get("round") for one in commands} == {None, 0, 1, 2}
