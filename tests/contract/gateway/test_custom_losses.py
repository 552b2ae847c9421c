"""Traced losses: stored once, referenced by calls, refused with a reason, and available after a restart."""

from typing import Any

import grpc
import pytest
import tinker
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from fovea.api.v1 import gateway_pb2 as pb
from fovea.api.v1 import gateway_pb2_grpc
from fovea.client import GatewayClient
from fovea.wire import custom_loss
from fovea.wire.errors import InvalidInput, NotFound
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import GRAPH, NODES, Rest, text_datum
from tests.unit.trainer.losses.traced import square_loss
from tests.waiting import eventually


def negative(logprobs: Any, weights: Any) -> Any:
    """A loss that the SDK can trace."""
    loss = -(logprobs * weights).sum()
    return loss, {"custom/loss:sum": loss}


async def _create(rest: Rest, number: int = 0, **changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "session_id": rest.session_id,
        "custom_loss_seq_id": number,
        "name": "total",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": GRAPH,
        "type": "create_custom_loss",
    }
    return await rest.ok("create_custom_loss", **(body | changes))


async def _call(rest: Rest, model_id: str, seq_id: int, loss_fn: str = "custom", **config: Any) -> dict[str, Any]:
    request = ForwardBackwardRequest(
        model_id=model_id,
        seq_id=seq_id,
        forward_backward_input=ForwardBackwardInput(
            data=[text_datum()],
            loss_fn=loss_fn,  # type: ignore[arg-type]
            loss_fn_config=config or None,
        ),
    )
    response = await rest.send(forward_backward_request_to_proto(request).SerializeToString())
    assert response.status_code == 200, response.text
    return await rest.result(response.json()["request_id"])


async def test_the_sdk_uploads_a_loss_and_names_it(stand: Stand) -> None:
    await stand.stop()
    await stand.start(sdk_flags={"custom_loss_server_side": True})

    def use(client: tinker.ServiceClient) -> tuple[Any, Any]:
        training = client.create_lora_training_client(base_model=MODEL, rank=4).result()
        handle = client.create_custom_loss(negative, {"logprobs": 1, "weights": 1}).result()
        data = [text_datum(), text_datum(3)]
        return handle, training.forward_backward_custom(data, handle).result()

    handle, result = await stand.sdk(use)
    assert handle.loss_id == f"{handle.session_id}:loss:0"
    assert "loss:sum" in result.metrics
    ((header, datums),) = stand.trainer.of("ForwardBackward")
    assert (header.loss_function, header.backward, len(datums)) == ("custom", True, 2)
    assert dict(header.loss_config) == {}
    graph = custom_loss.parse(header.custom_loss)
    assert [given.name for given in graph.inputs] == ["logprobs", "weights"]
    assert list(graph.metrics) == ["custom/loss:sum"]
    assert "weights" in datums[0].loss_inputs


async def test_without_the_flag_the_sdk_runs_it_itself(stand: Stand) -> None:
    await stand.stop()
    await stand.start(sdk_flags={"custom_loss_server_side": False})

    def use(client: tinker.ServiceClient) -> Any:
        training = client.create_lora_training_client(base_model=MODEL, rank=4).result()
        handle = client.create_custom_loss(negative, {"logprobs": 1, "weights": 1}).result()
        return training.forward_backward_custom([text_datum()], handle).result()

    result = await stand.sdk(use)
    assert "surrogate_loss:sum" in result.metrics
    losses = [(header.loss_function, header.backward) for header, _ in stand.trainer.of("ForwardBackward")]
    assert losses == [("cross_entropy", False), ("cross_entropy", True)]


async def test_a_repeat_gets_the_first_ones_id(rest: Rest) -> None:
    first = await _create(rest)
    again = await _create(rest, name="other")
    assert first["request_id"] == again["request_id"]
    created = await rest.result(first["request_id"])
    assert created == {"type": "create_custom_loss", "loss_id": f"{rest.session_id}:loss:0"}
    other = await rest.result((await _create(rest, 1))["request_id"])
    assert other["loss_id"] == f"{rest.session_id}:loss:1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"graph": {**GRAPH, "format": 2}}, "format 1"),
        ({"graph": {**GRAPH, "nodes": NODES[1:]}}, "placeholder"),
        ({"graph": {**GRAPH, "nodes": [NODES[0], {**NODES[1], "target": "item"}, NODES[2]]}},
         "graph.nodes[1] (sum_1) calls the method item"),
        ({"inputs": [{"name": "weights", "rank": 1}]}, "the first must be logprobs"),
        ({"inputs": []}, "0 entries"),
    ],
)  # fmt: skip
async def test_a_loss_that_is_not_allowed_fails_its_future(rest: Rest, changes: dict[str, Any], words: str) -> None:
    failed = await rest.result((await _create(rest, 3, **changes))["request_id"])
    assert failed["category"] == "user"
    assert words in failed["error"]
    model_id = await rest.create_model()
    unknown = await _call(rest, model_id, 1, loss_id=f"{rest.session_id}:loss:3")
    assert "does not exist in session" in unknown["error"]


async def test_bodies_that_are_no_request_are_refused_at_once(rest: Rest) -> None:
    body = {"session_id": rest.session_id, "custom_loss_seq_id": 0, "name": "n", "inputs": [], "graph": GRAPH}
    wrong: list[dict[str, Any]] = [
        {"custom_loss_seq_id": -1},
        {"custom_loss_seq_id": 1024},
        {"custom_loss_seq_id": 2**64},
        {"inputs": [{"name": "x", "rank": 3}]},
        {"graph": "x"},
        {"code": "x"},
    ]
    for changes in wrong:
        answer = await rest.post("create_custom_loss", **(body | changes))
        assert answer.status_code == 400, answer.text
        assert next(iter(changes)) in answer.text
    unknown = await rest.post("create_custom_loss", **(body | {"session_id": "sess-x"}))
    assert unknown.status_code == 404


async def test_wrong_names_fail_their_future_and_the_next_works(rest: Rest, stand: Stand) -> None:
    loss_id = (await rest.result((await _create(rest))["request_id"]))["loss_id"]
    model_id = await rest.create_model()
    other = Rest(rest.http)
    await other.open_session()
    foreign = await other.create_model(0)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("custom", {"loss_id": "nothing"}, "'nothing' does not exist in session"),
        ("custom", {}, "loss_fn_config.loss_id is missing"),
        ("custom", {"loss_id": 3.0}, "loss_fn_config.loss_id is missing"),
        ("custom", {"loss_id": loss_id, "mode": "fast"}, "loss_fn_config.mode is 'fast'; custom accepts numbers only"),
        ("cross_entropy", {"loss_id": loss_id}, "loss_fn_config.loss_id is"),
    ]
    for seq_id, (loss_fn, config, words) in enumerate(cases, 1):
        failed = await _call(rest, model_id, seq_id, loss_fn, **config)
        assert failed["category"] == "user"
        assert words in failed["error"]
    stolen = await _call(rest, foreign, 1, loss_id=loss_id)
    assert "does not exist in session" in stolen["error"]
    assert not stand.trainer.of("ForwardBackward")
    good = await _call(rest, model_id, len(cases) + 1, loss_id=loss_id)
    assert "loss:sum" in good["metrics"]
    ((header, _),) = stand.trainer.of("ForwardBackward")
    assert header.custom_loss.name == "total"


async def test_losses_survive_a_restart_and_end_with_their_session(stand: Stand, rest: Rest) -> None:
    created = await _create(rest)
    loss_id = (await rest.result(created["request_id"]))["loss_id"]
    model_id = await rest.create_model()
    await stand.stop()
    await stand.start()
    assert (await rest.result(created["request_id"]))["loss_id"] == loss_id
    assert (await _create(rest))["request_id"] == created["request_id"]
    assert "metrics" in await _call(rest, model_id, 1, loss_id=loss_id)
    await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"}, detail=None)
    gateway = stand.gateway
    assert gateway is not None
    header = pb.SubmitForwardBackwardHeader(loss_function="custom", custom_loss_id=loss_id)

    async def is_gone() -> bool:
        try:
            await gateway.components.custom_losses.get(rest.session_id, header)
        except NotFound:
            return True
        return False

    await eventually(is_gone)
    late = await rest.post(
        "create_custom_loss", session_id=rest.session_id, custom_loss_seq_id=1, name="n", inputs=[], graph=GRAPH
    )
    assert late.status_code == 410


async def test_a_loss_that_was_accepted_before_a_restart_is_kept_after_it(
    stand: Stand, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stand.gateway is not None
    monkeypatch.setattr(stand.gateway.components.custom_losses, "_start", lambda pending: None)
    created = await _create(rest)
    assert (await rest.poll(created["request_id"])).status_code == 408
    await stand.stop()
    await stand.start()
    assert (await rest.result(created["request_id"]))["loss_id"] == f"{rest.session_id}:loss:0"


async def test_over_grpc(stand: Stand) -> None:
    assert stand.gateway is not None
    async with GatewayClient(stand.gateway.grpc.address, KEY) as client:
        session_id = await client.create_session()
        loss_id = await client.create_custom_loss(session_id, 0, square_loss())
        assert await client.create_custom_loss(session_id, 0, square_loss(logprobs=2)) == loss_id
        with pytest.raises(InvalidInput, match="the first must be logprobs"):
            await client.create_custom_loss(session_id, 1, square_loss(x=1))
        with pytest.raises(NotFound):
            await client.create_custom_loss("sess-x", 0, square_loss())
        header = pb.SubmitForwardBackwardHeader(loss_function="custom", custom_loss_id=loss_id)
        kept = await stand.gateway.components.custom_losses.get(session_id, header)
        assert kept == square_loss()
    async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway_pb2_grpc.GatewayServiceStub(channel).CreateCustomLoss(pb.CreateCustomLossRequest())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
