"""Refuses whatever would harm the engine. vLLM dies, for every tenant, or is silently wrong on malformed input."""

from collections.abc import Sequence

from fovea.api.v1 import sampler_pb2
from fovea.vision.vision_family import VisionFamily
from fovea.wire import rendered_input
from fovea.wire.errors import ContextOverflow, InvalidInput
from services.sampler import prompt_options
from services.sampler.engine_api import Draw, Limits, SampleSpec

_MIN_TEMPERATURE = 0.01  # vLLM would silently raise a smaller one to this
_MAX_TEMPERATURE = 2.0  # vLLM's own bound
_MAX_STOPS = 64
_MAX_STOP_STRING = 1000
_MAX_CACHE_SALT = 256


def read_request(request: sampler_pb2.SampleRequest, limits: Limits, vision: VisionFamily | None) -> SampleSpec:
    """The request, checked. Raises InvalidInput naming the field, ContextOverflow if the new tokens do not fit."""
    # Positions may be there and are not used: the engine computes the same. `_read_max_tokens` checks the context.
    taken = rendered_input.InputLimits(
        limits.vocabulary_size,
        positions="optional",
        max_images=limits.max_images,
        max_image_tokens=limits.max_image_tokens,
    )
    prompt = rendered_input.check(request.prompt, taken, vision, "prompt")
    ids = prompt.tokens
    _check_range("sample_count", request.sample_count, 1, limits.max_sample_count)
    _check_range("top_prompt_logprobs", request.top_prompt_logprobs, 0, limits.max_top_logprobs)
    _check_range("alt_token_count", request.alt_token_count, 0, limits.max_top_logprobs)
    _check_range("top_sample_logprobs", request.top_sample_logprobs, 0, limits.max_top_logprobs)
    targets = prompt_options.read_targets(request, len(ids), limits.vocabulary_size)
    prompt_options.check_last_n(request, len(ids))
    prompt_options.check_result_size(request, len(ids), targets)
    return SampleSpec(
        request_id=request.request_id,
        snapshot_id=request.snapshot_id,
        tokens=ids,
        spans=prompt.spans,
        sample_count=request.sample_count,
        draw=_read_draw(request.params, len(ids), limits),
        prompt_logprobs=request.prompt_logprobs,
        top_prompt_logprobs=request.top_prompt_logprobs,
        top_sample_logprobs=request.top_sample_logprobs,
        targets=targets,
        alt_token_count=request.alt_token_count,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        at_once=request.at_once,
        cache_salt=_read_cache_salt(request.cache_salt),
    )


def _read_draw(params: sampler_pb2.SamplingParams, prompt_length: int, limits: Limits) -> Draw:
    return Draw(
        max_tokens=_read_max_tokens(params, prompt_length, limits),
        temperature=_read_temperature(params),
        top_p=_read_top_p(params),
        top_k=_read_top_k(params),
        seed=params.seed if params.HasField("seed") else None,
        stop_token_ids=_read_stop_ids(params.stop.token_ids, limits),
        stop_strings=_read_stop_strings(params.stop.strings),
        ignore_eos=params.stop.ignore_eos,
    )


def _read_max_tokens(params: sampler_pb2.SamplingParams, prompt_length: int, limits: Limits) -> int:
    field = "params.max_tokens"
    room = limits.max_context - prompt_length
    wanted = params.max_tokens if params.HasField("max_tokens") else max(room, 1)
    if wanted < 1:
        raise InvalidInput(f"{field} is {wanted}, must be at least 1", field=field)
    if wanted > room:
        # Clients of the Tinker API look for this wording.
        raise ContextOverflow(
            f"Prompt length plus max_tokens exceeds the context: {prompt_length} prompt tokens + {wanted} max_tokens "
            f"> {limits.max_context}",
            field=field,
        )
    return wanted


def _read_temperature(params: sampler_pb2.SamplingParams) -> float:
    temperature = params.temperature if params.HasField("temperature") else 1.0
    if temperature != 0 and not _MIN_TEMPERATURE <= round(temperature, 9) <= _MAX_TEMPERATURE:
        raise InvalidInput(
            f"params.temperature is {temperature:g}, must be 0 or between {_MIN_TEMPERATURE:g} and "
            f"{_MAX_TEMPERATURE:g}",
            field="params.temperature",
        )
    return temperature


def _read_top_p(params: sampler_pb2.SamplingParams) -> float:
    top_p = params.top_p if params.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidInput(f"params.top_p is {top_p:g}, must be above 0 and at most 1", field="params.top_p")
    return top_p


def _read_top_k(params: sampler_pb2.SamplingParams) -> int:
    top_k = params.top_k if params.HasField("top_k") else -1
    if top_k != -1 and top_k < 1:
        raise InvalidInput(f"params.top_k is {top_k}, must be -1 for all or at least 1", field="params.top_k")
    return top_k


def _read_stop_ids(token_ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    field = "params.stop.token_ids"
    if len(token_ids) > _MAX_STOPS:
        raise InvalidInput(f"{field} lists {len(token_ids)} ids, at most {_MAX_STOPS}", field=field)
    for number, token_id in enumerate(token_ids):
        if not 0 <= token_id < limits.vocabulary_size:
            raise InvalidInput(
                f"{field}[{number}] is {token_id}; ids lie in 0 .. {limits.vocabulary_size - 1}", field=field
            )
    return tuple(token_ids)


def _read_stop_strings(strings: Sequence[str]) -> tuple[str, ...]:
    field = "params.stop.strings"
    if len(strings) > _MAX_STOPS:
        raise InvalidInput(f"{field} lists {len(strings)} strings, at most {_MAX_STOPS}", field=field)
    for number, text in enumerate(strings):
        if not 1 <= len(text) <= _MAX_STOP_STRING:
            raise InvalidInput(
                f"{field}[{number}] has {len(text)} characters, must have 1 to {_MAX_STOP_STRING}", field=field
            )
    return tuple(strings)


def _read_cache_salt(salt: str) -> str:
    if len(salt) > _MAX_CACHE_SALT:
        raise InvalidInput(
            f"cache_salt has {len(salt)} characters, must have at most {_MAX_CACHE_SALT}", field="cache_salt"
        )
    return salt


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidInput(f"{field} is {value}, must be between {low} and {high}", field=field)
