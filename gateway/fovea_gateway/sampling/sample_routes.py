"""Routes of sampling sessions and samples."""

import io
from typing import Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.api.v1 import gateway_pb2, sampler_pb2
from fovea.runtime.model_files import loadable_path
from fovea.wire import tensors
from fovea.wire.errors import FoveaError, InvalidInput, NotFound, Unavailable, Unimplemented
from fovea_gateway.access.api_keys import Scope
from fovea_gateway.http.endpoint import Endpoints, Json
from fovea_gateway.http.model_inputs import ModelInput, input_from_json
from fovea_gateway.http.request_body import (
    INT64_MAX,
    Body,
    LongList,
    Number,
    off_loop,
    off_loop_by_size,
    parse_json,
    parse_loosely,
    read,
)
from fovea_gateway.sampling.sample_wire import TensorData, delta_of_sequence, makers_of, table_from_json
from fovea_gateway.sampling.sampling_sessions import Sampling
from fovea_gateway.sessions.future import Kind, Pending
from fovea_gateway.sessions.future_rows import Completion, Target
from fovea_gateway.sessions.futures import Futures
from fovea_gateway.sessions.session_routes import hold_s

_INT32_MAX = 2**31 - 1
_ELEMENTS_PER_POSITION = 4
"""One for the token, and some for a target table, which has at most half a million cells."""
_LEAST_POSITIONS = 2**18
_MOST_SAMPLES = 2**16
"""Far above the samplers' own limit, which is checked later. The limit here bounds the sequence ids in the response."""
_ACKNOWLEDGED, _ACKNOWLEDGED_BYTES = (2**16, 2**16), 4 * 2**20
"""Limits for the ids that one poll acknowledges, as elements and strings: as many as a client may have unfinished."""
_MOST_WAIT_S = 40.0
"""Clients time out after 45 s."""
_EXPERTS_HEADER = "X-Fovea-Routed-Experts"
"""With this header set to 1, samples include the experts of each token; the SDK's request has no field for it."""


def asks_for_experts(request: Request) -> bool:
    """Returns whether the client wants to know which experts computed its samples."""
    return request.headers.get(_EXPERTS_HEADER) == "1"


class CreateSamplingSession(Body):
    """POST create_sampling_session."""

    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None
    type: str = ""


class JoinSamplingSession(Body):
    """POST join_sampling_session."""

    sampling_session_id: str
    type: str = ""


class SamplingParams(Body):
    """Sampling options."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | LongList[str] | LongList[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


_AS_GIVEN = [name for name in SamplingParams.model_fields if name not in ("max_tokens", "seed", "stop")]
"""Sampling options, int32 or float, that have the same name in REST and in the protos. Samplers check them."""


class Sample(Body):
    """POST asample."""

    num_samples: int = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str
    seq_id: Number
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: str = ""


class FuturesTarget(Body):
    """One client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = Field(0, ge=0, le=INT64_MAX // 10**9)


class RetrieveFutures(Body):
    """POST retrieve_futures."""

    target: FuturesTarget
    prev_cursor: Number = 0
    timeout: float | None = Field(None, ge=0, allow_inf_nan=False)
    retrieved_request_ids: LongList[str] = Field(default_factory=list)


def loadable_name(name: str, tokenizer_id: str) -> str:
    """Returns a name for a base model with which `SamplingClient.get_tokenizer` of SDK 0.38 finds the tokenizer.

    The SDK passes the name to transformers, so the tokenizer's own name replaces it, unless only the name can be on the
    hub: a folder of the tokenizer may not exist on the client's machine.
    """
    if _may_be_on_hub(name) and not _may_be_on_hub(tokenizer_id):
        return name
    return loadable_path(tokenizer_id)


def _may_be_on_hub(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith(("/", ".", "~"))


class SamplingRoutes:
    """Handlers of the sampling routes.

    Args:
        max_body_bytes: The largest body of a sample.
        poll_hold_s: Seconds that a poll is held while nothing has finished, plus or minus a fifth.
    """

    def __init__(self, sampling: Sampling, futures: Futures, max_body_bytes: int, poll_hold_s: float) -> None:
        self._sampling, self._futures = sampling, futures
        self._max_body_bytes, self._poll_hold_s = max_body_bytes, poll_hold_s

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.route("POST", "retrieve_futures", self.retrieve_many, Scope.SAMPLE),
            endpoints.route("POST", "create_sampling_session", self.open, Scope.SAMPLE),
            endpoints.route("POST", "join_sampling_session", self.join, Scope.SAMPLE),
            endpoints.route("GET", "samplers/{sampling_session_id}", self.get, Scope.READ),
            endpoints.route("POST", "asample", self.sample, Scope.SAMPLE),
            endpoints.route("GET", "routed_experts/{sequence_id}", self.get_experts, Scope.READ),
            endpoints.route("GET", "weight_versions/{sequence_id}", self.get_versions, Scope.READ),
        ]

    async def open(self, request: Request, owner: str) -> Response:
        """Opens a sampling session."""
        body = await parse_json(request, CreateSamplingSession, await read(request))
        sampling = await self._sampling.open(
            owner, body.session_id, body.sampling_session_seq_id, body.base_model or "", body.model_path or ""
        )
        return Json({"type": "create_sampling_session", "sampling_session_id": sampling.sampling_session_id})

    async def join(self, request: Request, owner: str) -> Response:
        """Returns a number for a copy of a sampling client, so that the ids of its samples differ from those of other
        copies.
        """
        body = await parse_json(request, JoinSamplingSession, await read(request))
        number = await self._sampling.join(owner, body.sampling_session_id)
        return Json({"type": "join_sampling_session", "client_counter": number})

    async def get(self, request: Request, owner: str) -> Response:
        """Describes a sampling session."""
        sampling = await self._sampling.get(owner, request.path_params["sampling_session_id"])
        base_model = loadable_name(sampling.base_model, self._sampling.tokenizer_id(sampling.base_model))
        answer = {"sampler_id": sampling.sampling_session_id, "base_model": base_model}
        # The SDK ignores the snapshot, which an inflight save replaces.
        answer["snapshot_id"] = sampling.snapshot_id
        return Json(answer | ({"model_path": sampling.model_path} if sampling.model_path else {}))

    async def sample(self, request: Request, owner: str) -> Response:
        blob = await read(request, self._max_body_bytes)
        most_elements = _ELEMENTS_PER_POSITION * max(self._sampling.max_context_length, _LEAST_POSITIONS)
        rejection: FoveaError | None = None
        message = gateway_pb2.SampleTokensRequest()
        try:
            body = await parse_json(request, Sample, blob, most_elements)
            session_id, seq_id = body.sampling_session_id, body.seq_id
            await off_loop_by_size(len(blob), _fill, body, message)
            message.routed_experts = asks_for_experts(request)
        except (InvalidInput, Unimplemented) as error:
            session_id, seq_id = _address(await off_loop(parse_loosely, blob, most_elements), error)
            rejection = error
        future_id, sequence_ids = await self._sampling.submit(owner, session_id, seq_id, message, rejection)
        return Json({"request_id": future_id, "sample_sequence_ids": sequence_ids})

    async def get_experts(self, request: Request, owner: str) -> Response:
        """Returns the experts that computed a sequence: a .npy file, uint8 or int32 [P + C - 1, layers, k].

        P is the number of prompt tokens, C the number of sampled tokens. Raises as `_finished` does.
        """
        sequence_id, sequence = await self._finished(request, owner)
        if not sequence.HasField("routed_experts"):
            raise NotFound(
                f"sequence {sequence_id!r} was sampled without experts; send the header {_EXPERTS_HEADER}: 1",
                field="sequence_id",
            )
        file = io.BytesIO()
        np.save(file, tensors.decode(sequence.routed_experts))
        return Response(file.getvalue(), media_type="application/octet-stream")

    async def get_versions(self, request: Request, owner: str) -> Response:
        """Returns the snapshots that sampled a sequence, each with the number of its tokens, in order.

        The base model's snapshot id is empty. This process remembers them after the client has acknowledged the result.
        Raises as `_finished` does.
        """
        sequence_id = request.path_params["sequence_id"]
        future_id, _, index = sequence_id.rpartition(":")
        await self._sampling.get(owner, future_id.rpartition(":")[0])
        known = {str(number): made for number, made in enumerate(self._sampling.runner.makers.get(future_id, ()))}
        made = known.get(index) or makers_of((await self._finished(request, owner))[1])
        spans = [{"snapshot_id": name, "token_count": count} for name, count in made]
        return Json({"sequence_id": sequence_id, "weight_versions": spans})

    async def _finished(self, request: Request, owner: str) -> tuple[str, sampler_pb2.SequenceDelta]:
        """Returns the id and the whole of the sequence that a path names, as long as its sample's result is kept.

        Raises NotFound, Expired, Unavailable while the sample is not finished, and the error of a failed sample.
        """
        sequence_id = request.path_params["sequence_id"]
        future_id, _, index = sequence_id.rpartition(":")
        outcome = await self._futures.wait(future_id, owner, 0.0)
        if isinstance(outcome, Pending):
            raise Unavailable(f"{sequence_id} is not finished; ask again once its sample is")
        if outcome.error is not None:
            raise outcome.error
        sequence = delta_of_sequence(outcome.result, index) if outcome.kind is Kind.SAMPLE else None
        if sequence is None:
            raise NotFound(f"there is no sequence {sequence_id!r}", field="sequence_id")
        return sequence_id, sequence

    async def retrieve_many(self, request: Request, owner: str) -> Response:
        """Returns the samples of one client that have finished since its cursor; waits while there are none."""
        body = await parse_json(request, RetrieveFutures, await read(request, _ACKNOWLEDGED_BYTES), *_ACKNOWLEDGED)
        target = Target(body.target.sampling_session_id, body.target.cloned_sampler_id)
        await self._sampling.get(owner, target.sampling_session_id)
        await self._futures.acknowledge(target, body.retrieved_request_ids)
        timeout_s = hold_s(self._poll_hold_s) if body.timeout is None else min(body.timeout, _MOST_WAIT_S)
        found = await self._futures.wait_any(target, body.prev_cursor, timeout_s)
        cursor = found[-1].number if found else body.prev_cursor
        return Json({"completions": [_completion_json(completion) for completion in found], "cursor": cursor})


def _completion_json(completion: Completion) -> dict[str, object]:
    if completion.is_failed:
        return {"state": "failed", "request_id": completion.future_id}
    return {
        "state": "finished",
        "request_id": completion.future_id,
        # The size of the stored result, which is close to the payload's; the client reserves this much of its budget.
        "response_payload_uncompressed_size": completion.size_bytes,
    }


def _address(body: dict[str, Any], error: FoveaError) -> tuple[str, int]:
    session_id, seq_id = body.get("sampling_session_id"), body.get("seq_id")
    if not isinstance(session_id, str) or isinstance(seq_id, bool) or not isinstance(seq_id, int):
        raise error
    return session_id, seq_id


def _fill(body: Sample, message: gateway_pb2.SampleTokensRequest) -> None:
    for name in ("base_model", "model_path"):
        if getattr(body, name) is not None:
            raise Unimplemented(f"{name} is not supported in a sample request: the session names it", field=name)
    message.sampling_session_id = body.sampling_session_id
    if body.num_samples > _MOST_SAMPLES:
        raise InvalidInput(f"num_samples is {body.num_samples}; {_MOST_SAMPLES} is the maximum", field="num_samples")
    message.sample_count = _int32(body.num_samples, "num_samples")
    message.prompt_logprobs = bool(body.prompt_logprobs)
    message.record_stability_info = bool(body.record_stability_info)
    message.top_prompt_logprobs = _int32(body.topk_prompt_logprobs, "topk_prompt_logprobs")
    message.top_sample_logprobs = _int32(body.topk_sample_logprobs, "topk_sample_logprobs")
    message.alt_token_count = _int32(body.prompt_alt_tokens_k, "prompt_alt_tokens_k")
    if body.prompt_logprobs_last_n is not None:
        if body.prompt_logprobs_last_n < 1:  # 0 means "all" in the protobuf message
            raise InvalidInput(
                f"prompt_logprobs_last_n is {body.prompt_logprobs_last_n}; it must be at least 1",
                field="prompt_logprobs_last_n",
            )
        message.prompt_logprobs_last_n = _int32(body.prompt_logprobs_last_n, "prompt_logprobs_last_n")
    if body.target_prompt_logprobs is not None:
        message.target_table.CopyFrom(table_from_json(body.target_prompt_logprobs))
    _fill_params(body.sampling_params, message)
    message.prompt.CopyFrom(input_from_json(body.prompt))


def _fill_params(params: SamplingParams, message: gateway_pb2.SampleTokensRequest) -> None:
    given: dict[str, Any] = {}
    if params.max_tokens is not None:
        given["max_tokens"] = max(-1, min(params.max_tokens, _INT32_MAX))
    if params.seed is not None:
        if not -(2**63) <= params.seed < 2**64:
            raise InvalidInput(f"seed {params.seed} does not fit into 64 bits", field="sampling_params.seed")
        given["seed"] = params.seed - 2**64 if params.seed >= 2**63 else params.seed
    for name in _AS_GIVEN:
        value = getattr(params, name)
        if value is not None:
            given[name] = _int32(value, f"sampling_params.{name}") if isinstance(value, int) else value
    message.params.MergeFrom(sampler_pb2.SamplingParams(**given))
    if params.stop is None:
        return
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if not stop:
        message.params.stop.ignore_eos = True  # `stop=[]` disables every stop, including the end-of-sequence token
    for item in stop:
        if isinstance(item, str):
            if not item:
                raise InvalidInput("sampling_params.stop has an empty string", field="sampling_params.stop")
            message.params.stop.strings.append(item)
        else:
            message.params.stop.token_ids.append(_int32(item, "sampling_params.stop"))


def _int32(value: int, field: str) -> int:
    if not -_INT32_MAX <= value <= _INT32_MAX:
        raise InvalidInput(f"{field} is {value}, out of range", field=field)
    return value
