"""Order and identity of training requests (tinker-contract.md, section 3)."""

import asyncio
from typing import Any

import pytest
import tinker
import zstandard
from tinker import types

from fovea.wire.errors import Internal
from tests.contract.gateway.conftest import Stand
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest, forward_backward_body, image_datum, text_datum
from tests.waiting import eventually

ADAM = types.AdamParams(learning_rate=1e-3)


def lengths(stand: Stand) -> list[int]:
    """Input lengths of the losses in the order in which the trainer received them."""
    return [len(datums[0].input.tokens) // 4 for _, datums in stand.trainer.of("ForwardBackward")]


async def test_chunks_arriving_2_3_4_1_run_in_order(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    ids = {}
    for seq_id in (2, 3, 4):
        response = await rest.forward_backward(model_id, seq_id, data=[text_datum(seq_id)])
        assert response.status_code == 200
        ids[seq_id] = response.json()["request_id"]
    waiting = await rest.poll(ids[2])
    assert waiting.status_code == 408
    assert "request 1" in waiting.json()["queue_state_reason"]
    assert lengths(stand) == []
    ids[1] = (await rest.forward_backward(model_id, 1, data=[text_datum(1)])).json()["request_id"]
    for request_id in ids.values():
        assert "error" not in await rest.result(request_id)
    assert lengths(stand) == [1, 2, 3, 4]


async def test_step_queued_behind_a_loss_sees_exactly_its_gradients(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    steps = []
    for seq_id in (2, 4):
        await rest.forward_backward(model_id, seq_id - 1, data=[text_datum()] * seq_id)
        steps.append((await rest.optim_step(model_id, seq_id))["request_id"])
    assert [(await rest.result(step))["metrics"]["gradients:sum"] for step in steps] == [2, 4]


async def test_the_trainer_hears_of_images_while_it_computes(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    stand.trainer.open.clear()
    await rest.forward_backward(model_id, 1)
    await eventually(lambda: stand.trainer.waiting == 1)
    second = await rest.forward_backward(model_id, 2, data=[image_datum(), text_datum(), image_datum()])
    await eventually(lambda: bool(stand.trainer.hints))
    (hint,) = stand.trainer.hints
    assert hint.model_id == model_id
    assert [(len(feature.digest), feature.source) for feature in hint.features] == [(64, stand.renderer.address)]
    assert len(stand.trainer.of("ForwardBackward")) == 1
    stand.trainer.open.set()
    assert "error" not in await rest.result(second.json()["request_id"])


async def test_repeats_return_the_first_future_and_run_once(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    first = (await rest.forward_backward(model_id, 1)).json()
    again = await asyncio.gather(*(rest.forward_backward(model_id, 1) for _ in range(5)))
    assert all(response.json() == first for response in again)
    await rest.result(first["request_id"])
    assert (await rest.forward_backward(model_id, 1)).json() == first
    await stand.stop()
    await stand.start()
    assert (await rest.forward_backward(model_id, 1)).json() == first
    assert len(stand.trainer.of("ForwardBackward")) == 1


async def test_concurrent_first_submissions_of_one_seq_run_once(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    answers = await asyncio.gather(*(rest.optim_step(model_id, 1) for _ in range(8)))
    assert len({answer["request_id"] for answer in answers}) == 1
    await rest.result(answers[0]["request_id"])
    assert len(stand.trainer.of("OptimStep")) == 1


async def test_ephemeral_save_resent_with_another_session_number_is_the_same_request(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    body: dict[str, Any] = {"model_id": model_id, "seq_id": 1, "kind": "snapshot"}
    answers = [await rest.ok("save_weights_for_sampler", sampling_session_seq_id=number, **body) for number in (0, 1)]
    assert answers[0] == answers[1]
    await rest.result(answers[0]["request_id"])
    assert len(stand.trainer.of("TakeSnapshot")) == 1


async def test_create_model_repeated_makes_one_model(stand: Stand, rest: Rest) -> None:
    assert await rest.create_model() == await rest.create_model()
    assert len(stand.trainer.of("CreateModel")) == 1


async def test_sample_repeated_has_the_same_ids(stand: Stand, rest: Rest) -> None:
    sampling_id = await rest.snapshot(await rest.create_model(), 1)
    seq_id = 10**18 + 3
    answers = [(await rest.sample(sampling_id, seq_id, num_samples=3)).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(set(answers[0]["sample_sequence_ids"])) == 3
    await rest.result(answers[0]["request_id"])
    assert len(stand.sampler.of("Sample")) == 1


async def test_sampling_session_repeated_is_the_same(stand: Stand, rest: Rest) -> None:
    body = {"session_id": rest.session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
    answers = [await rest.ok("create_sampling_session", **body) for _ in range(2)]
    assert answers[0] == answers[1]


async def test_two_models_do_not_wait_for_each_other(stand: Stand, rest: Rest) -> None:
    first, second = await rest.create_model(0), await rest.create_model(1)
    await rest.optim_step(first, 2)
    done = await rest.optim_step(second, 1)
    assert "error" not in await rest.result(done["request_id"])


async def test_bad_datum_fails_its_future_and_the_next_call_works(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> tuple[str, str, float]:
        training = client.create_lora_training_client(base_model=MODEL).result()
        data = [text_datum() for _ in range(3500)]
        data[2500] = image_datum(expected_tokens=5)
        errors = []
        loss, step = training.forward_backward(data, "cross_entropy"), training.optim_step(ADAM)
        for future in (loss, step):
            try:
                future.result()
            except tinker.RequestFailedError as error:
                errors.append(f"{error.category.name} {error}")
        training.forward_backward([text_datum()], "cross_entropy").result()
        metrics = training.optim_step(ADAM).result().metrics or {}
        return errors[0], errors[1], metrics["gradients:sum"]

    loss_error, step_error, gradients = await stand.sdk(use)
    assert "data[452]" in loss_error
    assert "User" in loss_error
    assert "User" in step_error
    assert "expected 5 tokens, got 4" in loss_error
    assert "forward_backward request 3 before it failed" in step_error
    assert gradients == 1, "the step after the refused one must only include later gradients"
    names = stand.trainer.names()
    assert names.index("ClearGradients") < names.index("OptimStep")


async def test_taint_survives_a_restart_and_is_gone_after_one_step(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    stand.trainer.failures["ForwardBackward"].append(Internal("out of memory"))
    failed = await rest.forward_backward(model_id, 1)
    assert (await rest.result(failed.json()["request_id"]))["error"] == "out of memory"
    await stand.stop()
    await stand.start()
    refused = await rest.result((await rest.optim_step(model_id, 2))["request_id"])
    assert refused["category"] == "user"
    assert "request 1" in refused["error"]
    assert "out of memory" in refused["error"]
    assert "metrics" in await rest.result((await rest.optim_step(model_id, 3))["request_id"])


async def test_a_refused_loss_that_its_client_knows_of_is_made_good_by_the_next(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    refused = await rest.forward_backward(model_id, 1, data=[image_datum(expected_tokens=9)])
    assert "expected 9 tokens" in (await rest.result(refused.json()["request_id"]))["error"]
    again = await rest.forward_backward(model_id, 2, data=[text_datum()] * 3)
    assert "error" not in await rest.result(again.json()["request_id"])
    step = await rest.result((await rest.optim_step(model_id, 3))["request_id"])
    assert step["metrics"]["gradients:sum"] == 3


async def test_a_refused_loss_spoils_the_step_if_the_client_could_not_know_or_has_gradients(
    stand: Stand, rest: Rest
) -> None:
    model_id = await rest.create_model()
    bad = [image_datum(expected_tokens=9)]

    async def refused(seq_id: int) -> str:
        error: str = (await rest.result((await rest.optim_step(model_id, seq_id))["request_id"]))["error"]
        return error

    # All parts of one batch are sent before any of them is answered.
    second = await rest.forward_backward(model_id, 2)
    first = await rest.forward_backward(model_id, 1, data=bad)
    assert "error" in await rest.result(first.json()["request_id"])
    assert "error" not in await rest.result(second.json()["request_id"])
    assert "request 1 before it failed" in await refused(3)
    # There are gradients already, and nothing says whether the client wants them combined with later ones.
    await rest.forward_backward(model_id, 4)
    assert "error" in await rest.result((await rest.forward_backward(model_id, 5, data=bad)).json()["request_id"])
    assert "error" not in await rest.result((await rest.forward_backward(model_id, 6)).json()["request_id"])
    assert "request 5 before it failed" in await refused(7)
    # The second attempt also has several parts, one of which is invalid.
    assert "error" in await rest.result((await rest.forward_backward(model_id, 8, data=bad)).json()["request_id"])
    third = await rest.forward_backward(model_id, 10)
    await rest.forward_backward(model_id, 9, data=bad)
    assert "error" not in await rest.result(third.json()["request_id"])
    assert "request 9 before it failed" in await refused(11)


async def test_a_loss_after_a_step_that_failed_begins_at_zero(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await rest.forward_backward(model_id, 1, data=[text_datum()] * 2)
    wrong = await rest.ok("optim_step", model_id=model_id, seq_id=2, adam_params={"momentum": 1.0})
    assert "momentum" in (await rest.result(wrong["request_id"]))["error"]
    corrected = await rest.result((await rest.optim_step(model_id, 3))["request_id"])
    assert corrected["metrics"]["gradients:sum"] == 2, "only the step was wrong, so only it is sent again"
    await rest.forward_backward(model_id, 4, data=[text_datum()] * 2)
    await rest.ok("optim_step", model_id=model_id, seq_id=5, adam_params={"momentum": 1.0})
    await rest.forward_backward(model_id, 6, data=[text_datum()] * 2)
    step = await rest.result((await rest.optim_step(model_id, 7))["request_id"])
    assert step["metrics"]["gradients:sum"] == 2, "both are sent again, so the gradients must not double"


async def test_failed_forward_does_not_taint(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> float:
        training = client.create_lora_training_client(base_model=MODEL).result()
        training.forward_backward([text_datum()], "cross_entropy").result()
        try:
            training.forward([image_datum(expected_tokens=9)], "cross_entropy").result()
        except tinker.RequestFailedError:
            return (training.optim_step(ADAM).result().metrics or {})["gradients:sum"]
        raise AssertionError("it did not fail")

    assert await stand.sdk(use) == 1


async def test_body_above_the_limit_is_413_and_uses_up_its_seq_id(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    await stand.stop()
    await stand.start(max_body_bytes=2**20)
    large = forward_backward_body(model_id, 1, [image_datum(None, b"\x89PNG" + b"x" * 2**21)])
    response = await rest.send(large)
    assert response.status_code == 413
    assert "1048576 bytes" in response.json()["detail"]
    step = await rest.result((await rest.optim_step(model_id, 2))["request_id"])
    assert "request 1" in step["error"], "the step must fail because gradients are missing, and not hang"
    bomb = zstandard.ZstdCompressor().compress(forward_backward_body(model_id, 3) + b"\0" * 2**24)
    assert len(bomb) < 2**20
    assert (await rest.send(bomb, **{"Content-Encoding": "zstd"})).status_code == 413
    assert "error" in await rest.result((await rest.optim_step(model_id, 4))["request_id"])
    good = await rest.forward_backward(model_id, 5)
    assert "error" not in await rest.result(good.json()["request_id"])


@pytest.mark.parametrize("pyqwest", [True, False])
async def test_sdk_raises_413_at_once_and_goes_on(stand: Stand, pyqwest: bool) -> None:
    await stand.stop()
    await stand.start(max_body_bytes=2**20, sdk_flags={"use_pyqwest_transport": pyqwest})

    def use(client: tinker.ServiceClient) -> tuple[str, float]:
        training = client.create_lora_training_client(base_model=MODEL).result()
        large = image_datum(None, b"\x89PNG" + b"x" * 2**23)
        with pytest.raises(tinker.APIStatusError) as caught:
            training.forward_backward([large], "cross_entropy").result()
        with pytest.raises(tinker.RequestFailedError, match="request 1 before it failed"):
            training.optim_step(ADAM).result()
        training.forward_backward([text_datum()], "cross_entropy").result()
        return str(caught.value), (training.optim_step(ADAM).result().metrics or {})["gradients:sum"]

    error, gradients = await stand.sdk(use)
    assert "413" in error
    assert gradients == 1


async def test_zstd_body_decodes_as_plain(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    for seq_id, compress in ((1, False), (2, True)):
        body = forward_backward_body(model_id, seq_id, [image_datum(), text_datum()])
        headers = {"Content-Encoding": "zstd"} if compress else {}
        response = await rest.send(zstandard.compress(body) if compress else body, **headers)
        assert "error" not in await rest.result(response.json()["request_id"])
    plain, compressed = stand.trainer.of("ForwardBackward")
    assert plain[1] == compressed[1]


async def test_undecodable_and_unknown_are_4xx(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    assert (await rest.send(b"\xff\xff\xff")).status_code == 400
    assert (await rest.send(b"nonsense", **{"Content-Encoding": "zstd"})).status_code == 400
    assert (await rest.send(b"", **{"Content-Encoding": "br"})).status_code == 400
    assert (await rest.forward_backward("sess-x:train:0", 1)).status_code == 404
    assert (await rest.http.post("optim_step", content=b"{")).status_code == 400
    assert (await rest.post("optim_step", model_id=model_id)).status_code == 400
    torn = forward_backward_body(model_id, 1)[:-3]
    assert (await rest.send(torn)).status_code == 400
    step = await rest.result((await rest.optim_step(model_id, 2))["request_id"])
    assert "request 1" in step["error"], "a truncated body uses up its seq_id, too"
    for response in (await rest.send(b"\xff"), await rest.http.post("optim_step", content=b"{")):
        assert response.json()["detail"], "no 400 may have an empty message"


async def test_wrong_fields_fail_the_future_by_name(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    bodies: list[tuple[str, dict[str, Any], str | None]] = [
        ("optim_step", {"adam_params": {"learning_rate": 1e-3, "momentum": 0.9}}, "adam_params.momentum"),
        ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 1e-3}}, "dimuon"),
        ("optim_step", {}, "adam_params"),
        ("save_weights", {"path": "../up"}, "'../up' is not a name"),
        ("save_weights", {"path": "ok", "ttl_seconds": 60}, "ttl_seconds is 60"),
        ("save_weights_for_sampler", {"path": "a", "kind": "inflight"}, "inflight"),
        ("save_weights_external", {"path": "a", "age_encryption_recipients": ["x"]}, "age_encryption_recipients[0]"),
        ("save_weights_for_sampler", {}, "path or sampling_session_seq_id"),
        ("load_weights", {"path": "tinker://nowhere/weights/x", "optimizer": True}, "no checkpoint tinker://nowhere"),
        ("load_weights", {"path": "s3://x", "optimizer": True}, "is not a checkpoint"),
        ("save_weights", {"path": "fine"}, None),
    ]
    for seq_id, (path, body, words) in enumerate(bodies, start=1):
        answer = await rest.result((await rest.ok(path, model_id=model_id, seq_id=seq_id, **body))["request_id"])
        if words is None:
            assert answer["path"].endswith("/weights/fine")
        else:
            assert words in answer["error"]
            assert answer["category"] == "user"
    refused = await rest.ok(
        "create_model", session_id=rest.session_id, model_seq_id=5, base_model=MODEL, lora_config={"rank": 65}
    )
    assert "1 .. 64" in (await rest.result(refused["request_id"]))["error"]
    nothing = {"rank": 8, "train_unembed": False, "train_mlp": False, "train_attn": False}
    refused = await rest.ok(
        "create_model", session_id=rest.session_id, model_seq_id=6, base_model=MODEL, lora_config=nothing
    )
    assert "at least one" in (await rest.result(refused["request_id"]))["error"]
    body = {"session_id": rest.session_id, "model_seq_id": 7, "base_model": "other", "lora_config": {"rank": 8}}
    assert (await rest.post("create_model", **body)).status_code == 404


async def test_checkpoint_name_clash_and_overwrite(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    results = []
    for seq_id, more in enumerate(({}, {}, {"overwrite": True, "user_metadata": {"k": "v"}}), start=1):
        saved = await rest.ok("save_weights", model_id=model_id, seq_id=seq_id, path="a", **more)
        results.append(await rest.result(saved["request_id"]))
    assert results[0] == results[2]
    assert "already" in results[1]["error"]
    assert results[1]["category"] == "user"
    uris = [request.uri for request in stand.trainer.of("SaveState")]
    assert len(set(uris)) == 2, "an overwrite must not write over the checkpoint that it replaces"


async def test_missing_request_is_given_up_and_the_step_behind_it_refused(stand: Stand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(gap_timeout_s=0.3)
    model_id = await rest.create_model()
    refused = await rest.result((await rest.optim_step(model_id, 3))["request_id"])
    assert "requests 1 to 2 never arrived" in refused["error"]
    late = await rest.forward_backward(model_id, 1)
    assert "arrived too late" in (await rest.result(late.json()["request_id"]))["error"]
    refused = await rest.result((await rest.optim_step(model_id, 4))["request_id"])
    assert "request 1" in refused["error"], "a request that came too late is missing from this step, too"
    assert "metrics" in await rest.result((await rest.optim_step(model_id, 5))["request_id"])


async def test_running_command_that_may_run_twice_does_so_after_a_restart(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    stand.trainer.open.clear()
    saved = await rest.ok("save_weights_for_sampler", model_id=model_id, seq_id=1, sampling_session_seq_id=0)
    await eventually(lambda: "TakeSnapshot" in stand.trainer.names())
    await stand.stop()
    stand.trainer.open.set()
    await stand.start()
    answer = await rest.result(saved["request_id"])
    sample = await rest.sample(answer["sampling_session_id"], 0)
    assert "sequences" in await rest.result(sample.json()["request_id"])
    names = [request.snapshot_id for request in stand.trainer.of("TakeSnapshot")]
    assert names == [f"{model_id}@1", f"{model_id}@2"], "a name must not be given twice"


async def test_queued_and_running_requests_survive_a_restart(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    sampling_id = await rest.snapshot(model_id, 1)
    await eventually(lambda: f"{model_id}@1" in stand.sampler.adapters)
    stand.trainer.open.clear()
    stand.sampler.open.clear()
    running = (await rest.forward_backward(model_id, 2)).json()["request_id"]
    queued = [(await rest.forward_backward(model_id, 3)).json()["request_id"]]
    early = (await rest.forward_backward(model_id, 5)).json()["request_id"]
    sample = (await rest.sample(sampling_id, 0)).json()["request_id"]
    await eventually(lambda: "ForwardBackward" in stand.trainer.names() and stand.sampler.running == 1)
    await stand.stop()
    stand.trainer.open.set()
    stand.sampler.open.set()
    await stand.start()
    assert len((await rest.result(sample))["sequences"]) == 1, "a sample is repeated"
    for request_id in (running, queued[0]):
        assert "error" not in await rest.result(request_id)
    assert (await rest.poll(early)).status_code == 408, "a request that waits for an earlier one still waits"
    gradients = []
    for seq_id in (4, 6):
        step = await rest.result((await rest.optim_step(model_id, seq_id))["request_id"])
        gradients.append(step["metrics"]["gradients:sum"])
    assert gradients == [2, 1], "a loss that ran while the gateway was down is computed once"
    assert "error" not in await rest.result(early)
    assert await rest.snapshot(model_id, 7) != sampling_id
    assert [r.snapshot_id.split("@")[1] for r in stand.trainer.of("TakeSnapshot")] == ["1", "2"]
