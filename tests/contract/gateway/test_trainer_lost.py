"""Loss of a trainer: commands fail soon, and the error says what was lost and how to continue."""

import asyncio

from fovea.wire.errors import FeatureEvicted
from tests.contract.gateway.conftest import Stand
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest, image_datum
from tests.waiting import eventually


async def test_restarted_trainer_has_lost_its_models(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    saved = await rest.result((await rest.ok("save_weights", model_id=model_id, seq_id=1, path="a"))["request_id"])
    named = await rest.ok("save_weights_for_sampler", model_id=model_id, seq_id=2, path="s")
    path = (await rest.result(named["request_id"]))["path"]
    unnamed_id = await rest.snapshot(model_id, 3)
    stand.trainer.restart()
    answer = await rest.result((await rest.forward_backward(model_id, 4)).json()["request_id"])
    assert answer["category"] == "server" or "no model" in answer["error"]
    assert stand.gateway is not None
    (trainer,) = stand.gateway.components.base_models.trainers
    instance_id = stand.trainer.instance_id
    await eventually(lambda: trainer.info is not None and trainer.info.instance_id == instance_id)
    answer = await rest.result((await rest.forward_backward(model_id, 5)).json()["request_id"])
    assert answer["category"] == "server"
    assert "restarted" in answer["error"]
    assert f"create_training_client_from_state_with_optimizer('{saved['path']}')" in answer["error"]
    run = (await rest.http.get(f"training_runs/{model_id}")).json()
    assert run["corrupted"] is True
    stand.sampler.restart()
    await stand.sampler.stop()
    await stand.sampler.start()
    kept = await rest.ok(
        "create_sampling_session", session_id=rest.session_id, sampling_session_seq_id=9, model_path=path
    )
    sample = await rest.sample(kept["sampling_session_id"], 0)
    assert "sequences" in await rest.result(sample.json()["request_id"]), "named weights must be loaded from storage"
    gone = await rest.result((await rest.sample(unnamed_id, 0)).json()["request_id"])
    assert "without a name" in gone["error"]
    loaded = await rest.ok(
        "load_weights", session_id=rest.session_id, model_seq_id=1, path=saved["path"], optimizer=True
    )
    assert (await rest.result(loaded["request_id"]))["path"] == saved["path"]


async def test_dead_trainer_fails_commands_within_seconds(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    stand.trainer.open.clear()
    running = (await rest.forward_backward(model_id, 1)).json()["request_id"]
    queued = [(await rest.forward_backward(model_id, seq_id)).json()["request_id"] for seq_id in range(2, 62)]
    await eventually(lambda: "ForwardBackward" in stand.trainer.names())
    await stand.trainer.stop()
    async with asyncio.timeout(
        50
    ):  # less than sixty waits of `trainer_wait_s` (one second): the requests wait together
        for request_id in (running, *queued):
            answer = await rest.result(request_id)
            assert answer["category"] == "server"
            assert "the trainer at" in answer["error"]
            assert "save_state" in answer["error"]
    stand.trainer.open.set()
    await stand.trainer.start()


async def test_creating_a_model_waits_for_a_trainer_that_restarts(stand: Stand, rest: Rest) -> None:
    await stand.trainer.stop()
    body = {"session_id": rest.session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 8}}
    request_id = (await rest.ok("create_model", **body))["request_id"]

    async def is_paused() -> bool:
        waiting = (await rest.poll(request_id)).json()
        return (waiting["queue_state"], waiting["queue_state_reason"]) == ("paused_capacity", "waiting for the trainer")

    await eventually(is_paused)
    stand.trainer.restart()
    await stand.trainer.start()
    model_id = (await rest.result(request_id))["model_id"]
    assert "error" not in await rest.result((await rest.forward_backward(model_id, 1)).json()["request_id"])


async def test_trainer_that_comes_back_with_its_models_goes_on(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await stand.trainer.stop()
    await stand.trainer.start()
    answer = await rest.result((await rest.forward_backward(model_id, 1)).json()["request_id"])
    if "error" in answer:
        assert "unknown" in answer["error"]
        assert "error" in await rest.result((await rest.optim_step(model_id, 2))["request_id"])
        answer = await rest.result((await rest.forward_backward(model_id, 3)).json()["request_id"])
    assert "error" not in answer


async def test_a_step_with_a_broken_connection_runs_once(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await rest.forward_backward(model_id, 1)
    trainer = stand.trainer
    await eventually(lambda: trainer.models[model_id]["gradients"] == 1)
    trainer.open.clear()
    step = (await rest.optim_step(model_id, 2))["request_id"]
    await eventually(lambda: trainer.waiting == 1)
    await trainer.stop()  # the server and its connections; running commands continue
    await trainer.start()
    trainer.open.set()
    assert (await rest.result(step))["metrics"]["gradients:sum"] == 1
    assert len(trainer.of("OptimStep")) == 1


async def test_a_step_with_an_unknown_outcome_loses_its_model(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    saved = await rest.result((await rest.ok("save_weights", model_id=model_id, seq_id=1, path="a"))["request_id"])
    trainer = stand.trainer
    trainer.open.clear()
    step = (await rest.optim_step(model_id, 2))["request_id"]
    await eventually(lambda: trainer.waiting == 1)
    await trainer.stop()
    assert saved["path"] in (await rest.result(step))["error"]
    trainer.open.set()
    await trainer.start()
    assert stand.gateway is not None
    (link,) = stand.gateway.components.base_models.trainers
    await eventually(lambda: link.up)
    after = await rest.result((await rest.forward_backward(model_id, 3)).json()["request_id"])
    assert saved["path"] in after["error"], "the error said that it is gone, so it must be gone"


async def test_evicted_features_are_rendered_again_once(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    stand.trainer.failures["ForwardBackward"].append(FeatureEvicted("gone"))
    good = await rest.result((await rest.forward_backward(model_id, 1, data=[image_datum()])).json()["request_id"])
    assert "error" not in good
    assert len(stand.renderer.of("Render")) == 2
    stand.trainer.failures["ForwardBackward"] += [FeatureEvicted("gone"), FeatureEvicted("gone")]
    bad = await rest.result((await rest.forward_backward(model_id, 2, data=[image_datum()])).json()["request_id"])
    assert bad["category"] == "server"


async def test_a_batch_that_is_more_than_renderers_hold_comes_in_portions(stand: Stand, rest: Rest) -> None:
    """The trainer keeps the part that it received and names the missing part; only that part is rendered again, in
    portions of the same size.
    """
    model_id = await rest.create_model()
    lacking = ["0,1,2,3,4,5", "0,1,2,3", "2,3"]
    stand.trainer.failures["ForwardBackward"] += [FeatureEvicted("gone", datums=named) for named in lacking]
    data = [image_datum() for _ in range(7)]
    good = await rest.result((await rest.forward_backward(model_id, 1, data=data)).json()["request_id"])
    assert "error" not in good
    assert len(stand.renderer.of("Render")) == 7 + 6 + 2 + 2
    stand.trainer.failures["ForwardBackward"] += [FeatureEvicted("gone", datums="3")] * 3
    bad = await rest.result((await rest.forward_backward(model_id, 2, data=data)).json()["request_id"])
    assert bad["category"] == "server"


async def test_renderer_that_is_away_for_a_moment_is_waited_for(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await stand.renderer.stop()
    request_id = (await rest.forward_backward(model_id, 1, data=[image_datum()])).json()["request_id"]
    assert (await rest.poll(request_id)).status_code == 408
    await stand.renderer.start()
    assert "error" not in await rest.result(request_id)
