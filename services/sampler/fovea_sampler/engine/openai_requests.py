"""Reads requests of OpenAI's API: validates them, and converts their messages into tokens with the chat template."""

import asyncio
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from transformers.convert_slow_tokenizer import bytes_to_unicode
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.inputs import tokens_input
from vllm.renderers import ChatParams
from vllm.sampling_params import SamplingParams

from fovea.api.v1 import sampler_pb2
from fovea.vision.vision_family import with_margins
from fovea.wire import tensors
from fovea.wire.conventions import is_markup, replace_markup
from fovea.wire.errors import (
    ContextOverflow,
    FoveaError,
    Internal,
    InvalidInput,
    NotFound,
    Unavailable,
    Unimplemented,
)

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
_RESPONSES = (
    "model input instructions stream max_output_tokens temperature top_p top_k min_p seed stop stop_token_ids"
    " ignore_eos presence_penalty frequency_penalty repetition_penalty include_stop_str_in_output skip_special_tokens"
    " tools tool_choice parallel_tool_calls reasoning text structured_outputs include top_logprobs user"
    " chat_template_kwargs"
)
_FIELDS = {
    ChatCompletionRequest: set((_BOTH + _CHAT).split()),
    CompletionRequest: set((_BOTH + " prompt").split()),
    ResponsesRequest: set(_RESPONSES.split()),
}
"""The request fields that Fovea serves. vLLM accepts any field and ignores those that it does not know."""

_WITHOUT_EFFECT: dict[str, Callable[[Any], bool]] = {
    "store": lambda value: value is False,
    "metadata": lambda value: value == {},
    "logit_bias": lambda value: value == {},
    "modalities": lambda value: value == ["text"],
    "service_tier": lambda value: value in ("auto", "default"),
    "best_of": lambda value: value == 1,
    "echo": lambda value: value is False,
    "suffix": lambda value: value == "",
    "background": lambda value: value is False,
    "functions": lambda value: value == [],
    "function_call": lambda value: value in ("auto", "none"),
    "prompt_cache_key": lambda value: isinstance(value, str),
    "prompt_cache_retention": lambda value: value in ("in_memory", "24h"),
    "safety_identifier": lambda value: isinstance(value, str),
    "verbosity": lambda value: value == "medium",
}
"""OpenAI fields that Fovea does not serve, with a test for the values without effect that clients send by default."""

GenerationRequest: TypeAlias = ChatCompletionRequest | CompletionRequest | ResponsesRequest
_Request = TypeVar("_Request", bound=BaseModel)

PICTURE: dict[str, Any] = {"type": "image_url", "image_url": None, "uuid": "0"}
"""The message part by which the gateway replaces each image."""

_QUESTION = {"type": "text", "text": "question"}
_THOUGHTS = {"<think>", "</think>"}
_MARK = f"@@fovea-text-{secrets.token_hex(16)}@@"
"""A random text that splits control tokens typed in a message, so that the chat template cannot reproduce them."""

_SPACES = ('"max_whitespace_cnt": null', '"max_whitespace_cnt": 16')
"""In the grammars that vLLM 0.32 makes of tools, the spaces between two parts of a call are not limited, so a model may
write nothing else until `max_tokens`.
"""
_REPLACEMENT = "\ufffd".encode()
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
_BYTES = {character: value for value, character in bytes_to_unicode().items()}


def read(route: "sampler_pb2.OpenAIRoute", body: dict[str, Any], most_samples: int) -> GenerationRequest:
    """Returns the request as vLLM's class. Raises InvalidInput or Unimplemented with the field that is wrong."""
    kinds: dict[int, Any] = {
        sampler_pb2.OPEN_AI_ROUTE_CHAT_COMPLETIONS: ChatCompletionRequest,
        sampler_pb2.OPEN_AI_ROUTE_COMPLETIONS: CompletionRequest,
        sampler_pb2.OPEN_AI_ROUTE_RESPONSES: ResponsesRequest,
    }
    kind = kinds.get(route)
    if kind is None:
        raise InvalidInput("route is not set", field="route")
    for name, value in body.items():
        known = kind.model_fields.get(name)
        if name in _FIELDS[kind] or value is None or (known is not None and value == known.get_default()):
            continue
        if name in _WITHOUT_EFFECT and _WITHOUT_EFFECT[name](value):
            continue
        if known is None and name not in _WITHOUT_EFFECT:
            raise InvalidInput(f"there is no field {name!r} in this request; leave it out", field=name)
        raise Unimplemented(f"Fovea does not serve {name} with this value; leave it out", field=name)
    check_parts(body.get("messages"), "messages")
    given = {name: value for name, value in body.items() if value is not None and name in _FIELDS[kind]}
    request: GenerationRequest = validated(kind, given)
    if isinstance(request, ChatCompletionRequest) and not request.messages:
        raise InvalidInput("messages is empty; send at least one", field="messages")
    count = getattr(request, "n", None) or 1
    if not 1 <= count <= most_samples:
        raise InvalidInput(f"n is {count}; it must be 1 .. {most_samples}", field="n")
    return request


def validated(kind: type[_Request], given: dict[str, Any]) -> _Request:
    """Returns a request of vLLM's class. Raises InvalidInput with the first field that is wrong."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"])) or None
        raise InvalidInput(f"{field or 'the request'}: {first['msg']}", field=field) from None
    except Exception as error:  # vLLM's validators raise exceptions of their own
        raise error_of(create_error_response(error)) from None


def check_parts(messages: Any, name: str) -> None:
    """Raises InvalidInput for a message part that vLLM would fetch or load. Only the renderer may read images."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for place, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind != "text" and part != PICTURE:
                field = f"{name}.{index}.content.{place}.type"
                raise InvalidInput(f"{field} is {kind!r}; it must be 'text' or 'image_url'", field=field)


def max_tokens_of(request: GenerationRequest) -> int | None:
    given = vars(request)  # reading the deprecated attribute would log a warning
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    return next((given[name] for name in names if given.get(name) is not None), None)


def take_support(body: dict[str, Any]) -> bool:
    """Removes Fovea's own field `sampled_support` from a body, and returns it. Raises InvalidInput."""
    is_asked = body.pop(tensors.SUPPORT, None) or False
    if not isinstance(is_asked, bool) or (is_asked and body.get("stream")):
        message = f"{tensors.SUPPORT} is {is_asked!r}; it must be a Boolean, and false for a stream"
        raise InvalidInput(message, field=tensors.SUPPORT)
    return is_asked


def structure_of(params: SamplingParams) -> str:
    """Returns the structured output of a request as JSON, with a limit on spaces in tool calls; empty for none."""
    given = params.structured_outputs
    if given is None:
        return ""
    named = {name: value for name, value in vars(given).items() if not name.startswith("_")}
    if named.get("structural_tag"):
        named["structural_tag"] = named["structural_tag"].replace(*_SPACES)
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


class TextRenderer:
    """vLLM's renderer with two changes; all other attributes are vLLM's.

    Images stay the placeholders that the chat template writes, because Fovea's renderer processes them. Control tokens
    that a message contains stay text.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._image_id: int | None = None
        self._typed: re.Pattern[str] | None = None
        self._markup: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def render_chat_async(
        self, conversations: Sequence[Any], chat_params: ChatParams, tok_params: Any = None, **ignored: Any
    ) -> tuple[list[Any], list[Any]]:
        """Renders conversations as vLLM's method does. Returns prompts as tokens; marks control tokens in tools too."""
        if self._typed is not None:
            given = await asyncio.to_thread(self._guarded_arguments, self._typed, chat_params.chat_template_kwargs)
            chat_params = replace(chat_params, chat_template_kwargs=given)
        rendered = [await self._inner.render_messages_async(messages, chat_params) for messages in conversations]
        prompts = [
            await self._encode(_as_text(prompt), tok_params or self._inner.default_chat_tok_params)
            for _, prompt in rendered
        ]
        return [messages for messages, _ in rendered], [tokens_input(ids) for ids in prompts]

    async def _encode(self, prompt: dict[str, Any], tok_params: Any) -> list[int]:
        """Returns the ids of a prompt. The parts between marks are encoded separately, and images get their margins."""
        text = self._with_margins(str(prompt.get("prompt", "")))
        first, *others = text.split(_MARK)
        if "prompt" in prompt:
            prompt = {"prompt": first}
        (encoded,) = await self._inner.tokenize_prompts_async([prompt], tok_params)
        ids: list[int] = list(encoded["prompt_token_ids"])
        for piece in others:
            ids += self._inner.get_tokenizer().encode(piece, add_special_tokens=False)
        return ids

    def _with_margins(self, text: str) -> str:
        """Returns the text with the text that the model's processor writes around images; see `image_margin`."""
        if self._image_id is None:
            return text
        tokenizer = self._inner.get_tokenizer()
        return with_margins(text, tokenizer.convert_ids_to_tokens(self._image_id), tokenizer)

    async def guard(self, messages: Any) -> Any:
        """Returns the messages with a mark inside each control token that a message contains, so that it stays text.

        Control tokens are the tokenizer's special tokens, the tokens that the template writes around turns, and the
        tokens of an image. Outside of the assistant's messages they include all other markup among the added tokens,
        such as `<think>` and `<tool_call>`. In the assistant's messages such markup is kept, because the model wrote
        it.

        Raises InvalidInput with the field of the text if the tokenizer cannot write such a token as text.
        """
        if self._typed is None:
            added = getattr(self._inner.get_tokenizer(), "added_tokens_decoder", {})
            self._markup = frozenset(token for token in map(str, added.values()) if is_markup(token))
            self._typed = _any_of(await self._controls())
        return await asyncio.to_thread(self._guarded_messages, self._typed, messages)

    def _guarded_messages(self, typed: re.Pattern[str], messages: Any) -> Any:
        if not isinstance(messages, list):
            return messages
        try:
            return [
                self._guarded(typed, one, f"messages.{place}", isinstance(one, dict) and one.get("role") == "assistant")
                for place, one in enumerate(messages)
            ]
        except RecursionError:
            raise InvalidInput("messages nest too deeply", field="messages") from None

    def _guarded_arguments(self, typed: re.Pattern[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the chat template, with marks: the tools and `chat_template_kwargs`."""
        try:
            return {
                name: self._guarded(typed, value, name if name == "tools" else f"chat_template_kwargs.{name}", False)
                for name, value in arguments.items()
            }
        except RecursionError:
            raise InvalidInput("tools or chat_template_kwargs nest too deeply", field="tools") from None

    def _guarded(self, typed: re.Pattern[str], value: Any, field: str, keeps_markup: bool) -> Any:
        if isinstance(value, dict):
            return {
                self._guarded(typed, name, field, keeps_markup): self._guarded(
                    typed, each, f"{field}.{name}", keeps_markup
                )
                for name, each in value.items()
            }
        if isinstance(value, list):
            return [self._guarded(typed, each, f"{field}.{place}", keeps_markup) for place, each in enumerate(value)]
        if not isinstance(value, str):
            return value
        while (again := typed.sub(lambda found: self._broken(found[0], field), value)) != value:
            value = again
        return value if keeps_markup else replace_markup(value, self._markup, lambda token: self._broken(token, field))

    async def _controls(self) -> set[str]:
        """Returns the texts of control tokens.

        Mistral's own tokenizer has no table of added tokens and never reads a control token from a text.
        """
        tokenizer = self._inner.get_tokenizer()
        added = getattr(tokenizer, "added_tokens_decoder", None)
        if added is None:
            return set()
        special = {str(token) for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        written = await self._added_ids([_QUESTION])
        with suppress(Exception):  # templates without images raise errors of their own
            written += await self._added_ids([_QUESTION, PICTURE])
        return special | {str(one) for one in tokenizer.convert_ids_to_tokens(written)} - _THOUGHTS

    def _broken(self, token: str, field: str) -> str:
        """Returns a control token with a mark inside. Raises InvalidInput if the tokenizer cannot encode it as text."""
        tokenizer = self._inner.get_tokenizer()
        ids = [one for part in (token[0], token[1:]) for one in tokenizer.encode(part, add_special_tokens=False)]
        if tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) != token:
            raise InvalidInput(
                f"{field} contains {token!r}, a control token of this model that the tokenizer cannot write as text; "
                "remove it",
                field=field,
            )
        return f"{token[0]}{_MARK}{token[1:]}"

    async def image_id(self) -> int:
        """Returns the id that represents an image in the chat template's output. Raises InvalidInput if there is none.

        It is the tokenizer's `image_token`, or else the middle one of the added tokens that an image produces, between
        the start and the end token.
        """
        if self._image_id is None:
            plain, pictured = [await self._added_ids(parts) for parts in ([_QUESTION], [_QUESTION, PICTURE])]
            brought = [token for token in pictured if token in Counter(pictured) - Counter(plain)]
            if not brought:
                raise InvalidInput("this model's chat template has no images; send only text", field="messages")
            named = self._inner.get_tokenizer().convert_tokens_to_ids(
                getattr(self._inner.get_tokenizer(), "image_token", None) or ""
            )
            self._image_id = named if named in brought else brought[len(brought) // 2]
        return self._image_id

    async def _added_ids(self, parts: list[dict[str, Any]]) -> list[int]:
        tokenizer = self._inner.get_tokenizer()
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
        _, (prompt,) = await self.render_chat_async([[{"role": "user", "content": parts}]], params)
        added = set(tokenizer.get_added_vocab().values())
        return [token for token in prompt["prompt_token_ids"] if token in added]


def _as_text(prompt: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in prompt.items() if name in ("prompt", "prompt_token_ids")}


def _any_of(texts: set[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the texts, the longest first; it matches nothing if there are none.

    Texts of one character, which a mark cannot split, are left out. So is whitespace: Gemma has added tokens of several
    line feeds, which are not control tokens.
    """
    longest_first = sorted((text for text in texts if len(text.strip()) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def special_stop(tokenizer: Any, tokens: Sequence[int], stops: Sequence[str]) -> str | None:
    """Returns the stop string that the last token completes; vLLM looks for it in a text without special tokens."""
    tail = tokens[-max(map(len, stops), default=0) :] if stops else []
    before, text = (tokenizer.decode(part, skip_special_tokens=False) for part in (tail[:-1], tail))
    return next((stop for stop in stops if stop in text and stop not in before), None)


def write_bytes(tokenizer: Any, listed: Iterable[tuple[int, Any]]) -> None:
    """Corrects the bytes of tokens in listed log-probabilities where a token is a part of a character."""
    for token, one in listed:
        if bytes(one.bytes or ()).find(_REPLACEMENT) >= 0:
            one.bytes = list(token_bytes(tokenizer, token) or one.bytes)


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """Returns the bytes of a token that is a part of a character, or None if the tokenizer does not write them.

    Tokenizers write bytes as `<0xE2>` (SentencePiece's fallback) or as one character each (byte-level BPE).
    """
    piece = str(tokenizer.convert_ids_to_tokens([token])[0])
    if fallback := _FALLBACK.fullmatch(piece):
        return bytes([int(fallback[1], 16)])
    if all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    return None
