"""An invalid value in any field, over either API, is the caller's error and never an internal one."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest

from fovea.tinker.v1 import tinker_pb2
from fovea_gateway.sessions.future import State
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.nasty import DEEP_VALUES, JSON_VALUES, Raw, mutants, places, to_json, with_value
from tests.contract.gateway.requests import PROTOBUF, Rest, forward_backward_body, image_datum
from tests.contract.gateway.valid_bodies import ROUTES, Bodies
from tests.waiting import eventually

JSON = {"Content-Type": "application/json"}
BINARY = {"Content-Type": PROTOBUF}
_AT_ONCE = 6


class Answers:
    """Sends many requests concurrently and collects those that were answered with a 500."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._sent: list[asyncio.Task[None]] = []
        self._room = asyncio.Semaphore(_AT_ONCE)
        self.wrong: list[str] = []

    def send(self, what: str, method: str, path: str, **more: Any) -> None:
        """Starts a request; `what` names it in a failure."""
        self._sent.append(asyncio.create_task(self._send(what, method, path, **more)))

    async def _send(self, what: str, method: str, path: str, **more: Any) -> None:
        async with self._room:
            response = await self._http.request(method, path, **more)
        if response.status_code >= 500:
            self.wrong.append(f"{method} {path} with {what:.200}: {response.status_code} {response.text:.200}")

    def post_json(self, session: aiohttp.ClientSession, route: str, text: str) -> None:
        """Starts a request with a JSON body, over aiohttp: of thousands of requests, httpx took most of the time."""
        self._sent.append(asyncio.create_task(self._post_json(session, route, text)))

    async def _post_json(self, session: aiohttp.ClientSession, route: str, text: str) -> None:
        async with self._room, session.post(route, data=text.encode(), headers=JSON) as response:
            if response.status >= 500:
                self.wrong.append(f"POST {route} with {text:.200}: {response.status} {(await response.text()):.200}")

    async def check(self) -> None:
        """Waits for all answers. Fails if one of them is a server error."""
        await asyncio.gather(*self._sent)
        assert self.wrong == []


@pytest.fixture
async def answers(stand: Stand) -> AsyncIterator[Answers]:
    """Collects the gateway's answers and checks them at the end, when no request runs any more."""
    async with stand.http() as http:
        answers = Answers(http)
        yield answers
        await answers.check()
    assert stand.gateway is not None
    futures = stand.gateway.components.futures
    await eventually(lambda: all(pending.state is not State.RUNNING for pending in futures.unfinished()))


@pytest.mark.usefixtures("no_surprises")
@pytest.mark.parametrize("share", [2, pytest.param(1, marks=pytest.mark.long)])
async def test_no_json_value_is_an_internal_error(stand: Stand, answers: Answers, made: Bodies, share: int) -> None:
    """Sends one in `share` of the pairs of a place and a value. With 2, places get every second value in turn."""
    key = {"X-API-Key": KEY}
    async with aiohttp.ClientSession(f"{stand.url}/api/v1/", headers=key) as session:

        def send(route: str, path: tuple[Any, ...], value: Any) -> None:
            text = to_json(with_value(made.of(route), path, value) if path else value)
            answers.post_json(session, route.partition("?")[0], text)

        for route in ROUTES:
            everywhere = list(places(made.of(route)))
            for number, value in enumerate(JSON_VALUES):
                for path in ((), ("no_such_field",), *everywhere[number % share :: share]):
                    send(route, path, value)
            for value in DEEP_VALUES:
                for path in ((), ("no_such_field",), *everywhere[:2]):
                    send(route, path, value)
        await answers.check()


@pytest.mark.usefixtures("no_surprises")
async def test_no_protobuf_body_is_an_internal_error(answers: Answers, made: Bodies) -> None:
    right = tinker_pb2.ForwardBackwardRequest.FromString(
        forward_backward_body(made.model_id, 1, [image_datum(), image_datum(None)])
    )
    right.data[0].loss_fn_inputs["sparse"].CopyFrom(
        tinker_pb2.Tensor(
            dtype=tinker_pb2.DTYPE_INT64,
            shape=[2, 2],
            sparse_csr=tinker_pb2.SparseCsr(
                values=np.ones(1, np.int64).tobytes(),
                crow_indices=np.array([0, 1, 1]).tobytes(),
                col_indices=np.ones(1, np.int64).tobytes(),
            ),
        )
    )
    right.data[1].model_input_spans.add().prompt_tokens.length = 1
    right.data[1].loss_fn_input_spans.add().sampled_tokens.length = 1
    numbers = itertools.count(1)
    for what, body in mutants(right):
        if body.seq_id == 1:
            body.seq_id = next(numbers)
        answers.send(what, "POST", "forward_backward", content=body.SerializeToString(), headers=BINARY)
    whole = right.SerializeToString()
    for cut in range(0, len(whole), 7):
        answers.send(f"{cut} bytes", "POST", "forward_backward", content=whole[:cut], headers=BINARY)


WORDS = ("1e30", "-1", str(2**63), str(2**70), "9" * 5000, "", "%00", "%ff", "%ed%a0%80", "1.5", "NaN", "x", "%0a")
PLACES = (
    "GET sessions/{}", "GET samplers/{}", "GET training_runs/{}", "GET training_runs/{}/checkpoints",
    "GET training_runs/{}/checkpoints/external_weights/a/external_weights_urls",
    "GET training_runs/a/checkpoints/external_weights/{}/external_weights_urls",
    "GET training_runs/a/checkpoints/{}/a/external_weights_urls",
    "GET exports/{}/a/b/c?expires=1&signature=a", "GET exports/a/{}/b/c?expires=1&signature=a",
    "GET exports/a/b/{}/c?expires=1&signature=a", "GET exports/a/b/c/d?expires={}",
    "PUT uploads/{}/a?expires=1&signature=a", "PUT uploads/a/{}?expires=1&signature=a", "PUT uploads/a/a?expires={}",
    "PUT uploads/a/a?expires=1&signature={}",
    "GET exports/a/b/c/d?expires=1&signature={}", "GET sessions?limit={}", "GET sessions?offset={}",
    "GET checkpoints?limit={}", "GET checkpoints?offset={}", "GET training_runs?limit={}",
    "GET training_runs?offset={}", "GET training_runs?access_scope={}", "GET {}",
    "DELETE training_runs/{}/checkpoints/weights/a", "DELETE training_runs/a/checkpoints/weights/{}",
    "DELETE training_runs/a/checkpoints/{}/a", "PUT training_runs/{}/checkpoints/weights/a/ttl",
    "POST training_runs/{}/checkpoints/weights/a/publish", "DELETE training_runs/a/checkpoints/weights/{}/publish",
    "POST sessions/{}/finish",
)  # fmt: skip


@pytest.mark.usefixtures("no_surprises")
async def test_no_path_or_query_is_an_internal_error(answers: Answers) -> None:
    for place, word in itertools.product(PLACES, WORDS):
        method, _, path = place.partition(" ")
        for body in {"ttl_seconds": 2**70}, {"reason": {"type": "success"}}:
            answers.send(word, method, path.format(word), content=to_json(body), headers=JSON)


HEADERS = (
    "host", "x-api-key", "x-idempotency-key", "content-encoding", "accept", "accept-encoding", "traceparent", "range",
    "content-type", "if-range", "x-tinker-weights-access-token", "cookie",
)  # fmt: skip
HEADER_VALUES = (b"", b"[", b"]", b"http://[", b"\xff\xfe", b"a:b:c", b"a" * 4000, b"bytes=-", b"00-0-0-0", b"zstd;q=x")


@pytest.mark.usefixtures("no_surprises")
async def test_no_header_is_an_internal_error(answers: Answers, made: Bodies) -> None:
    for name, value in itertools.product(HEADERS, HEADER_VALUES):
        headers, what = {name: value}, f"{name}: {value!r}"
        for route in "retrieve_future", "create_session", "copy_weights", "asample":
            answers.send(what, "POST", route, content=to_json(made.of(route)), headers=headers)
        for path in "exports/a/b/c/d?expires=1", "sessions", "nothing":
            answers.send(what, "GET", path, headers=headers)


@pytest.mark.parametrize(
    ("method", "path", "changes", "field"),
    [
        ("GET", "sessions?offset=1e30", {}, "offset"),
        ("GET", f"training_runs?offset={10**30}", {}, "offset"),
        ("GET", f"checkpoints?limit={2**63}", {}, "limit"),
        ("POST", "create_sampling_session", {"sampling_session_seq_id": 2**70}, "sampling_session_seq_id"),
        ("POST", "create_model", {"model_seq_id": 2**31}, "model_seq_id"),
        ("POST", "optim_step", {"adam_params": DEEP_VALUES[1]}, "body"),
        ("POST", "optim_step", {"seq_id": -1}, "seq_id"),
        ("POST", "load_weights", {"session_id": DEEP_VALUES[0]}, "body"),
        ("POST", "save_weights", {"path": Raw('"\\ud800"')}, "body"),
    ],
)
async def test_what_is_wrong_is_named(
    rest: Rest, made: Bodies, method: str, path: str, changes: dict[str, Any], field: str
) -> None:
    body = to_json(made.of(path) | changes) if changes else ""
    response = await rest.http.request(method, path, content=body, headers=JSON)
    is_too_deep = any(value in DEEP_VALUES for value in changes.values())  # also with more elements than allowed
    assert response.status_code == (413 if is_too_deep else 400)
    assert field in response.json()["detail"]


@pytest.mark.parametrize("shape", [[2**40, 0], [0, 2**70], [0, 0], [0, 2**31]])
async def test_a_target_table_is_no_larger_than_its_cells(rest: Rest, made: Bodies, shape: list[int]) -> None:
    targets = {"data": [], "dtype": "int64", "shape": shape}
    body = made.of("asample?empty") | {"target_prompt_logprobs": targets}
    answer = await rest.ok("asample", **body)
    failure = await rest.result(answer["request_id"])
    assert (failure["reason"], failure["category"]) == ("INVALID_INPUT", "user")
    assert "target_prompt_logprobs: shape is" in failure["error"]
