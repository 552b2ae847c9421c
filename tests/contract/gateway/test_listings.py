"""Training runs and checkpoints as the SDK's REST client lists them."""

import datetime

import tinker

from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest


async def test_runs_and_checkpoints(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model(user_metadata={"renderer_name": "qwen3_vl"})
    for seq_id, path in enumerate(("a", "b"), start=1):
        saved = await rest.ok("save_weights", model_id=model_id, seq_id=seq_id, path=path, ttl_seconds=3600)
        await rest.result(saved["request_id"])
    named = await rest.ok("save_weights_for_sampler", model_id=model_id, seq_id=3, path="s", user_metadata={"k": "v"})
    await rest.result(named["request_id"])

    def use(client: tinker.ServiceClient) -> None:
        api = tinker.RestClient(base_url=stand.url, api_key=KEY)
        runs = api.list_training_runs().result()
        assert runs.cursor.total_count == 1
        run = runs.training_runs[0]
        assert (run.training_run_id, run.base_model, run.lora_rank) == (model_id, MODEL, 8)
        assert run.user_metadata == {"renderer_name": "qwen3_vl"}
        assert run.last_checkpoint is not None
        assert run.last_checkpoint.checkpoint_id == "weights/b"
        assert run.last_sampler_checkpoint is not None
        assert run.last_sampler_checkpoint.user_metadata == {"k": "v"}
        listed = api.list_checkpoints(model_id).result().checkpoints
        assert [checkpoint.checkpoint_id for checkpoint in listed] == ["sampler_weights/s", "weights/b", "weights/a"]
        expires_at = listed[1].expires_at
        assert expires_at is not None
        assert expires_at > datetime.datetime.now(datetime.UTC)
        api.set_checkpoint_ttl_from_tinker_path(listed[1].tinker_path, None).result()
        api.delete_checkpoint(model_id, "weights/a").result()
        left = api.list_user_checkpoints().result()
        assert left.cursor is not None
        assert left.cursor.total_count == 2
        assert [checkpoint.expires_at for checkpoint in left.checkpoints] == [None, None]
        session = api.get_session(rest.session_id).result()
        assert session.training_run_ids == [model_id]
        assert rest.session_id in api.list_sessions().result().sessions

    await stand.sdk(use)
    refused = await rest.http.put(f"training_runs/{model_id}/checkpoints/weights/b/ttl", json={"ttl_seconds": 5})
    assert refused.status_code == 400
    assert (await rest.http.delete(f"training_runs/{model_id}/checkpoints/weights/a")).status_code == 404


async def test_expired_checkpoint_no_longer_loads(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    saved = await rest.ok("save_weights", model_id=model_id, seq_id=1, path="a", ttl_seconds=3600)
    path = (await rest.result(saved["request_id"]))["path"]
    assert stand.gateway is not None

    def expire(connection: object) -> None:
        from fovea_gateway.checkpoints import checkpoint_registry as checkpoints

        checkpoints.update_expiry(connection, path, 1.0)  # type: ignore[arg-type]

    await stand.gateway.components.database.write(expire)
    loaded = await rest.ok("load_weights", session_id=rest.session_id, model_seq_id=1, path=path, optimizer=False)
    answer = await rest.result(loaded["request_id"])
    assert "there is no checkpoint" in answer["error"]
    await stand.gateway.components.checkpoints.sweep()
    assert (await rest.http.get(f"training_runs/{model_id}/checkpoints")).json()["checkpoints"] == []
    again = await rest.ok("save_weights", model_id=model_id, seq_id=2, path="a")
    assert (await rest.result(again["request_id"]))["path"] == path
