"""Validates sample requests, because vLLM dies for all tenants, or returns wrong results, on malformed input."""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fovea.api.v1 import sampler_pb2
from fovea.vision.vision_family import VisionFamily
from fovea.wire import rendered_input, tensors
from fovea.wire.conventions import LEAST_TEMPERATURE, MESSAGE_BYTES, MOST_TEMPERATURE
from fovea.wire.errors import ContextOverflow, InvalidInput
from fovea_sampler.engine_api import Limits, SampleSpec, TargetRows


class _Option(NamedTuple):
    """One option of `SamplingParams`: its default, a test of valid values, and the same rule in words."""

    default: float
    takes: Callable[[float], bool]
    rule: str


_MOST_PENALTY = 2
_OPTIONS = {
    "temperature": _Option(
        1.0,
        lambda value: value == 0 or LEAST_TEMPERATURE <= round(value, 9) <= MOST_TEMPERATURE,
        f"0 or between {LEAST_TEMPERATURE:g} and {MOST_TEMPERATURE:g}",
    ),
    "top_p": _Option(1.0, lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "top_k": _Option(-1, lambda value: value == -1 or value >= 1, "-1 for all or at least 1"),
    "min_p": _Option(0.0, lambda value: 0 <= value <= 1, "between 0 and 1"),
    "presence_penalty": _Option(0.0, lambda value: abs(value) <= _MOST_PENALTY, "between -2 and 2"),
    "frequency_penalty": _Option(0.0, lambda value: abs(value) <= _MOST_PENALTY, "between -2 and 2"),
    "repetition_penalty": _Option(1.0, lambda value: 0 < value <= _MOST_PENALTY, "above 0 and at most 2"),
}
_MAX_STOPS = 64
_MAX_STOP_STRING = 1000
_MAX_CACHE_SALT = 256
_MAX_STRUCTURE = 2**16
_MESSAGE_MARGIN_BYTES = 4096


def read_request(request: sampler_pb2.SampleRequest, limits: Limits, vision: VisionFamily | None) -> SampleSpec:
    """Validates a request and returns it as a SampleSpec.

    Raises InvalidInput with the field that is wrong, ContextOverflow if the new tokens do not fit into the context.
    """
    # A prompt may carry positions; they are ignored, because the engine computes the same ones. `_read_max_tokens`
    # checks the length of the context.
    taken = rendered_input.InputLimits(
        limits.vocabulary_size,
        needs_positions=False,
        max_images=limits.max_images,
        max_image_tokens=limits.max_image_tokens,
    )
    prompt = rendered_input.check(request.prompt, taken, vision, "prompt")
    ids = prompt.tokens
    _check_range("sample_count", request.sample_count, 1, limits.max_sample_count)
    _check_range("top_prompt_logprobs", request.top_prompt_logprobs, 0, limits.max_top_logprobs)
    _check_range("alt_token_count", request.alt_token_count, 0, limits.max_top_logprobs)
    _check_range("top_sample_logprobs", request.top_sample_logprobs, 0, limits.max_top_logprobs)
    targets = _read_targets(request, len(ids), limits.vocabulary_size)
    _check_last_n(request, len(ids))
    _check_result_size(request, len(ids), targets)
    _check_cache_salt(request.cache_salt)
    params = _check_params(request.params, ids.size, limits)
    _check_experts(request, ids.size + params.max_tokens, limits)
    return SampleSpec(request, params, ids, prompt.spans, targets)


def _read_targets(request: sampler_pb2.SampleRequest, prompt_length: int, vocabulary_size: int) -> TargetRows | None:
    """Returns the target tokens, or None. Raises InvalidInput with the field that is malformed."""
    if not request.HasField("target_tokens"):
        return None
    field = "target_tokens.token_ids"
    ids = tensors.decode(request.target_tokens.token_ids, field)
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise InvalidInput(f"{field} is {ids.dtype.name} {list(ids.shape)}, must be int32 [M]", field=field)
    if not ids.size:
        raise InvalidInput(f"{field} is empty; list at least one token or leave target_tokens out", field=field)
    rendered_input.check_ids(ids, vocabulary_size, field)
    field = "target_tokens.row_offsets"
    offsets = tensors.decode(request.target_tokens.row_offsets, field)
    if offsets.dtype != np.int64:
        raise InvalidInput(
            f"{field} is {offsets.dtype.name} {list(offsets.shape)}, must be int64 [{prompt_length}]", field=field
        )
    tensors.check_row_offsets(offsets, ids.size, prompt_length - 1, field)
    return TargetRows(ids, offsets)


def _check_last_n(request: sampler_pb2.SampleRequest, prompt_length: int) -> None:
    """Raises InvalidInput if `prompt_logprobs_last_n` is out of range or has nothing to apply to."""
    field, last_n = "prompt_logprobs_last_n", request.prompt_logprobs_last_n
    if not last_n:
        return
    if not 0 < last_n < prompt_length:
        raise InvalidInput(
            f"{field} is {last_n}, must be between 1 and {prompt_length - 1}, the scored positions of a prompt of "
            f"{prompt_length}",
            field=field,
        )
    if not request.prompt_logprobs:
        raise InvalidInput(f"{field} is {last_n}, but prompt_logprobs, which it applies to, is not set", field=field)


def _check_result_size(request: sampler_pb2.SampleRequest, prompt_length: int, targets: TargetRows | None) -> None:
    """Raises InvalidInput if the prompt's results would not fit into one message."""
    room = MESSAGE_BYTES - _MESSAGE_MARGIN_BYTES - 4 * prompt_length
    if targets is not None:
        if 4 * targets.token_ids.size > room:
            raise InvalidInput(
                f"target_tokens has {targets.token_ids.size} tokens; for a prompt of {prompt_length} tokens one "
                f"message carries the log-probabilities of at most {room // 4}",
                field="target_tokens",
            )
        room -= 4 * targets.token_ids.size
    # Each alternative takes 8 bytes: an int32 id and a float32 log-probability.
    for field, k in (
        ("alt_token_count", request.alt_token_count),
        ("top_prompt_logprobs", request.top_prompt_logprobs),
    ):
        if 8 * k * prompt_length > room:
            raise InvalidInput(
                f"{field} is {k}; for a prompt of {prompt_length} tokens one message carries at most "
                f"{room // (8 * prompt_length)} beside the other requested results",
                field=field,
            )
        room -= 8 * k * prompt_length


def _check_experts(request: sampler_pb2.SampleRequest, token_count: int, limits: Limits) -> None:
    """Raises InvalidInput if the engine cannot return routed experts, or if they would not fit into one message."""
    field = "routed_experts"
    if not request.routed_experts:
        return
    if not limits.expert_row_bytes:
        raise InvalidInput(f"{field} is set, but {limits.experts_problem}; leave it out", field=field)
    # The same message carries an id and a log-probability for each token and for each of its alternatives.
    each = limits.expert_row_bytes + 8 * (1 + request.top_sample_logprobs)
    most = (MESSAGE_BYTES - _MESSAGE_MARGIN_BYTES) // each
    if token_count > most:
        raise InvalidInput(
            f"{field} is set, and one message carries the experts of at most {most} tokens; the prompt and max_tokens "
            f"are {token_count} together: shorten either",
            field=field,
        )


def _check_params(given: sampler_pb2.SamplingParams, prompt_length: int, limits: Limits) -> sampler_pb2.SamplingParams:
    params = sampler_pb2.SamplingParams()
    params.CopyFrom(given)
    params.max_tokens = _read_max_tokens(given, prompt_length, limits)
    for name, option in _OPTIONS.items():
        value = getattr(given, name) if given.HasField(name) else option.default  # type: ignore[arg-type]
        if not option.takes(value):
            raise InvalidInput(f"params.{name} is {value:g}, must be {option.rule}", field=f"params.{name}")
        setattr(params, name, value)
    _check_stop_ids(params.stop.token_ids, limits)
    _check_stop_strings(params.stop.strings)
    _check_structure(params.structured_outputs)
    return params


def _read_max_tokens(params: sampler_pb2.SamplingParams, prompt_length: int, limits: Limits) -> int:
    field = "params.max_tokens"
    room = limits.max_context - prompt_length
    wanted = params.max_tokens if params.HasField("max_tokens") else max(room, 1)
    if wanted < 1:
        raise InvalidInput(f"{field} is {wanted}, must be at least 1", field=field)
    if wanted > room:
        # Clients of the Tinker API search errors for this wording.
        raise ContextOverflow(
            f"Prompt length plus max_tokens exceeds the context: {prompt_length} prompt tokens + {wanted} max_tokens "
            f"> {limits.max_context}",
            field=field,
        )
    return wanted


def _check_stop_ids(token_ids: Sequence[int], limits: Limits) -> None:
    field = "params.stop.token_ids"
    if len(token_ids) > _MAX_STOPS:
        raise InvalidInput(f"{field} lists {len(token_ids)} ids, must list at most {_MAX_STOPS}", field=field)
    for number, token_id in enumerate(token_ids):
        if not 0 <= token_id < limits.vocabulary_size:
            raise InvalidInput(
                f"{field}[{number}] is {token_id}, must be between 0 and {limits.vocabulary_size - 1}", field=field
            )


def _check_stop_strings(strings: Sequence[str]) -> None:
    field = "params.stop.strings"
    if len(strings) > _MAX_STOPS:
        raise InvalidInput(f"{field} lists {len(strings)} strings, must list at most {_MAX_STOPS}", field=field)
    for number, text in enumerate(strings):
        if not 1 <= len(text) <= _MAX_STOP_STRING:
            raise InvalidInput(
                f"{field}[{number}] has {len(text)} characters, must have 1 to {_MAX_STOP_STRING}", field=field
            )


def _check_structure(text: str) -> None:
    """Raises InvalidInput for a text that is not a JSON object or is too long. vLLM checks the fields later."""
    field = "params.structured_outputs"
    if len(text) > _MAX_STRUCTURE:
        raise InvalidInput(f"{field} has {len(text)} characters, must have at most {_MAX_STRUCTURE}", field=field)
    try:
        is_object = not text or isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise InvalidInput(f"{field} is not a JSON object", field=field)


def _check_cache_salt(salt: str) -> None:
    if len(salt) > _MAX_CACHE_SALT:
        raise InvalidInput(
            f"cache_salt has {len(salt)} characters, must have at most {_MAX_CACHE_SALT}", field="cache_salt"
        )


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidInput(f"{field} is {value}, must be between {low} and {high}", field=field)
