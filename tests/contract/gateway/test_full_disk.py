"""A disk that is really full: nothing new is accepted, what gives room back works, and then all does."""

from pathlib import Path

import pyrage  # type: ignore[import-untyped]

from tests.contract.gateway.conftest import Stand, running
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
        assert "is over" in (await rest.result(waits))["error"], "what was accepted has its outcome"
        (small_disk / "junk").unlink()
        assert stand.gateway is not None
        await stand.gateway.parts.database.look_for_room()

        async def is_accepted() -> bool:
            return (await rest.post("create_session", **body)).status_code == 200

        await eventually(is_accepted)


async def test_what_the_gateway_keeps_itself_names_the_disk(small_disk: Path, tmp_path: Path) -> None:
    root = small_disk / "kept"
    stand = Stand(tmp_path)
    stand.trainer = KeepingTrainer(lambda: stand.samplers)
    async with running(stand, checkpoint_dir=str(root)) as stand, stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        submitted = await rest.ok("save_weights", model_id=model_id, seq_id=1, path="state")
        path = (await rest.result(submitted["request_id"]))["path"]
        body = {"source_path": path, "session_id": rest.session_id, "model_seq_id": 1}
        recipients = [str(pyrage.x25519.Identity.generate().to_public())]
        export = {"path": "out", "age_encryption_recipients": recipients}
        fill(small_disk / "junk")
        refused = await rest.post("copy_weights", **body)
        assert refused.status_code == 429, refused.text
        (small_disk / "junk").unlink()
        fill(small_disk / "junk", spare_bytes=WEIGHT_BYTES + 2**19)  # the trainer finds room, the gateway none
        failed = await rest.result(
            (await rest.ok("save_weights_external", model_id=model_id, seq_id=2, **export))["request_id"]
        )
        for told in (refused.text, failed["error"]):
            assert f"the disk of {root} is full" in told
            assert "delete checkpoints" in told
        (small_disk / "junk").unlink()
        assert await rest.ok("copy_weights", **body)
        again = await rest.ok("save_weights_external", model_id=model_id, seq_id=3, **export)
        assert "error" not in await rest.result(again["request_id"])
        kept = {place.name.partition(".")[0] for place in root.glob("*/*/*")}
        assert kept == {"state", "out"}, "what failed left nothing"
        assert len(list(root.glob("*/*/*"))) == 3
