"""Routes of sampling."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.api.v1 import gateway_pb2
from fovea.wire.errors import FoveaError, InvalidInput, Unimplemented
from gateway.http import bodies
from gateway.http import model_inputs as inputs
from gateway.http.endpoint import Endpoints, Json
from gateway.http.request_body import parse_json, parse_loosely, read
from gateway.identity import Caller
from gateway.sampling import target_encoding as targets
from gateway.sampling.sampling_sessions import Sampling

_INT32_MAX = 2**31 - 1
_ELEMENTS_PER_POSITION = 4
"""Its token, and some of a target table, which has half a million cells at most."""
_LEAST_POSITIONS = 2**18
_MOST_SAMPLES = 2**16
"""Far above what samplers take, who are asked later: the sequences are named at once."""

_AS_GIVEN = [name for name in bodies.SamplingParams.model_fields if name not in ("max_tokens", "seed", "stop")]
"""Sampling options, int32 or float, that the protos call as REST does; samplers check them."""


class SamplingRoutes:
    """Handlers of sampling."""

    def __init__(self, sampling: Sampling, max_body_bytes: int) -> None:
        self._sampling, self._max_body_bytes = sampling, max_body_bytes

    def routes(self, endpoints: Endpoints) -> list[Route]:
        """All of them."""
        return [
            endpoints.route("POST", "create_sampling_session", self.open),
            endpoints.route("POST", "join_sampling_session", self.join),
            endpoints.route("GET", "samplers/{sampling_session_id}", self.get),
            endpoints.route("POST", "asample", self.sample),
        ]

    async def open(self, request: Request, caller: Caller) -> Response:
        """Opens a sampling session."""
        body = await parse_json(request, bodies.CreateSamplingSession, await read(request))
        sampling = await self._sampling.open(
            caller, body.session_id, body.sampling_session_seq_id, body.base_model or "", body.model_path or ""
        )
        return Json({"type": "create_sampling_session", "sampling_session_id": sampling.sampling_session_id})

    async def join(self, request: Request, caller: Caller) -> Response:
        """Numbers a copy of a sampling client, so that its samples never have the ids of another copy's."""
        body = await parse_json(request, bodies.JoinSamplingSession, await read(request))
        number = await self._sampling.join(caller, body.sampling_session_id)
        return Json({"type": "join_sampling_session", "client_counter": number})

    async def get(self, request: Request, caller: Caller) -> Response:
        """Describes a sampling session."""
        sampling = await self._sampling.get(caller, request.path_params["sampling_session_id"])
        answer = {"sampler_id": sampling.sampling_session_id, "base_model": sampling.base_model}
        return Json(answer | ({"model_path": sampling.model_path} if sampling.model_path else {}))

    async def sample(self, request: Request, caller: Caller) -> Response:
        """Submits a sample."""
        blob = await read(request, self._max_body_bytes)
        most_elements = _ELEMENTS_PER_POSITION * max(self._sampling.max_context_length, _LEAST_POSITIONS)
        rejection: FoveaError | None = None
        message = gateway_pb2.SampleTokensRequest()
        try:
            body = await parse_json(request, bodies.Sample, blob, most_elements)
            session_id, seq_id = body.sampling_session_id, body.seq_id
            _fill(body, message)
        except (InvalidInput, Unimplemented) as error:
            session_id, seq_id = _address(parse_loosely(blob, most_elements), error)
            rejection = error
        future_id, sequence_ids = await self._sampling.submit(caller, session_id, seq_id, message, rejection)
        return Json({"request_id": future_id, "sample_sequence_ids": sequence_ids})


def _address(body: dict[str, Any], error: FoveaError) -> tuple[str, int]:
    session_id, seq_id = body.get("sampling_session_id"), body.get("seq_id")
    if not isinstance(session_id, str) or isinstance(seq_id, bool) or not isinstance(seq_id, int):
        raise error
    return session_id, seq_id


def _fill(body: bodies.Sample, message: gateway_pb2.SampleTokensRequest) -> None:
    for name in ("base_model", "model_path"):
        if getattr(body, name) is not None:
            raise Unimplemented(f"{name} is not supported in a sample request: the session names it", field=name)
    if body.record_stability_info:
        raise Unimplemented("record_stability_info is not supported", field="record_stability_info")
    message.sampling_session_id = body.sampling_session_id
    if body.num_samples > _MOST_SAMPLES:
        raise InvalidInput(f"num_samples is {body.num_samples}; {_MOST_SAMPLES} is the most", field="num_samples")
    message.sample_count = _int32(body.num_samples, "num_samples")
    message.prompt_logprobs = bool(body.prompt_logprobs)
    message.top_prompt_logprobs = _int32(body.topk_prompt_logprobs, "topk_prompt_logprobs")
    message.top_sample_logprobs = _int32(body.topk_sample_logprobs, "topk_sample_logprobs")
    message.alt_token_count = _int32(body.prompt_alt_tokens_k, "prompt_alt_tokens_k")
    if body.prompt_logprobs_last_n is not None:
        if body.prompt_logprobs_last_n < 1:  # 0 means "all" on our wire
            raise InvalidInput(
                f"prompt_logprobs_last_n is {body.prompt_logprobs_last_n}; it must be at least 1",
                field="prompt_logprobs_last_n",
            )
        message.prompt_logprobs_last_n = _int32(body.prompt_logprobs_last_n, "prompt_logprobs_last_n")
    if body.target_prompt_logprobs is not None:
        message.target_table.CopyFrom(targets.table_from_json(body.target_prompt_logprobs))
    _fill_params(body.sampling_params, message)
    message.prompt.CopyFrom(inputs.input_from_json(body.prompt))


def _fill_params(params: bodies.SamplingParams, message: gateway_pb2.SampleTokensRequest) -> None:
    target = message.params
    if params.max_tokens is not None:
        target.max_tokens = max(-1, min(params.max_tokens, _INT32_MAX))
    if params.seed is not None:
        if not -(2**63) <= params.seed < 2**64:
            raise InvalidInput(f"seed {params.seed} does not fit into 64 bits", field="sampling_params.seed")
        target.seed = params.seed - 2**64 if params.seed >= 2**63 else params.seed
    for name in _AS_GIVEN:
        value = getattr(params, name)
        if value is not None:
            setattr(target, name, _int32(value, f"sampling_params.{name}") if isinstance(value, int) else value)
    if params.stop is None:
        return
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if not stop:
        target.stop.ignore_eos = True  # `stop=[]` disables every stop, the end-of-sequence token included
    for item in stop:
        if isinstance(item, str):
            if not item:
                raise InvalidInput("sampling_params.stop has an empty string", field="sampling_params.stop")
            target.stop.strings.append(item)
        else:
            target.stop.token_ids.append(_int32(item, "sampling_params.stop"))


def _int32(value: int, field: str) -> int:
    if not -_INT32_MAX <= value <= _INT32_MAX:
        raise InvalidInput(f"{field} is {value}, out of range", field=field)
    return value
