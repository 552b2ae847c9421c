"""OpenAI's chats and responses, and Anthropic's messages, with vLLM's own request types, handlers and events.

vLLM turns the conversations of the last two into chat messages. Fovea checks and marks these as it does those of chat
completions: no part may make vLLM fetch something, and control tokens in a text stay text.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest, AnthropicMessagesResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
from vllm.renderers.online_renderer import ResponsesRenderResult
from vllm.tool_parsers.abstract_tool_parser import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.tool_parsers.utils import is_complete_json

from fovea.api.v1 import sampler_pb2
from fovea.wire.errors import FoveaError, InvalidInput, Unimplemented
from fovea_sampler.engine import openai_requests
from fovea_sampler.engine.openai_requests import PICTURE, TextRenderer

_IMAGE_URL = f"fovea:{secrets.token_hex(16)}"
"""A random address that stands for an image while vLLM's types read a request."""
_RESPONSES_PICTURE = {"type": "input_image", "image_url": _IMAGE_URL, "detail": "auto"}
_MESSAGES_PICTURE = {"type": "image", "source": {"type": "url", "url": _IMAGE_URL}}
_TEXTS = ("input_text", "output_text")

_TOOL_PARSERS = {
    "<function=": "qwen3_coder",
    "<arg_key>": "glm45",
    "<|tool_call>": "gemma4",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|tool_call_start|>": "lfm2",
    "<|python_tag|>": "llama3_json",
}
"""vLLM's tool-call parsers by the mark that a chat template writes around a tool call. The first match wins."""

_MESSAGES_WITHOUT_EFFECT: dict[str, Callable[[Any], bool]] = {
    "metadata": lambda value: isinstance(value, dict),  # the user's id
    "service_tier": lambda value: value in ("auto", "standard_only"),
}
_MESSAGES_FIELDS = set(
    "model messages max_tokens system stop_sequences stream temperature top_p top_k tools tool_choice thinking"
    " output_config chat_template_kwargs".split()
)
_MESSAGES_NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}
"""Fields of Anthropic's API by the field of chat completions that vLLM makes of them."""


async def read_messages(
    body: dict[str, Any], renderer: TextRenderer, most_samples: int
) -> tuple[AnthropicMessagesRequest, ChatCompletionRequest]:
    """Returns a request of Anthropic's Messages API, and the chat request that answers it.

    Raises InvalidInput or Unimplemented with the field that is wrong.
    """
    for name, value in body.items():
        if name in _MESSAGES_FIELDS or value is None:
            continue
        if not _MESSAGES_WITHOUT_EFFECT.get(name, lambda _: False)(value):
            raise Unimplemented(f"Fovea does not serve the field {name}; leave it out", field=name)
    _swap(body.get("messages"), _MESSAGES_PICTURE, "messages")
    given = {name: value for name, value in body.items() if name in _MESSAGES_FIELDS and (name, value) != ("tools", [])}
    asked = openai_requests.validated(AnthropicMessagesRequest, given)
    handler = AnthropicServingMessages
    messages: list[dict[str, Any]] = []
    try:
        handler._convert_system_message(asked, messages, merge_inline_system=True)
        handler._convert_messages(asked.messages, messages, merge_inline_system=True)
        chat = handler.to_chat_completion_request(asked, merge_inline_system=True)
    except ValueError as error:
        raise InvalidInput(str(error), field="messages") from None
    made = chat.model_dump(exclude_unset=True, exclude_none=True, by_alias=True, exclude={"messages"})
    made["messages"] = await renderer.guard(_plain(messages))
    try:
        return asked, openai_requests.read(sampler_pb2.OPEN_AI_ROUTE_CHAT_COMPLETIONS, made, most_samples)  # type: ignore[return-value]
    except FoveaError as error:
        field = _MESSAGES_NAMES.get(error.field or "", error.field)
        raise type(error)(error.message, field, **error.metadata) from None


async def read_responses(
    body: dict[str, Any], renderer: TextRenderer, most_samples: int
) -> tuple[ResponsesRequest, list[dict[str, Any]]]:
    """Returns a request of OpenAI's Responses API, and its conversation as chat messages.

    Raises InvalidInput or Unimplemented with the field that is wrong.
    """
    _swap(body.get("input"), _RESPONSES_PICTURE, "input")
    asked = openai_requests.read(sampler_pb2.OPEN_AI_ROUTE_RESPONSES, body, most_samples)
    assert isinstance(asked, ResponsesRequest)
    for index, tool in enumerate(asked.tools):
        if tool.type != "function":
            field = f"tools.{index}.type"
            raise Unimplemented(f"{field} is {tool.type!r}; Fovea serves 'function' only", field=field)
    try:
        messages = construct_input_messages(request_instructions=asked.instructions, request_input=asked.input)
    except ValueError as error:
        raise InvalidInput(str(error), field="input") from None
    whole = _plain(messages)
    openai_requests.check_parts(whole, "input")
    if not whole:
        raise InvalidInput("input is empty; send at least one message", field="input")
    return asked, await renderer.guard(whole)


class ChatHandler(OpenAIServingChat):  # type: ignore[misc]
    """vLLM's chat handler, with the exact bytes of each token in its log-probabilities.

    vLLM decodes tokens one by one, so a token that is a part of a UTF-8 character becomes U+FFFD. Clients that join the
    bytes of the tokens would not get the text of the answer.
    """

    def _create_chat_logprobs(
        self, token_ids: Sequence[int], top_logprobs: Any, tokenizer: Any, *arguments: Any, **options: Any
    ) -> Any:
        """Calls vLLM's method, then replaces the bytes of partial characters."""
        made = super()._create_chat_logprobs(token_ids, top_logprobs, tokenizer, *arguments, **options)
        for token, known, said in zip(token_ids, top_logprobs, made.content, strict=True):
            listed = ((token, said), *zip(known or (), said.top_logprobs, strict=False))
            openai_requests.write_bytes(tokenizer, listed)
        return made


class HermesParser(Hermes2ProToolParser):  # type: ignore[misc]
    """vLLM's parser of tool calls in Hermes' format. It keeps the complete calls of an answer that ends within a call.

    vLLM 0.32 then returns the whole answer as text. A required tool has a grammar that permits further calls, so an
    answer may well end at `max_tokens` after its first call.
    """

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """Calls vLLM's method without the text of an incomplete call at the end."""
        begun = model_output.rfind(self.tool_call_start_token)
        is_first = begun == model_output.find(self.tool_call_start_token)
        last = model_output[begun + len(self.tool_call_start_token) :]
        if not is_first and self.tool_call_end_token not in last and not is_complete_json(last.strip()):
            model_output = model_output[:begun]
        return super().extract_tool_calls(model_output, request)


ToolParserManager.register_module("hermes", module=HermesParser)


class MessagesHandler(AnthropicServingMessages):  # type: ignore[misc]
    """vLLM's handler of Anthropic's Messages API, for a conversation that `read_messages` has converted."""

    chat: ChatCompletionRequest

    def to_chat_completion_request(self, *arguments: Any, **options: Any) -> ChatCompletionRequest:
        """Returns the chat request."""
        return self.chat


class ResponsesHandler(OpenAIServingResponses):  # type: ignore[misc]
    """vLLM's handler of OpenAI's Responses API, for a conversation that `read_responses` has converted."""

    messages: list[dict[str, Any]]

    async def _render_resolved_response_inputs(
        self, request: ResponsesRequest, prev_response: Any, *, skip_mm_cache: bool = False
    ) -> ResponsesRenderResult:
        """Renders the messages as vLLM's method does."""
        online = self.online_renderer
        tools = construct_tool_dicts(request.tools, request.tool_choice, online.exclude_tools_when_tool_choice_none)
        _, inputs = await online.preprocess_chat(
            request,
            self.messages,
            default_template=None,
            default_template_content_format=self.chat_template_content_format,
            default_template_kwargs=online.effective_chat_template_kwargs(request),
            tool_dicts=tools,
            parser=online.parser,
        )
        return ResponsesRenderResult(self.messages, inputs[0])

    def _create_response_logprobs(
        self, token_ids: Sequence[int], logprobs: Any, tokenizer: Any, top_logprobs: int | None = None
    ) -> Any:
        """Calls vLLM's method, then replaces the bytes of partial characters, as for chat completions."""
        made = super()._create_response_logprobs(token_ids, logprobs, tokenizer, top_logprobs)
        for token, known, said in zip(token_ids, logprobs, made, strict=True):
            openai_requests.write_bytes(tokenizer, ((token, said), *zip(known, said.top_logprobs, strict=False)))
        return made


def event_text(event: Any) -> str:
    """Returns an event of a handler as a server-sent event; most handlers return texts."""
    if isinstance(event, str):
        return event
    return f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"


def body_of(answer: Any) -> str:
    """Returns the JSON text of a handler's whole response, as vLLM's own server writes it."""
    is_message = isinstance(answer, AnthropicMessagesResponse)
    return answer.model_dump_json(by_alias=True, exclude_none=is_message)  # type: ignore[no-any-return]


def _swap(items: Any, picture: dict[str, Any], field: str) -> None:
    """Replaces the parts that stand for images by parts that the API's type accepts, also in results of tools."""
    try:
        for item in items if isinstance(items, list) else ():
            for name in ("content", "output"):
                parts = item.get(name) if isinstance(item, dict) else None
                if isinstance(parts, list):
                    item[name] = [dict(picture) if part == PICTURE else part for part in parts]
                    _swap(item[name], picture, field)
    except RecursionError:
        raise InvalidInput(f"{field} nests too deeply", field=field) from None


def _plain(value: Any) -> Any:
    """Returns messages as JSON values, with texts and images in the parts of chat completions."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        url = value.get("image_url")
        if (url.get("url") if isinstance(url, dict) else url) == _IMAGE_URL:
            return dict(PICTURE)
        if value.get("type") in _TEXTS and "text" in value:
            return {"type": "text", "text": value["text"]}
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def tool_parser_of(tokenizer: Any) -> str:
    """Returns the name of the tool-call parser for the tokenizer's chat template."""
    template = getattr(tokenizer, "chat_template", None)
    texts = template.values() if isinstance(template, dict) else [template or ""]
    return next((name for mark, name in _TOOL_PARSERS.items() if any(mark in text for text in texts)), "hermes")
