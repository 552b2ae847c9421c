"""The future protocol (tinker-contract.md, section 2)."""

import asyncio
import time
from typing import Any

import grpc
import pytest
import tinker
from tinker import types
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from fovea.api.v1 import gateway_pb2_grpc
from fovea.wire.errors import InvalidInput, from_rpc_error
from tests.contract.gateway.conftest import Stand
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import PROTOBUF, Rest
from tests.contract.gateway.test_grpc_front import wait
from tests.waiting import eventually


async def test_unfinished_future_is_held_then_answered_408_with_a_reason(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    stand.trainer.open.clear()
    submitted = await rest.forward_backward(model_id, 1)
    assert submitted.status_code == 200
    response = await rest.poll(submitted.json()["request_id"])
    assert response.status_code == 408
    assert response.json()["queue_state"] == "active"
    assert "trainer" in response.json()["queue_state_reason"]
    held = asyncio.create_task(rest.poll(submitted.json()["request_id"], PROTOBUF))
    stand.trainer.open.set()
    assert (await held).status_code == 200, "a held poll must deliver a result that arrives meanwhile"


async def test_results_are_protobuf_when_asked_and_json_else(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    loss_id = (await rest.forward_backward(model_id, 1)).json()["request_id"]
    step_id = (await rest.optim_step(model_id, 2))["request_id"]
    sampling_id = await rest.snapshot(model_id, 3)
    sample_id = (await rest.sample(sampling_id, 0, num_samples=2, prompt_logprobs=True)).json()["request_id"]
    listed = await rest.result(loss_id)
    assert listed["loss_fn_outputs"][0]["logprobs"] == {"data": [-1.0] * 5, "dtype": "float32", "shape": [5]}
    sample = await rest.result(sample_id)
    assert sample["prompt_logprobs"] == [None, -0.5, -0.5]
    loss_response, sample_response = await rest.poll(loss_id, PROTOBUF), await rest.poll(sample_id, PROTOBUF)
    assert loss_response.headers["content-type"] == sample_response.headers["content-type"] == PROTOBUF
    decoded = deserialize_forward_backward_output(loss_response.content)
    assert decoded.loss_fn_outputs[0]["logprobs"].tolist() == listed["loss_fn_outputs"][0]["logprobs"]["data"]
    assert decoded.metrics == listed["metrics"]
    proto_sample = deserialize_sample_response(sample_response.content)
    assert [s.tokens for s in proto_sample.sequences] == [s["tokens"] for s in sample["sequences"]]
    step = await rest.poll(step_id, PROTOBUF)
    assert step.headers["content-type"] == "application/json"
    assert step.json()["metrics"]["gradients:sum"] == 1


async def test_result_can_be_fetched_again_byte_for_byte_also_after_a_restart(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    request_id = (await rest.forward_backward(model_id, 1)).json()["request_id"]
    await rest.result(request_id)
    first, second = await rest.poll(request_id, PROTOBUF), await rest.poll(request_id, PROTOBUF)
    assert first.content == second.content
    await stand.stop()
    await stand.start()
    assert (await rest.poll(request_id, PROTOBUF)).content == first.content


async def test_unknown_is_404_expired_is_410_and_a_stranger_sees_nothing(stand: Stand, rest: Rest) -> None:
    assert (await rest.poll("sess-0:train:0:1")).status_code == 404
    model_id = await rest.create_model()
    request_id = (await rest.forward_backward(model_id, 1)).json()["request_id"]
    await rest.result(request_id)
    await stand.stop()
    await stand.start(result_ttl_s=1.0, api_key=["tml-local", "tml-other"])
    async with stand.http("tml-other") as http:
        other = Rest(http)
        assert (await other.poll(request_id)).status_code == 404
        assert (await other.post("get_info", model_id=model_id)).status_code == 404
        assert (await other.forward_backward(model_id, 2)).status_code == 404
    assert stand.gateway is not None

    async def is_expired() -> bool:
        assert stand.gateway is not None
        await stand.gateway.components.futures.sweep()
        return (await rest.poll(request_id)).status_code == 410

    await eventually(is_expired)


async def test_failed_futures_carry_their_category(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    bad = (await rest.forward_backward(model_id, 1, loss_fn="no_such_loss")).json()["request_id"]
    answer = await rest.result(bad)
    assert answer["category"] == "user"
    assert "no_such_loss" in answer["error"]
    stand.trainer.failures["SaveState"].append(_crash())
    saved = await rest.ok("save_weights", model_id=model_id, seq_id=2, path="x")
    answer = await rest.result(saved["request_id"])
    assert answer["category"] == "server"
    assert "disk" not in answer["error"], "internal details must not reach clients"


def _crash() -> Any:
    return OSError("disk of /secret/place is full")


async def test_no_client_reads_a_path_of_the_server(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    assert stand.gateway is not None
    root = stand.gateway.settings.checkpoint_root
    stand.trainer.failures["SaveState"] = [
        InvalidInput(f"{root}/m/weights/a.1 has no weights.q: it was saved from another model", field="uri"),
        InvalidInput("file:///srv/recovery/m/4/state.json is damaged", field="uri", place="/srv/recovery"),
    ]
    told = []
    for seq_id in (1, 2):
        saving = await rest.ok("save_weights", model_id=model_id, seq_id=seq_id, path=f"a{seq_id}")
        answer = await rest.result(saving["request_id"])
        told.append(answer["error"])
        async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await wait(stub, saving["request_id"])
        error = from_rpc_error(caught.value)
        assert (error.message, answer["reason"]) == (told[-1], "INVALID_INPUT")
        assert "/srv" not in str(error.metadata)
    assert told == [
        "the checkpoint has no weights.q: it was saved from another model",
        "state.json is damaged",
    ]
    live_state = stand.gateway.components.live_state
    await live_state.tick()
    assert {error.message for _, error in live_state.errors(None)} == set(told)


async def test_sdk_raises_request_failed_with_the_category(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> tinker.RequestFailedError:
        training = client.create_lora_training_client(base_model=MODEL).result()
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([1, 2]),
            loss_fn_inputs={"target_tokens": types.TensorData(data=[1], dtype="int64", shape=[1])},
        )
        try:
            training.forward_backward([datum], "cross_entropy").result()
        except tinker.RequestFailedError as error:
            return error
        raise AssertionError("it did not fail")

    error = await stand.sdk(use)
    assert error.category is types.RequestErrorCategory.User
    assert "target_tokens has 1 rows, the input 2" in str(error)


async def test_cancel_frees_the_sampler_and_is_harmless_when_repeated(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    sampling_id = await rest.snapshot(model_id, 1)
    stand.sampler.open.clear()
    request_id = (await rest.sample(sampling_id, 0)).json()["request_id"]
    await eventually(lambda: stand.sampler.running == 1)
    for _ in range(2):
        assert (await rest.post("cancel_future", request_id=request_id)).status_code == 200
    await eventually(lambda: stand.sampler.running == 0)
    assert stand.sampler.cancelled == 1
    assert "cancelled" in (await rest.result(request_id))["error"]
    assert (await rest.post("cancel_future", request_id="never-was")).status_code == 200


async def test_finished_session_refuses_work_and_stops_its_samples(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    sampling_id = await rest.snapshot(model_id, 1)
    stand.sampler.open.clear()
    request_id = (await rest.sample(sampling_id, 0)).json()["request_id"]
    held = (await rest.optim_step(model_id, 3))["request_id"]
    await eventually(lambda: stand.sampler.running == 1)
    finish = f"sessions/{rest.session_id}/finish"
    await rest.ok(finish, reason={"type": "success"}, detail=None)
    await rest.ok(finish, reason={"type": "errored"}, detail="late")
    assert "has ended (success)" in (await rest.result(request_id))["error"]
    assert "has ended (success)" in (await rest.result(held))["error"], "a command behind a gap must fail, not hang"
    await eventually(lambda: stand.sampler.running == 0)
    assert (await rest.forward_backward(model_id, 4)).status_code == 410
    assert (await rest.sample(sampling_id, 1)).status_code == 410
    assert (await rest.post("session_heartbeat", session_id=rest.session_id)).status_code == 410
    assert (await rest.post("session_heartbeat", session_id="sess-none")).status_code == 404
    await eventually(lambda: "DeleteModel" in stand.trainer.names())


async def test_sessions_expire_without_heartbeat(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    assert (await rest.post("session_heartbeat", session_id=rest.session_id)).status_code == 200
    await stand.stop()
    await stand.start(session_ttl_s=0.2)
    await eventually(lambda: [request.model_id for request in stand.trainer.of("DeleteModel")] == [model_id])
    assert (await rest.post("session_heartbeat", session_id=rest.session_id)).status_code == 410


async def test_a_jump_of_the_clock_ends_no_session(stand: Stand, rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stand.gateway is not None
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 86400)
    await stand.gateway.components.suspension.sweep()
    monkeypatch.undo()
    assert (await rest.post("session_heartbeat", session_id=rest.session_id)).status_code == 200


async def test_create_session_is_idempotent_by_key(stand: Stand, rest: Rest) -> None:
    body: dict[str, Any] = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
    headers = {"X-Idempotency-Key": "abc"}
    answers = [(await rest.http.post("create_session", json=body, headers=headers)).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0]["session_id"] != rest.session_id


async def test_open_endpoints(stand: Stand, rest: Rest) -> None:
    flags = await rest.ok("client/config", sdk_version="0.38.0")
    assert flags["sample_use_retrieve_futures"] is flags["sample_join_sampling_session"] is True
    assert (await rest.ok("client/dynamic_config", sdk_version="0.38.0")) == {"sample_cancel_enabled": True}
    assert (await rest.ok("telemetry", events=[], session_id="sessionless-1")) == {"status": "accepted"}
    async with stand.http(key=None) as http:
        assert (await http.get("healthz")).json() == {"status": "ok"}
    missing = await rest.post("no_such_call", target={})
    assert missing.status_code == 404
    assert missing.json()["detail"]


async def test_silence_ends_a_session_by_itself_and_frees_all_it_had(
    stand: Stand, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fovea_gateway.fronts.app._SWEEP_S", 0.1)
    await stand.stop()
    await stand.start(session_ttl_s=600.0)
    model_id = await rest.create_model()
    sampling_id = await rest.snapshot(model_id, 1)
    stand.sampler.open.clear()
    request_id = (await rest.sample(sampling_id, 0)).json()["request_id"]
    await eventually(lambda: stand.sampler.running == 1)
    stand.silence(rest.session_id, 601)
    await eventually(lambda: stand.sampler.running == 0)
    await eventually(lambda: [request.model_id for request in stand.trainer.of("DeleteModel")] == [model_id])
    assert "has ended (expired)" in (await rest.result(request_id))["error"]
    assert (await rest.post("session_heartbeat", session_id=rest.session_id)).status_code == 410
    # A poll for all samples of the session gets the failure, too.
    told = await rest.ok("retrieve_futures", target={"sampling_session_id": sampling_id}, timeout=0)
    assert told["completions"] == [{"state": "failed", "request_id": request_id}]


async def test_sdk_logs_why_a_sample_waits(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    await stand.stop()
    flags = {"sample_use_retrieve_futures": False}
    await stand.start(sampler_concurrency=1, poll_hold_s=0.3, sdk_flags=flags)

    def use(client: tinker.ServiceClient) -> None:
        sampling = client.create_sampling_client(base_model=MODEL).result()
        params = types.SamplingParams(max_tokens=1)
        futures = [sampling.sample(types.ModelInput.from_ints([1]), 1, params) for _ in range(2)]
        for future in futures:
            future.result()

    stand.sampler.open.clear()
    work = asyncio.create_task(stand.sdk(use))
    await eventually(lambda: "waiting for a place in a sampler" in caplog.text)
    stand.sampler.open.set()
    await work


async def test_no_400_is_empty_not_even_for_what_is_not_http(stand: Stand, rest: Rest) -> None:
    for headers, content in (
        ({"Content-Type": "application/json"}, b"{"),
        ({"Content-Type": "application/json"}, b""),
        ({"Content-Encoding": "br"}, b"{}"),
        ({"Content-Encoding": "zstd"}, b"no"),
        ({}, b"\xff\xfe"),
    ):
        for route in ("asample", "retrieve_future", "retrieve_futures", "forward_backward", "create_session"):
            response = await rest.http.post(route, content=content, headers=headers)
            assert response.status_code in (400, 404), (route, response.status_code)
            assert response.json()["detail"]
    reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
    writer.write(b"nonsense\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    assert body
    writer.close()


async def test_a_gateway_that_starts_before_its_renderer_lets_text_wait(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    opened = await rest.ok(
        "create_sampling_session", session_id=rest.session_id, sampling_session_seq_id=0, base_model=MODEL
    )
    await stand.stop()
    await stand.renderer.stop()
    await stand.start()
    batch = (await rest.forward_backward(model_id, 1)).json()["request_id"]
    sample = (await rest.sample(opened["sampling_session_id"], 0)).json()["request_id"]
    assert [(await rest.poll(one)).status_code for one in (batch, sample)] == [408, 408]
    await stand.renderer.start()
    assert "error" not in await rest.result(batch)
    assert "sequences" in await rest.result(sample)
