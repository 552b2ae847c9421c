"""A client that trains and samples like the Tinker SDK.

It sends numbered commands ahead of their answers, polls each answer until it arrives, and resends whatever may have
been lost.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np

from chaos.history import History, digest
from chaos.simulation.fake_weights import FakeWeights, sampled
from chaos.simulation.network import HttpAnswer
from fovea.tinker.v1 import tinker_pb2
from fovea.wire import tensors

MODEL = "simulated"
RATE = 1e-3
WRONG_LOSS = "no_such_loss"
_SPOILT = 0.1
"""Fraction of steps before which a batch fails."""
_REFUSED: dict[str, Any] = {"refused": "user"}
_LEAVING = 0.2
"""Fraction of clients that end their session while commands wait."""
_RETRIED = (408, 409, 429)
_LONGEST_PAUSE_S = 10.0
_HEARTBEAT_S = 10.0
_CALL_S = 60.0
_ABSENCES, _AWAY_S = 0.05, (60.0, 200.0)
"""Number of rounds after which the client pauses, and seconds of the pause; its session may be parked meanwhile."""

Post = Callable[[str, dict[str, str], bytes], Awaitable[HttpAnswer]]
"""A function that posts a body to a path, with headers. Raises ConnectionError."""


class CommandFailed(Exception):
    """A command was answered with an error."""


class Client:
    """One model in one session, trained in rounds. The name and the seed determine all requests.

    Args:
        post: Sends a request to the gateway.
        history: Receives the requests and answers.
        undisturbed: Receives the requests with the expected answers.
        rounds: Number of rounds.
    """

    def __init__(
        self, name: str, chance: random.Random, post: Post, history: History, undisturbed: History, rounds: int
    ) -> None:
        self.name, self._chance, self._post = name, chance, post
        self._history, self._undisturbed = history, undisturbed
        self._rounds = rounds
        self._count = self._seq_id = self._sample_seq_id = self._sampler_number = 0
        self._session_id = self.model_id = ""
        self._weights = FakeWeights("")
        self._is_away = False
        self._waiting: list[asyncio.Task[None]] = []
        self.last_seq_id = 0
        """Largest seq_id among the commands that it waited for."""
        self._samplers: list[tuple[int, str, str]] = []
        self.saved: dict[str, str] = {}
        self.saved_for_samplers: dict[str, str] = {}
        """Weights of each saved state and named snapshot, keyed by path."""

    async def run(self) -> None:
        """Runs a session with a model, all rounds and a final save. Raises CommandFailed."""
        answer = await self._ask("create_session", {"tags": [], "type": "create_session"}, key=f"{self.name}-session")
        self._session_id = answer["session_id"]
        heartbeat = asyncio.create_task(self._heartbeat())
        try:
            await self._create_model()
            for number in range(self._rounds):
                await self._round(number)
            await self._save("final")
            await self._finish()
            self.last_seq_id = self._seq_id
            if self._chance.random() < _LEAVING:
                await self._leave_work_behind()
        finally:
            heartbeat.cancel()
            for task in self._waiting:
                task.cancel()
        await self._ask(f"sessions/{self._session_id}/finish", {"reason": {"type": "success"}})

    async def _create_model(self) -> None:
        seed = self._chance.randrange(2**31)
        self._weights = FakeWeights.fresh(seed)
        self.model_id = f"{self._session_id}:train:0"
        body = {
            "session_id": self._session_id, "model_seq_id": 0, "base_model": MODEL,
            "lora_config": {"rank": 8, "seed": seed},
        }  # fmt: skip
        await self._command("create_model", "create_model", body, {"model_id": self.model_id}, lambda _: {
            "model_id": self.model_id
        })  # fmt: skip
        await self._finish()

    async def _round(self, number: int) -> None:
        """Sends two batches and a step before the previous round is answered; sometimes more."""
        before, self._waiting = self._waiting, []
        for _ in range(self._chance.randint(1, 2)):
            await self._forward_backward(number)
        is_spoilt = self._chance.random() < _SPOILT
        if is_spoilt:
            await self._spoil(number)
        await self._step(number, is_spoilt)
        if self._chance.random() < 0.5:
            await (self._snapshot if self._chance.random() < 0.7 else self._named_snapshot)(number)
        if self._samplers:
            await self._sample(number)
        if self._chance.random() < 0.3:
            await self._save(f"round-{number}")
        if self.saved and self._chance.random() < 0.2:
            await self._load(number)
        await asyncio.gather(*before)
        if self._chance.random() < _ABSENCES:
            await self._finish()
            self._is_away = True
            await asyncio.sleep(self._chance.uniform(*_AWAY_S))
            self._is_away = False
        await asyncio.sleep(self._chance.uniform(0.0, 3.0))

    async def _forward_backward(self, number: int) -> None:
        batch = [self._tokens() for _ in range(self._chance.randint(1, 2))]
        backward = self._chance.random() < 0.9
        loss = self._weights.loss(batch, backward)
        outputs = [[loss] * (len(tokens) // 4) for tokens in batch]
        body = self._batch(batch, "cross_entropy", backward)
        should = {"loss": loss, "digest": digest(outputs)}
        await self._command("forward_backward", "forward_backward", body, should, _losses, round=number)

    async def _spoil(self, number: int) -> None:
        """Sends a batch that fails, so that the next step is rejected and the gradients are discarded."""
        body = self._batch([self._tokens()], WRONG_LOSS, backward=True)
        await self._command("forward_backward", "forward_backward", body, _REFUSED, _losses, round=number)

    def _batch(self, batch: list[bytes], loss_fn: str, backward: bool) -> bytes:
        message = tinker_pb2.ForwardBackwardRequest(
            model_id=self.model_id, seq_id=self._next(), loss_fn=loss_fn, forward_only=not backward
        )
        for tokens in batch:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = tokens
            datum.loss_fn_inputs["target_tokens"].CopyFrom(_tensor(np.arange(len(tokens) // 4, dtype=np.int64)))
            datum.loss_fn_inputs["weights"].CopyFrom(_tensor(np.ones(len(tokens) // 4, np.float32)))
        return message.SerializeToString()

    async def _step(self, number: int, is_spoilt: bool) -> None:
        body = {"model_id": self.model_id, "seq_id": self._next(), "adam_params": {"learning_rate": RATE}}
        should: dict[str, Any] = _REFUSED
        if is_spoilt:
            self._weights.gradients = []
        else:
            should = {"metrics": {"grad_norm:mean": self._weights.take_step(RATE)}}
        await self._command("optim_step", "optim_step", body, should, lambda answer: answer, round=number)

    async def _snapshot(self, number: int) -> None:
        """Takes a snapshot of the weights and opens a sampling session on it."""
        weights = self._weights.weights
        body = {"model_id": self.model_id, "seq_id": self._next(), "kind": "snapshot"}

        def told(answer: dict[str, Any]) -> dict[str, Any]:
            self._samplers.append((number, answer["sampling_session_id"], weights))
            return {}

        self._sampler_number += 1
        body["sampling_session_seq_id"] = self._sampler_number
        await self._command("snapshot", "save_weights_for_sampler", body, {}, told, round=number)
        await self._waiting[-1]

    async def _named_snapshot(self, number: int) -> None:
        """Saves the weights for sampling under a name and opens a sampling session on them."""
        weights, path = self._weights.weights, f"tinker://{self.model_id}/sampler_weights/named-{number}"
        body = {"model_id": self.model_id, "seq_id": self._next(), "path": f"named-{number}", "kind": "snapshot"}
        self.saved_for_samplers[path] = weights
        await self._command("snapshot", "save_weights_for_sampler", body, {"path": path}, _path, round=number)
        await self._waiting[-1]
        self._sampler_number += 1
        opening = {
            "session_id": self._session_id, "sampling_session_seq_id": self._sampler_number, "model_path": path,
        }  # fmt: skip
        opened = await self._ask("create_sampling_session", opening)
        self._samplers.append((number, opened["sampling_session_id"], weights))

    async def _sample(self, number: int) -> None:
        """Samples from the newest or earlier weights."""
        snapshot, sampling_session_id, weights = self._chance.choice(self._samplers[-2:])
        prompt, seed = self._tokens(), self._chance.randrange(2**31)
        body = {
            "sampling_session_id": sampling_session_id, "seq_id": self._sample_seq_id, "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": np.frombuffer(prompt, "<i4").tolist()}]},
            "sampling_params": {"max_tokens": 6, "seed": seed},
        }  # fmt: skip
        self._sample_seq_id += 1
        should = {"tokens": sampled(weights, prompt, seed, 6), "logprobs": [-0.25] * 6}
        await self._command("sample", "asample", body, should, _sequence, round=number, snapshot=snapshot)

    async def _save(self, name: str) -> None:
        path = f"tinker://{self.model_id}/weights/{name}"
        self.saved[path] = self._weights.weights
        body = {"model_id": self.model_id, "seq_id": self._next(), "path": name}
        await self._command("save_state", "save_weights", body, {"path": path}, _path)

    async def _load(self, number: int) -> None:
        path = self._chance.choice(sorted(self.saved))
        self._weights.load(FakeWeights(self.saved[path]))
        body = {"model_id": self.model_id, "seq_id": self._next(), "path": path, "optimizer": True}
        await self._command("load_state", "load_weights", body, {}, lambda _: {}, round=number)

    async def _leave_work_behind(self) -> None:
        """Sends commands without waiting for their answers. The session ends while they wait or run."""
        step = {"model_id": self.model_id, "adam_params": {"learning_rate": RATE}}
        snapshot = {"model_id": self.model_id, "kind": "snapshot", "sampling_session_seq_id": self._sampler_number + 1}
        for route, body in (
            ("forward_backward", self._batch([self._tokens()], "cross_entropy", backward=True)),
            ("optim_step", {**step, "seq_id": self._next()}),
            ("save_weights_for_sampler", {**snapshot, "seq_id": self._next()}),
            ("optim_step", {**step, "seq_id": self._next()}),
        ):
            self._waiting.append(asyncio.create_task(self._leave(route, body)))
        await asyncio.sleep(self._chance.uniform(0.0, 1.0))

    async def _leave(self, route: str, body: dict[str, Any] | bytes) -> None:
        await self._ask(route, body)

    async def _finish(self) -> None:
        waiting, self._waiting = self._waiting, []
        await asyncio.gather(*waiting)

    def _next(self) -> int:
        self._seq_id += 1
        return self._seq_id

    def _tokens(self) -> bytes:
        return tensors.encode_tokens([self._chance.randrange(1000) for _ in range(self._chance.randint(2, 6))])

    async def _command(
        self,
        operation: str,
        route: str,
        body: dict[str, Any] | bytes,
        should: dict[str, Any],
        told: Callable[[dict[str, Any]], dict[str, Any]],
        **arguments: Any,
    ) -> None:
        """Sends a command and starts a task that waits for its answer. The network may reorder submissions."""
        number, self._count = self._count, self._count + 1
        key = {"client": self.name, "number": number}
        for history in (self._history, self._undisturbed):
            history.add({**key, "operation": operation, "invoked_s": time.monotonic(), "arguments": arguments})
        self._undisturbed.add({**key, "at_s": time.monotonic(), "value": should})

        async def answered() -> None:
            submitted = await self._ask(route, body)
            answer = await self._result(submitted["request_id"])
            if "error" in answer and should is _REFUSED:
                answer = {"refused": answer["category"]}
            if "error" in answer:
                self._history.add({**key, "at_s": time.monotonic(), "error": str(answer)})
                raise CommandFailed(f"{self.name} #{number} {operation}: {answer}")
            self._history.add(
                {**key, "at_s": time.monotonic(), "value": told(answer) if should is not _REFUSED else answer}
            )

        self._begin(answered())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._waiting.append(asyncio.create_task(work))

    async def _result(self, request_id: str) -> dict[str, Any]:
        body = json.dumps({"request_id": request_id}).encode()
        while True:
            answer = await self._try("retrieve_future", {}, body)
            if answer is not None and answer.status != 408:
                return _checked("retrieve_future", answer)
            if answer is None:
                await asyncio.sleep(1.0)

    async def _ask(self, route: str, body: dict[str, Any] | bytes, key: str = "") -> dict[str, Any]:
        """Makes a call and repeats it until it is answered."""
        headers = {"X-Idempotency-Key": key} if key else {}
        if isinstance(body, bytes):
            headers["Content-Type"] = "application/x-protobuf"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        pause_s = 0.5
        while (answer := await self._try(route, headers, data)) is None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return _checked(route, answer)

    async def _try(self, route: str, headers: dict[str, str], body: bytes) -> HttpAnswer | None:
        """Makes a call once. Returns None if it must be repeated."""
        try:
            async with asyncio.timeout(_CALL_S):
                answer = await self._post(route, headers, body)
        except (ConnectionError, TimeoutError):
            return None
        is_poll = route == "retrieve_future" and answer.status == 408
        return None if (answer.status in _RETRIED or answer.status >= 500) and not is_poll else answer

    async def _heartbeat(self) -> None:
        body = json.dumps({"session_id": self._session_id}).encode()
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            if self._is_away:
                continue
            await self._try("session_heartbeat", {}, body)


def _checked(route: str, answer: HttpAnswer) -> dict[str, Any]:
    if answer.status != 200:
        raise CommandFailed(f"{route} was answered {answer.status}: {answer.body.decode()[:300]}")
    decoded: dict[str, Any] = json.loads(answer.body)
    return decoded


def _tensor(array: np.ndarray) -> tinker_pb2.Tensor:
    dtype = tinker_pb2.DTYPE_INT64 if array.dtype == np.int64 else tinker_pb2.DTYPE_FLOAT32
    return tinker_pb2.Tensor(dtype=dtype, shape=list(array.shape), dense=array.tobytes())


def _losses(answer: dict[str, Any]) -> dict[str, Any]:
    outputs = [one["logprobs"]["data"] for one in answer["loss_fn_outputs"]]
    return {"loss": answer["metrics"]["loss:sum"], "digest": digest(outputs)}


def _path(answer: dict[str, Any]) -> dict[str, Any]:
    return {"path": answer["path"]}


def _sequence(answer: dict[str, Any]) -> dict[str, Any]:
    (sequence,) = answer["sequences"]
    return {"tokens": sequence["tokens"], "logprobs": sequence["logprobs"]}
