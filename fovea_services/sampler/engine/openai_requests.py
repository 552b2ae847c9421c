"""Validates the requests of OpenAI's API and converts vLLM's errors about them into Fovea's."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.sampling_params import SamplingParams

from fovea.api.v1 import sampler_pb2
from fovea.wire.errors import (
    ContextOverflow,
    FoveaError,
    Internal,
    InvalidInput,
    NotFound,
    Unavailable,
    Unimplemented,
)
from fovea_services.sampler.engine.openai_texts import PICTURE

_BOTH = (
    "model stream stream_options n seed stop stop_token_ids ignore_eos temperature top_p top_k min_p presence_penalty"
    " frequency_penalty repetition_penalty max_tokens logprobs include_stop_str_in_output skip_special_tokens"
    " spaces_between_special_tokens return_token_ids return_tokens_as_token_ids add_special_tokens response_format"
    " structured_outputs user"
)
_CHAT = (
    " messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls reasoning_effort"
    " chat_template_kwargs add_generation_prompt continue_final_message"
)
_FIELDS = {ChatCompletionRequest: set((_BOTH + _CHAT).split()), CompletionRequest: set((_BOTH + " prompt").split())}
"""The request fields that Fovea serves. vLLM accepts any field and ignores those that it does not know."""

_ASKS_NOTHING: dict[str, Callable[[Any], bool]] = {
    "store": lambda value: value is False,
    "metadata": lambda value: value == {},
    "logit_bias": lambda value: value == {},
    "modalities": lambda value: value == ["text"],
    "service_tier": lambda value: value in ("auto", "default"),
    "best_of": lambda value: value == 1,
    "echo": lambda value: value is False,
    "suffix": lambda value: value == "",
    "functions": lambda value: value == [],
    "function_call": lambda value: value in ("auto", "none"),
    "prompt_cache_key": lambda value: isinstance(value, str),
    "safety_identifier": lambda value: isinstance(value, str),
}
"""OpenAI fields that Fovea does not serve, with a test for the values without effect that clients send by default."""


def read(
    route: "sampler_pb2.OpenAIRoute", body: dict[str, Any], most_samples: int
) -> ChatCompletionRequest | CompletionRequest:
    """Returns the request as vLLM's class. Raises InvalidInput or Unimplemented with the field that is wrong."""
    kinds: dict[int, type[ChatCompletionRequest] | type[CompletionRequest]] = {
        sampler_pb2.OPEN_AI_ROUTE_CHAT_COMPLETIONS: ChatCompletionRequest,
        sampler_pb2.OPEN_AI_ROUTE_COMPLETIONS: CompletionRequest,
    }
    kind = kinds.get(route)
    if kind is None:
        raise InvalidInput("route is not set", field="route")
    for name, value in body.items():
        known = kind.model_fields.get(name)
        if name in _FIELDS[kind] or value is None or (known is not None and value == known.get_default()):
            continue
        if name in _ASKS_NOTHING and _ASKS_NOTHING[name](value):
            continue
        if known is None:
            raise InvalidInput(f"there is no field {name!r} in this request; leave it out", field=name)
        raise Unimplemented(f"Fovea does not serve vLLM's field {name}; leave it out", field=name)
    _check_parts(body.get("messages"))
    given = {name: value for name, value in body.items() if value is not None and name in _FIELDS[kind]}
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"])) or None
        raise InvalidInput(f"{field or 'the request'}: {first['msg']}", field=field) from None
    except Exception as error:  # vLLM's validators raise exceptions of their own
        raise error_of(create_error_response(error)) from None
    if isinstance(request, ChatCompletionRequest) and not request.messages:
        raise InvalidInput("messages is empty; send at least one", field="messages")
    if not 1 <= (request.n or 1) <= most_samples:
        raise InvalidInput(f"n is {request.n}; it must be 1 .. {most_samples}", field="n")
    return request


def _check_parts(messages: Any) -> None:
    """Raises InvalidInput for a message part that vLLM would fetch or load. Only the renderer may read images."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for place, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind != "text" and part != PICTURE:
                field = f"messages.{index}.content.{place}.type"
                raise InvalidInput(f"{field} is {kind!r}; it must be 'text' or 'image_url'", field=field)


def max_tokens_of(request: ChatCompletionRequest | CompletionRequest) -> int | None:
    given = vars(request)  # reading the deprecated attribute would log a warning
    most: int | None = given.get("max_completion_tokens")
    if most is None:
        most = given["max_tokens"]
    return most


def structure_of(params: SamplingParams) -> str:
    given = params.structured_outputs
    if given is None:
        return ""
    named = {name: value for name, value in vars(given).items() if not name.startswith("_")}
    return json.dumps({name: value for name, value in named.items() if value not in (None, False)})


def error_of(response: ErrorResponse) -> FoveaError:
    error = response.error
    kinds: dict[int, type[FoveaError]] = {404: NotFound, 501: Unimplemented, 503: Unavailable}
    kind = kinds.get(error.code, InvalidInput if error.code < 500 else Internal)
    if error.param in ("input_text", "input_tokens"):  # vLLM's names for a prompt that is too long
        kind = ContextOverflow
    message = error.message
    with suppress(ValueError):  # vLLM appends the parameter, which FoveaError carries as `field`
        message = message[: message.rindex(" (parameter=")]
    return kind(message, field="prompt" if kind is ContextOverflow else error.param)
