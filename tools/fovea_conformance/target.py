"""The server under test: real SDK clients, raw HTTP, and inputs for its model."""

import contextlib
import functools
import io
import itertools
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import tinker
from PIL import Image
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_proto_response
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from fovea_conformance.check import Failed, NotApplicable
from fovea_conformance.proxy import Proxy, Rule

logger = logging.getLogger(__name__)
_CLOSING_S = 5.0
_TEXT = "The quick brown fox jumps over the lazy dog and then it sleeps under a tree. "


@dataclass(frozen=True)
class Options:
    """Options of the command line.

    Args:
        base_url: Address of the server.
        api_key: API key of the server.
        model: Name of a model of the server.
        vlm: Whether the model accepts images.
        restart_command: Shell command that kills the server (SIGKILL) and restarts it; checks of restarts need it.
        session_ttl_s: Seconds without a heartbeat after which the server ends a session; 0 if unknown.
        long_job_s: Duration of the long job in seconds.
        checkpoint: Directory of the model's files, if it is not the model's name.
        cookbook: Whether to run the cookbook's recipes, which need their own environments.
        admin_key: API key of an administrator, for the audit log.
    """

    base_url: str
    api_key: str
    model: str
    vlm: bool = False
    restart_command: str = ""
    session_ttl_s: float = 0.0
    long_job_s: float = 300.0
    checkpoint: str = ""
    cookbook: bool = False
    admin_key: str = ""


class Target:
    """One server. Each check gets its own Target. `close` closes the sessions and proxies that the check opened."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.model = options.model
        self._stack = contextlib.ExitStack()
        self._http: httpx.Client | None = None

    def close(self) -> None:
        """Closes the sessions and proxies of this check."""
        self._stack.close()

    @property
    def http(self) -> httpx.Client:
        """A raw HTTP client below `/api/v1/`, with the key."""
        if self._http is None:
            self._http = self._stack.enter_context(self.raw())
        return self._http

    def raw(self, key: str | None = "", base_url: str = "", timeout_s: float = 90.0) -> httpx.Client:
        """Returns a new raw HTTP client, with another key, or without a key (None)."""
        headers = {} if key is None else {"X-API-Key": key or self.options.api_key}
        return httpx.Client(
            base_url=f"{(base_url or self.options.base_url).rstrip('/')}/api/v1/", headers=headers, timeout=timeout_s
        )

    def post(self, route: str, /, **body: Any) -> httpx.Response:
        """Posts JSON to a route."""
        return self.http.post(route, json=body)

    def proxy(
        self,
        flags: dict[str, Any] | None = None,
        prefix: str = "",
        before: Rule | None = None,
        after: Rule | None = None,
        replace_config: bool = False,
    ) -> Proxy:
        """Starts a proxy before the server (see `Proxy`)."""
        proxy = Proxy(self.options.base_url, flags, prefix, before, after, replace_config)
        return self._stack.enter_context(proxy)

    def service(self, proxy: Proxy | None = None, **more: Any) -> tinker.ServiceClient:
        """Returns a new SDK client, optionally through a proxy. It is closed after the check."""
        base_url = proxy.url if proxy else self.options.base_url
        client = tinker.ServiceClient(base_url=base_url, api_key=self.options.api_key, **more)
        self._stack.callback(_close_quietly, client)
        return client

    def rest(self, proxy: Proxy | None = None) -> tinker.RestClient:
        """Returns the SDK's client of single calls without a session, optionally through a proxy."""
        return tinker.RestClient(base_url=proxy.url if proxy else self.options.base_url, api_key=self.options.api_key)

    def training(
        self, service: tinker.ServiceClient | None = None, *, rank: int = 8, seed: int = 7, **more: Any
    ) -> tinker.TrainingClient:
        """Creates a LoRA model with seeded weights."""
        service = service or self.service()
        return service.create_lora_training_client(base_model=self.model, rank=rank, seed=seed, **more).result(60)

    def sampler(self, service: tinker.ServiceClient | None = None, model_path: str | None = None) -> Any:
        """Returns a sampling client of the base model, or of saved weights."""
        service = service or self.service()
        if model_path:
            return service.create_sampling_client(model_path=model_path)
        return service.create_sampling_client(base_model=self.model)

    def session(self) -> str:
        """Creates a session over raw HTTP, without heartbeats. It is finished after the check."""
        answer = self.post("create_session", tags=[], user_metadata={}, sdk_version="0.38.0", type="create_session")
        session_id = str(answer.raise_for_status().json()["session_id"])
        self._stack.callback(self._finish_quietly, session_id)
        return session_id

    def beat(self, session_id: str) -> httpx.Response:
        """Sends a heartbeat over raw HTTP."""
        return self.post("session_heartbeat", session_id=session_id, type="session_heartbeat")

    def raw_model(self, session_id: str, model_seq_id: int = 0, rank: int = 8, seed: int = 7) -> str:
        """Creates a LoRA model over raw HTTP; returns its id once it exists."""
        lora = {"rank": rank, "seed": seed, "train_unembed": True, "train_mlp": True, "train_attn": True}
        answer = self.post(
            "create_model", session_id=session_id, model_seq_id=model_seq_id, base_model=self.model, lora_config=lora,
            type="create_model",
        )  # fmt: skip
        result = self.collect(answer.raise_for_status().json()["request_id"])
        return str(result["model_id"])

    def submit(self, route: str, /, **body: Any) -> str:
        """Posts JSON that the server must accept; returns the request_id."""
        return str(_accepted(self.post(route, **body))["request_id"])

    def submit_loss(self, model_id: str, seq_id: int, data: list[types.Datum] | None = None, **more: Any) -> str:
        """Submits a forward_backward over raw HTTP; returns its request_id. For `more` see `loss_body`."""
        body = loss_body(model_id, seq_id, data or [self.datum()], **more)
        return str(_accepted(self.send_loss(body))["request_id"])

    def send_loss(self, body: bytes, **headers: str) -> httpx.Response:
        """Posts any bytes to forward_backward as protobuf."""
        return self.http.post(
            "forward_backward", content=body, headers={"Content-Type": "application/x-protobuf", **headers}
        )

    def sampling_session(self, session_id: str, number: int = 0) -> str:
        """Creates a sampling session of the base model over raw HTTP."""
        answer = self.post(
            "create_sampling_session", session_id=session_id, sampling_session_seq_id=number, base_model=self.model,
            type="create_sampling_session",
        )  # fmt: skip
        return str(answer.raise_for_status().json()["sampling_session_id"])

    def submit_sample(
        self, sampling_session_id: str, seq_id: int, max_tokens: int = 4, tokens: list[int] | None = None, **more: Any
    ) -> dict[str, Any]:
        """Submits an asample over raw HTTP; returns the response, with request_id and sample_sequence_ids."""
        body = self.sample_body(sampling_session_id, seq_id, max_tokens, tokens)
        return _accepted(self.post("asample", **(body | more)))

    def sample_body(
        self, sampling_session_id: str, seq_id: int, max_tokens: int = 4, tokens: list[int] | None = None
    ) -> dict[str, Any]:
        """Returns the body of an asample of `max_tokens` tokens, as the SDK writes it."""
        return {
            "sampling_session_id": sampling_session_id,
            "seq_id": seq_id,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens or self.tokens(8)}]},
            "sampling_params": {"max_tokens": max_tokens, "stop": [], "temperature": 1.0, "top_k": -1, "top_p": 1.0},
            "prompt_logprobs": False,
            "topk_prompt_logprobs": 0,
            "topk_sample_logprobs": 0,
            "prompt_alt_tokens_k": 0,
            "record_stability_info": False,
            "type": "sample",
        }

    def output(self, request_id: str, timeout_s: float = 90.0) -> types.ForwardBackwardOutput:
        """Returns the result of a loss that was submitted over raw HTTP. Raises Failed if it failed."""
        answer = self.poll(request_id, timeout_s, "application/x-protobuf")
        if answer.status_code != 200 or "x-protobuf" not in answer.headers.get("content-type", ""):
            raise Failed(f"a loss ended with {answer.status_code} {answer.text[:300]}")
        output = deserialize_proto_response(answer.content, types.ForwardBackwardOutput)
        assert isinstance(output, types.ForwardBackwardOutput)
        return output

    def collect(self, request_id: str, timeout_s: float = 90.0) -> Any:
        """Polls a future until it has a result; returns the JSON, also of an error."""
        return self.poll(request_id, timeout_s).json()

    def poll(self, request_id: str, timeout_s: float = 90.0, accept: str = "application/json") -> httpx.Response:
        """Polls retrieve_future; returns the final response."""
        waited = itertools.count()
        while True:
            body = {"request_id": request_id, "allow_metadata_only": False}
            answer = self.http.post("retrieve_future", json=body, headers={"Accept": accept})
            is_json = "json" in answer.headers.get("content-type", "")
            unfinished = answer.status_code == 408 or (is_json and answer.json().get("type") == "try_again")
            if not unfinished:
                return answer
            if next(waited) * 20 > timeout_s:
                raise TimeoutError(f"{request_id} did not end within {timeout_s:.0f} s")

    def _finish_quietly(self, session_id: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            self.post(f"sessions/{session_id}/finish", reason={"type": "success"}, detail=None)

    @property
    def checkpoint(self) -> str:
        """Directory or hub name of the model's files, for transformers."""
        return self.options.checkpoint or self.model

    # Inputs

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, from its files if they are known, or else from the server. All checks share it."""
        options = self.options
        return _files_tokenizer(options.checkpoint) if options.checkpoint else _servers_tokenizer(options)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        """Returns `count` ids of ordinary text, which differs by seed."""
        text = self.encode(f"{seed} " + _TEXT * (count // 10 + 2))
        return text[:count]

    def prompt(self, text_or_tokens: str | list[int] = _TEXT) -> types.ModelInput:
        """Returns a text prompt."""
        tokens = self.encode(text_or_tokens) if isinstance(text_or_tokens, str) else text_or_tokens
        return types.ModelInput.from_ints(tokens)

    def datum(self, count: int = 12, seed: int = 0, **inputs: Any) -> types.Datum:
        """Returns a text datum of `count` tokens for cross_entropy, with weights 1; `inputs` changes loss inputs."""
        tokens = self.tokens(count + 1, seed)
        given: dict[str, Any] = {
            "target_tokens": types.TensorData.from_numpy(np.asarray(tokens[1:], np.int64)),
            "weights": types.TensorData.from_numpy(np.ones(count, np.float32)),
        }
        given |= inputs
        chosen = {name: value for name, value in given.items() if value is not None}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=chosen)

    def image(
        self, width: int = 224, height: int = 224, seed: int = 0, mode: str = "RGB", image_format: str = "png"
    ) -> bytes:
        """Returns an encoded picture of coloured noise."""
        if not self.options.vlm:
            raise NotApplicable("needs a model that accepts images (--vlm)")
        random = np.random.default_rng(seed)
        small = random.integers(0, 255, (max(height // 16, 1), max(width // 16, 1), 3), dtype=np.uint8)
        picture = Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST).convert(mode)
        out = io.BytesIO()
        picture.save(out, image_format.upper())
        return out.getvalue()


@functools.lru_cache(maxsize=1)
def _files_tokenizer(checkpoint: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


@functools.lru_cache(maxsize=1)
def _servers_tokenizer(options: Options) -> Any:
    client = tinker.ServiceClient(base_url=options.base_url, api_key=options.api_key)
    try:
        # A sampling client would use the model's name as the tokenizer's; a training client asks the server.
        training = client.create_lora_training_client(base_model=options.model, rank=1).result(60)
        return training.get_tokenizer()
    finally:
        _close_quietly(client)


def loss_message(
    model_id: str,
    seq_id: int,
    data: Sequence[types.Datum],
    loss_fn: str = "cross_entropy",
    config: Mapping[str, float | str] | None = None,
) -> Any:
    """Returns a forward_backward as the SDK's protobuf message, to change or send; `loss_fn` may be any name."""
    any_name: Any = loss_fn
    given = ForwardBackwardInput(data=list(data), loss_fn=any_name, loss_fn_config=config)
    request = ForwardBackwardRequest(forward_backward_input=given, model_id=model_id, seq_id=seq_id)
    return forward_backward_request_to_proto(request)


def loss_body(
    model_id: str,
    seq_id: int,
    data: Sequence[types.Datum],
    loss_fn: str = "cross_entropy",
    *,
    forward_only: bool = False,
    config: Mapping[str, float | str] | None = None,
) -> bytes:
    """Returns a forward_backward as bytes."""
    message = loss_message(model_id, seq_id, data, loss_fn, config)
    message.forward_only = forward_only
    return bytes(message.SerializeToString())


def _accepted(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        raise Failed(f"{answer.request.url.path} answered {answer.status_code} {answer.text[:300]}")
    accepted: dict[str, Any] = answer.json()
    if not isinstance(accepted.get("request_id"), str):
        raise Failed(f"{answer.request.url.path} answered without a request_id of text: {answer.text[:300]}")
    return accepted


def unique_name(stem: str) -> str:
    """Returns a checkpoint name that no other run of the suite uses."""
    return f"{stem}-{uuid.uuid4().hex[:8]}"


def _close_quietly(client: tinker.ServiceClient) -> None:
    try:
        client.close("success").result(_CLOSING_S)
    except Exception as error:  # the check already has its verdict, and may have ended the session itself
        logger.debug("closing a client: %s", error)
