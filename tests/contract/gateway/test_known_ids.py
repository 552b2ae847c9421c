"""Isolation by id: a caller that knows every id, path and digest of another owner gains nothing.

A foreign id gets the same answer as an unknown one, over both APIs, and no service behind the gateway is called.
"""

import json
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from fovea.api.v1 import gateway_pb2 as pb
from fovea.api.v1 import gateway_pb2_grpc
from fovea.tinker.v1 import tinker_pb2
from fovea.wire.errors import from_rpc_error
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.keeping import KeepingTrainer
from tests.contract.gateway.requests import GRAPH, Rest, forward_backward_body
from tests.contract.gateway.test_checkpoints import OTHER_KEY, save

Send = Callable[[str, int], Awaitable[str]]
"""Sends a request of the caller with a given id and a new number; returns the outcome."""

THEIRS = (("x-api-key", OTHER_KEY),)


@pytest.fixture
async def stand(tmp_path: pathlib.Path, database_url: str) -> AsyncIterator[Stand]:
    """A stand with two owners; its trainer writes real files."""
    stand = Stand(tmp_path)
    stand.trainer = KeepingTrainer(lambda: stand.samplers)
    async with running(stand, database_url=database_url, api_key=[KEY, OTHER_KEY]):
        yield stand


@pytest.fixture
async def other(stand: Stand) -> AsyncIterator[Rest]:
    """The second owner, with a session."""
    async with stand.http(OTHER_KEY) as http:
        client = Rest(http)
        await client.open_session()
        yield client


COMMANDS = ("their state in one's own model", "a loss")


class Owned:
    """One object of the first owner for every kind of id, each with an unknown id of the same form."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest

    async def make(self) -> "Owned":
        rest = self._rest
        self.model = await rest.create_model()
        self.state = await save(rest, self.model, 1, "state")
        self.weights = await save(rest, self.model, 2, "weights", "save_weights_for_sampler")
        self.sampling = await rest.snapshot(self.model, 3)
        self.future = (await rest.optim_step(self.model, 4))["request_id"]
        body = {"session_id": rest.session_id, "custom_loss_seq_id": 0, "name": "n", "graph": GRAPH}
        made = await rest.ok("create_custom_loss", **body, inputs=[{"name": "logprobs", "rank": 1}])
        self.loss = (await rest.result(made["request_id"]))["loss_id"]
        return self

    def unknown(self, known: str) -> str:
        """Returns the same id in a session that never existed."""
        session = self._rest.session_id
        return known.replace(session, f"{session[:-8]}{'0' * 8}")


async def outcome(client: Rest, route: str, **body: Any) -> str:
    """Returns the outcome of a REST request, with the error of its future."""
    answer = await client.post(route, **body)
    if answer.status_code == 200 and "request_id" in answer.json():
        return json.dumps(await client.result(answer.json()["request_id"]))
    known = {name: value for name, value in answer.json().items() if name != "request_id"}
    return f"{answer.status_code} {json.dumps(known)}"


def rest_requests(client: Rest, model: str, owned: Owned) -> dict[str, tuple[str, Send]]:
    """Returns requests of the second owner by description: an id of the first owner, and a function that sends it."""
    session = client.session_id

    def sending(route: str, field: str, **body: Any) -> Send:
        def send(name: str, number: int) -> Awaitable[str]:
            number_of = {"seq_id": number} if "model_id" in body else {}
            number_of |= {"model_seq_id": number} if "model_seq_id" in body else {}
            number_of |= {"sampling_session_seq_id": number} if "sampling_session_seq_id" in body else {}
            return outcome(client, route, **body | number_of | {field: name})

        return send

    async def loss(name: str, number: int) -> str:
        request = tinker_pb2.ForwardBackwardRequest.FromString(forward_backward_body(model, number, loss_fn="custom"))
        request.loss_fn_config_v2["loss_id"].text = name
        answer = await client.send(request.SerializeToString())
        return json.dumps(await client.result(answer.json()["request_id"]))

    made = {"session_id": session, "model_seq_id": 0}
    return {
        "a model of their state": (owned.state, sending("load_weights", "path", optimizer=True, **made)),
        "their state in one's own model": (
            owned.state,
            sending("load_weights", "path", model_id=model, optimizer=True),
        ),
        "a copy": (owned.state, sending("copy_weights", "source_path", **made)),
        "what is in it": (owned.weights, sending("weights_info", "tinker_path")),
        "samples of their weights": (
            owned.weights,
            sending("create_sampling_session", "model_path", session_id=session, sampling_session_seq_id=0),
        ),
        "a sampling session": (owned.sampling, sending("join_sampling_session", "sampling_session_id")),
        "a result": (owned.future, sending("retrieve_future", "request_id")),
        "a loss": (owned.loss, loss),
        "a model in their session": (
            owned.model.partition(":")[0],
            sending("create_model", "session_id", base_model=MODEL, model_seq_id=0),
        ),
    }


def asked(stand: Stand) -> list[str]:
    """Returns the calls of trainer and sampler, except those that query their identity."""
    calls = (*stand.trainer.calls, *stand.sampler.calls)
    return [name for name, _ in calls if not name.startswith("Get")]


async def test_over_rest_an_id_of_another_owner_looks_unknown(stand: Stand, rest: Rest, other: Rest) -> None:
    owned = await Owned(rest).make()
    model = await other.create_model()
    numbers = {True: 1, False: 1}  # command numbers of a model have no gaps
    for what, (known, send) in rest_requests(other, model, owned).items():
        answers = []
        for name in (known, owned.unknown(known)):
            before = asked(stand)
            is_command = what in COMMANDS
            answers.append((await send(name, numbers[is_command])).replace(name, "ID"))
            numbers[is_command] += 1
            assert asked(stand) == before, f"{what}: a service was called"
        assert answers[0].replace(known, "ID") == answers[1], what
        assert "rror" in answers[0] or answers[0].startswith("404"), f"{what}: {answers[0]}"


async def test_over_grpc_too(stand: Stand, rest: Rest, other: Rest) -> None:
    owned = await Owned(rest).make()
    model, session = await other.create_model(), other.session_id
    assert stand.gateway is not None
    async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        header = pb.SubmitForwardBackwardHeader(model_id=model, loss_function="custom", backward=True)
        requests: dict[str, tuple[str, str, Any]] = {
            "SubmitLoadState": (owned.state, "path", pb.SubmitLoadStateRequest(model_id=model)),
            "SubmitCreateModel": (
                owned.state, "from_path", pb.SubmitCreateModelRequest(session_id=session, base_model=MODEL)
            ),
            "CreateSamplingSession": (
                owned.weights, "model_path", pb.CreateSamplingSessionRequest(session_id=session, base_model=MODEL)
            ),
            "SampleTokens": (owned.sampling, "sampling_session_id", pb.SampleTokensRequest(sample_count=1)),
            "WaitFuture": (owned.future, "future_id", pb.WaitFutureRequest(timeout_s=1)),
            "SubmitForwardBackward": (owned.loss, "custom_loss_id", header),
        }  # fmt: skip
        number = command = 1

        async def ask(method: str, message: Any) -> str:
            try:
                if method == "SubmitForwardBackward":
                    answer = await stub.SubmitForwardBackward(
                        iter([pb.SubmitForwardBackwardRequest(header=message)]), metadata=THEIRS
                    )
                elif method in ("SampleTokens", "WaitFuture"):
                    return str([event async for event in getattr(stub, method)(message, metadata=THEIRS)])
                else:
                    answer = await getattr(stub, method)(message, metadata=THEIRS)
                waiting = stub.WaitFuture(
                    pb.WaitFutureRequest(future_id=answer.future_id, timeout_s=20), metadata=THEIRS
                )
                return str([event async for event in waiting])
            except grpc.aio.AioRpcError as error:
                raised = from_rpc_error(error)
                return f"error {type(raised).__name__} {raised.field} {raised.message}"

        for method, (known, field, message) in requests.items():
            answers = []
            for name in (known, owned.unknown(known)):
                setattr(message, field, name)
                fields = message.DESCRIPTOR.fields_by_name
                if "model_id" in fields:
                    message.seq_id, command = command, command + 1
                for numbered in {"model_seq_id", "sampling_session_seq_id"} & {*fields.keys()}:
                    setattr(message, numbered, number)
                    number += 1
                before = asked(stand)
                answers.append((await ask(method, message)).replace(name, "ID"))
                assert asked(stand) == before, f"{method}: a service was called"
            assert answers[0] == answers[1], method
            assert answers[0].startswith("error"), f"{method}: {answers[0]}"
