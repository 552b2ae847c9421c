"""Outcomes as Tinker's clients read them: protobuf for samples and losses, JSON for everything and for errors."""

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from fovea.api.v1 import gateway_pb2, sampler_pb2, tensor_pb2, trainer_pb2
from fovea.tinker.v1 import tinker_pb2
from fovea.wire import tensors
from gateway.futures import records
from gateway.futures.future import Kind, Outcome
from gateway.sampling import target_encoding as targets

PROTO_KINDS = (Kind.SAMPLE, Kind.FORWARD, Kind.FORWARD_BACKWARD)
_OUTPUT_TYPE = "TorchLossReturn"
_DTYPES: dict[int, "tinker_pb2.DType"] = {
    tensor_pb2.ELEMENT_TYPE_FLOAT32: tinker_pb2.DTYPE_FLOAT32,
    tensor_pb2.ELEMENT_TYPE_INT64: tinker_pb2.DTYPE_INT64,
    tensor_pb2.ELEMENT_TYPE_INT32: tinker_pb2.DTYPE_INT32,
    tensor_pb2.ELEMENT_TYPE_BFLOAT16: tinker_pb2.DTYPE_BFLOAT16,
}
_STOP_REASONS = {
    sampler_pb2.FINISH_REASON_STOP: tinker_pb2.STOP_REASON_STOP,
    sampler_pb2.FINISH_REASON_LENGTH: tinker_pb2.STOP_REASON_LENGTH,
}


def to_proto(outcome: Outcome) -> bytes:
    """A result of one of PROTO_KINDS as protobuf; the same bytes every time."""
    message = _sample(outcome.result) if outcome.kind is Kind.SAMPLE else _forward_backward(outcome.result)
    return message.SerializeToString(deterministic=True)


def to_json(outcome: Outcome) -> dict[str, Any]:
    """A result of any kind as JSON values."""
    if outcome.kind is Kind.SAMPLE:
        return _sample_json(_sample(outcome.result))
    if outcome.kind in (Kind.FORWARD, Kind.FORWARD_BACKWARD):
        return _forward_backward_json(outcome.result)
    answer: dict[str, Any] = {}
    for record in records.split(gateway_pb2.WaitFutureResponse, outcome.result):
        answer |= _record_json(record)
    if outcome.kind is Kind.SAVE_EXTERNAL:
        answer["type"] = "save_weights_external"
    return answer


def error_json(outcome: Outcome) -> dict[str, Any]:
    """A failed future as the SDK expects it."""
    assert outcome.error is not None
    return {"error": outcome.error.message, "category": outcome.error.category, "reason": outcome.error.reason}


def _record_json(record: gateway_pb2.WaitFutureResponse) -> dict[str, Any]:
    match record.WhichOneof("record"):
        case "model_created":
            return {"type": "create_model", "model_id": record.model_created.model_id}
        case "state_loaded":
            return {"type": "load_weights", "path": record.state_loaded.path}
        case "metrics":
            return {"metrics": _in_order(record.metrics.values)}
        case "custom_loss_created":
            return {"type": "create_custom_loss", "loss_id": record.custom_loss_created.custom_loss_id}
        case "checkpoint_saved":
            return {"type": "save_weights", "path": record.checkpoint_saved.path}
        case _:
            saved = record.snapshot_saved
            place = {"path": saved.path} if saved.path else {"sampling_session_id": saved.sampling_session_id}
            return {"type": "save_weights_for_sampler", **place}


def _sample(blob: bytes) -> tinker_pb2.SampleResponse:
    response = tinker_pb2.SampleResponse()
    table: gateway_pb2.TargetTable | None = None
    for record in records.split(gateway_pb2.SampleTokensResponse, blob):
        match record.WhichOneof("event"):
            case "target_table":
                table = record.target_table
            case "prompt":
                _prompt(record.prompt, table, response)
            case _:
                _sequence(record.delta, response.sequences.add())
    return response


def _prompt(
    prompt: sampler_pb2.PromptResult, table: gateway_pb2.TargetTable | None, response: tinker_pb2.SampleResponse
) -> None:
    response.prompt_cache_hit_tokens = prompt.cached_token_count
    if prompt.logprobs:
        response.prompt_logprobs = prompt.logprobs
    if prompt.HasField("top_logprobs"):
        _top(prompt.top_logprobs, response.topk_prompt_logprobs)
    if table is not None:
        targets.fill_targets(table, prompt.target_logprobs, response.target_prompt_logprobs)
    if prompt.HasField("alt_tokens"):
        targets.fill_alt_tokens(prompt.alt_tokens, response.prompt_alt_tokens)


def _sequence(delta: sampler_pb2.SequenceDelta, sequence: tinker_pb2.SampledSequence) -> None:
    sequence.stop_reason = _STOP_REASONS[delta.finish_reason]
    sequence.tokens = delta.tokens
    sequence.logprobs = delta.logprobs
    if delta.HasField("top_logprobs"):
        _top(delta.top_logprobs, sequence.topk_sampled_logprobs)


def _top(top: sampler_pb2.TopLogprobs, message: tinker_pb2.TopkLogprobs) -> None:
    message.token_ids, message.logprobs = top.token_ids.data, top.logprobs.data
    message.length, message.k = top.token_ids.shape


def _forward_backward(blob: bytes) -> tinker_pb2.ForwardBackwardOutput:
    outputs, metrics = _split(blob)
    response = tinker_pb2.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE, metrics=metrics)
    for _, group in groupby(outputs, key=_signature):
        response.loss_fn_outputs.append(_array_record(list(group)))
    return response


def _split(blob: bytes) -> tuple[list[trainer_pb2.DatumOutput], dict[str, float]]:
    parts = records.split(gateway_pb2.WaitFutureResponse, blob)
    outputs = [part.output for part in parts if part.WhichOneof("record") == "output"]
    return outputs, _in_order(parts[-1].metrics.values)


def _in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    # A protobuf map comes in another order in every process, and a result must be the same bytes after a restart.
    return dict(sorted(metrics.items()))


def _signature(output: trainer_pb2.DatumOutput) -> list[tuple[str, int, tuple[int, ...]]]:
    """Datums of one signature fit into one record: same fields, types and trailing shapes."""
    return [(name, t.element_type, tuple(t.shape[1:])) for name, t in sorted(output.tensors.items())]


def _array_record(group: list[trainer_pb2.DatumOutput]) -> tinker_pb2.ArrayRecord:
    record = tinker_pb2.ArrayRecord(type_tag=_OUTPUT_TYPE, num_datums=len(group))
    for name, element_type, trailing_shape in _signature(group[0]):
        parts = [output.tensors[name].data for output in group]
        offsets = np.cumsum([0, *map(len, parts)], dtype="<i8")
        record.fields[name].CopyFrom(
            tinker_pb2.BatchedTensor(
                data=b"".join(parts),
                offsets=offsets.tobytes(),
                dtype=_DTYPES[element_type],
                trailing_shape=trailing_shape,
            )
        )
    return record


def _sample_json(response: tinker_pb2.SampleResponse) -> dict[str, Any]:
    sequences = [_sequence_json(sequence) for sequence in response.sequences]
    answer: dict[str, Any] = {"type": "sample", "sequences": sequences}
    if response.HasField("prompt_logprobs"):
        answer["prompt_logprobs"] = _numbers(response.prompt_logprobs)
    if response.HasField("topk_prompt_logprobs"):
        answer["topk_prompt_logprobs"] = _top_json(response.topk_prompt_logprobs)
    if response.HasField("target_prompt_logprobs"):
        answer["target_prompt_logprobs"] = targets.tensor_json(response.target_prompt_logprobs)
    if response.HasField("prompt_alt_tokens"):
        alt = response.prompt_alt_tokens
        tokens, logprobs = targets.tensor_json(alt.tokens), targets.tensor_json(alt.logprobs)
        answer["prompt_alt_tokens"] = {"tokens": tokens, "logprobs": logprobs}
    return answer | {"prompt_cache_hit_tokens": response.prompt_cache_hit_tokens}


def _sequence_json(sequence: tinker_pb2.SampledSequence) -> dict[str, Any]:
    answer = {
        "stop_reason": "stop" if sequence.stop_reason == tinker_pb2.STOP_REASON_STOP else "length",
        "tokens": tensors.decode_tokens(sequence.tokens).tolist(),
        "logprobs": _numbers(sequence.logprobs),
    }
    if sequence.HasField("topk_sampled_logprobs"):
        answer["topk_logprobs"] = _top_json(sequence.topk_sampled_logprobs)
    return answer


def _top_json(top: tinker_pb2.TopkLogprobs) -> list[list[list[float]] | None]:
    ids = tensors.decode_tokens(top.token_ids).reshape(top.length, top.k)
    logprobs = tensors.decode_floats(top.logprobs).reshape(top.length, top.k)
    rows = zip(ids, logprobs, strict=True)
    pairs = [[[int(i), float(p)] for i, p in zip(*row, strict=True) if p > -99999.0] for row in rows]
    return [row or None for row in pairs]


def _forward_backward_json(blob: bytes) -> dict[str, Any]:
    outputs, metrics = _split(blob)
    listed = [{name: _tensor_json(tensor) for name, tensor in sorted(output.tensors.items())} for output in outputs]
    return {"loss_fn_output_type": _OUTPUT_TYPE, "loss_fn_outputs": listed, "metrics": metrics}


def _tensor_json(tensor: tensor_pb2.Tensor) -> dict[str, Any]:
    array = tensors.decode(tensor)
    dtype = "float32" if array.dtype.kind == "f" else "int64"
    return {"data": array.ravel().tolist(), "dtype": dtype, "shape": list(array.shape)}


def _numbers(data: bytes) -> list[float | None]:
    return [None if math.isnan(value) else value for value in _floats(data)]


def _floats(data: bytes) -> Iterable[float]:
    values: list[float] = tensors.decode_floats(data).tolist()
    return values
