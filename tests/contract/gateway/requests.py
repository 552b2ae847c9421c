"""Bare requests as the SDK sends them, for tests of an order or a fault that the SDK never produces."""

from typing import Any

import httpx
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from tests.contract.gateway.fakes import MODEL

PROTOBUF = "application/x-protobuf"
PNG = b"\x89PNG\r\n\x1a\n" + b"x" * 64
NODES: list[dict[str, Any]] = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
        {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "logprobs"}], "kwargs": {}},
        {"op": "output", "name": "output", "target": "output",
         "args": [{"tuple": [{"ref": "sum_1"}, {"dict": {}}]}], "kwargs": {}},
]  # fmt: skip
GRAPH = {"format": 1, "nodes": NODES}
"""A traced loss: the sum of the log-probabilities."""


def text_datum(length: int = 5, weight: float = 1.0) -> types.Datum:
    """Returns a datum of `length` tokens, each of which predicts the next."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, length + 1))),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=list(range(2, length + 2)), dtype="int64", shape=[length]),
            "weights": types.TensorData(data=[weight] * length, dtype="float32", shape=[length]),
        },
    )


def image_input(expected_tokens: int | None = 4, data: bytes = PNG) -> types.ModelInput:
    """Returns two tokens, an image and two tokens."""
    return types.ModelInput(
        chunks=[
            types.EncodedTextChunk(tokens=[1, 2]),
            types.ImageChunk(data=data, format="png", expected_tokens=expected_tokens),
            types.EncodedTextChunk(tokens=[3, 4]),
        ]
    )


def image_datum(expected_tokens: int | None = 4, data: bytes = PNG) -> types.Datum:
    """Returns a datum of eight positions, four of which are an image."""
    return types.Datum(
        model_input=image_input(expected_tokens, data),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[0] * 8, dtype="int64", shape=[8]),
            "weights": types.TensorData(data=[0.0] * 6 + [1.0] * 2, dtype="float32", shape=[8]),
        },
    )


def forward_backward_body(
    model_id: str, seq_id: int, data: list[types.Datum] | None = None, loss_fn: str = "cross_entropy"
) -> bytes:
    """Returns the protobuf body of a loss."""
    request = ForwardBackwardRequest(
        model_id=model_id,
        seq_id=seq_id,
        forward_backward_input=ForwardBackwardInput(data=data or [text_datum()], loss_fn=loss_fn),  # type: ignore[arg-type]
    )
    return forward_backward_request_to_proto(request).SerializeToString()


class Rest:
    """A client that sends each request as given."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.session_id = ""

    async def post(self, route: str, /, **body: Any) -> httpx.Response:
        """Sends a POST request with a JSON body."""
        return await self.http.post(route, json=body)

    async def ok(self, route: str, /, **body: Any) -> dict[str, Any]:
        """Sends a POST request and checks that it succeeds."""
        response = await self.post(route, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def open_session(self) -> str:
        """Opens a session."""
        answer = await self.ok(
            "create_session", tags=[], user_metadata=None, sdk_version="0.38.0", type="create_session"
        )
        self.session_id = answer["session_id"]
        return self.session_id

    async def create_model(self, number: int = 0, rank: int = 8, **more: Any) -> str:
        """Creates a model and waits until it is ready."""
        if not self.session_id:
            await self.open_session()
        body: dict[str, Any] = {
            "session_id": self.session_id, "model_seq_id": number, "base_model": MODEL,
            "lora_config": {"rank": rank, "train_unembed": True, "train_mlp": True, "train_attn": True},
            "optimizer_config": {"type": "adamw"}, "type": "create_model",
        }  # fmt: skip
        answer = await self.ok("create_model", **(body | more))
        created = await self.result(answer["request_id"])
        assert created.get("model_id") == f"{self.session_id}:train:{number}", created
        return str(created["model_id"])

    async def forward_backward(self, model_id: str, seq_id: int, **more: Any) -> httpx.Response:
        """Submits a loss."""
        return await self.send(forward_backward_body(model_id, seq_id, **more))

    async def send(self, body: bytes, **headers: str) -> httpx.Response:
        """Sends a protobuf body to forward_backward."""
        return await self.http.post("forward_backward", content=body, headers={"Content-Type": PROTOBUF, **headers})

    async def optim_step(self, model_id: str, seq_id: int, **adam: float) -> dict[str, Any]:
        """Submits an optimizer step."""
        return await self.ok("optim_step", model_id=model_id, seq_id=seq_id, adam_params=adam, type="optim_step")

    async def snapshot(self, model_id: str, seq_id: int, number: int = 0) -> str:
        """Takes an ephemeral snapshot; returns its sampling session."""
        answer = await self.ok(
            "save_weights_for_sampler",
            model_id=model_id,
            seq_id=seq_id,
            sampling_session_seq_id=number,
            kind="snapshot",
        )
        return str((await self.result(answer["request_id"]))["sampling_session_id"])

    async def sample(self, sampling_session_id: str, seq_id: int, **more: Any) -> httpx.Response:
        """Submits a sample of four tokens."""
        body: dict[str, Any] = {
            "sampling_session_id": sampling_session_id,
            "seq_id": seq_id,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
            "type": "sample",
        }
        return await self.post("asample", **(body | more))

    async def poll(self, request_id: str, accept: str = "application/json") -> httpx.Response:
        """Sends one retrieve_future request."""
        body = {"request_id": request_id, "allow_metadata_only": True}
        return await self.http.post("retrieve_future", json=body, headers={"Accept": accept})

    async def result(self, request_id: str) -> dict[str, Any]:
        """Polls until a request ends; returns its result or error as JSON."""
        while True:
            response = await self.poll(request_id)
            if response.status_code != 408:
                assert response.status_code == 200, response.text
                answer: dict[str, Any] = response.json()
                return answer
