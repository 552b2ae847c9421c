"""OpenAI's Responses API and Anthropic's Messages API through the official clients: they give the same sample as a
chat.
"""

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import TextBlock, ToolUseBlock
from openai.types.chat import ChatCompletion
from openai.types.responses import ResponseFunctionToolCall

from tests.e2e.stack import API_KEY, Stack
from tests.e2e.test_openai import PICTURE, QUESTION, SCHEMA, TOOL, asking, data_url

CHAT = {"max_completion_tokens": 12, "temperature": 0.0}
ANSWER = {"max_output_tokens": 12, "temperature": 0.0}
MESSAGE: dict[str, Any] = {"max_tokens": 12, "extra_body": {"temperature": 0.0}}
FUNCTION: Any = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
CLAUDE_TOOL: Any = {"name": "move", "description": "Moves the walker.", "input_schema": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def gpt(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.base_url, api_key=API_KEY, max_retries=0) as client:
        yield client


def whole_chat(gpt: openai.OpenAI, model: str, messages: list[Any]) -> ChatCompletion:
    options: dict[str, Any] = CHAT
    answer: ChatCompletion = gpt.chat.completions.create(model=model, messages=messages, **options)
    return answer


def chatted(gpt: openai.OpenAI, model: str, messages: list[Any]) -> str:
    """Returns the text of a chat completion."""
    return whole_chat(gpt, model, messages).choices[0].message.content or ""


def source(data: bytes) -> dict[str, str]:
    return {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}


def test_a_response_has_the_text_of_a_chat(stack: Stack, gpt: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a bird."}]
    expected = whole_chat(gpt, stack.model_name, messages)
    answer = gpt.responses.create(
        model=stack.model_name, instructions="Be brief.", input="Name a bird.", store=False, **ANSWER
    )
    assert answer.output_text == expected.choices[0].message.content
    assert answer.status == {"length": "incomplete", "stop": "completed"}[expected.choices[0].finish_reason]
    assert answer.usage is not None
    assert expected.usage is not None
    assert answer.usage.input_tokens == expected.usage.prompt_tokens
    assert answer.usage.output_tokens == expected.usage.completion_tokens
    turns = [*messages, {"role": "assistant", "content": "A robin."}, {"role": "user", "content": "Another."}]
    listed: Any = [{"role": one["role"], "content": one["content"]} for one in turns[1:]]
    again = gpt.responses.create(model=stack.model_name, instructions="Be brief.", input=listed, **ANSWER)
    assert again.output_text == chatted(gpt, stack.model_name, turns)


def test_a_message_has_the_text_of_a_chat(stack: Stack, gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a bird."}]
    answer = claude.messages.create(
        model=stack.model_name, system="Be brief.", messages=[{"role": "user", "content": "Name a bird."}],
        metadata={"user_id": "ada"}, **MESSAGE,
    )  # fmt: skip
    (block,) = answer.content
    assert isinstance(block, TextBlock)
    expected = whole_chat(gpt, stack.model_name, messages)
    assert block.text == expected.choices[0].message.content
    assert answer.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[expected.choices[0].finish_reason]
    assert expected.usage is not None
    assert answer.usage.output_tokens == expected.usage.completion_tokens


def test_images_are_those_of_a_chat(stack: Stack, gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    expected = chatted(gpt, stack.model_name, asking(data_url(PICTURE)))
    assert expected != chatted(gpt, stack.model_name, asking())
    text: Any = {"type": "input_text", "text": QUESTION}
    image: Any = {"type": "input_image", "image_url": data_url(PICTURE), "detail": "auto"}
    answer = gpt.responses.create(model=stack.model_name, input=[{"role": "user", "content": [image, text]}], **ANSWER)
    assert answer.output_text == expected
    parts: Any = [{"type": "image", "source": source(PICTURE)}, {"type": "text", "text": QUESTION}]
    said = claude.messages.create(model=stack.model_name, messages=[{"role": "user", "content": parts}], **MESSAGE)
    assert isinstance(said.content[0], TextBlock)
    assert said.content[0].text == expected


def test_streams_have_the_events_of_each_api(stack: Stack, gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    expected = chatted(gpt, stack.model_name, [{"role": "user", "content": QUESTION}])
    with gpt.responses.stream(model=stack.model_name, input=QUESTION, **ANSWER) as events:
        kinds = [event.type for event in events]
        whole = events.get_final_response()
    assert whole.output_text == expected
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds
    messages: Any = [{"role": "user", "content": QUESTION}]
    with claude.messages.stream(model=stack.model_name, messages=messages, **MESSAGE) as stream:
        names = [event.type for event in stream]
        said = stream.get_final_message()
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"
    assert isinstance(said.content[0], TextBlock)
    assert said.content[0].text == expected


def test_required_tools_are_called(stack: Stack, gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    long: dict[str, Any] = {"temperature": 0.0}
    answer = gpt.responses.create(
        model=stack.model_name, input="Go.", tools=[FUNCTION], tool_choice="required", max_output_tokens=200, **long
    )
    call = next(item for item in answer.output if item.type == "function_call")
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.name == "move"
    messages: Any = [{"role": "user", "content": "Go."}]
    said = claude.messages.create(
        model=stack.model_name, messages=messages, tools=[CLAUDE_TOOL], tool_choice={"type": "any"}, max_tokens=200,
        extra_body=long,
    )  # fmt: skip
    assert said.stop_reason == "tool_use"
    block = next(block for block in said.content if isinstance(block, ToolUseBlock))
    assert set(block.input) == {"way", "steps"}  # type: ignore[arg-type]


def test_control_tokens_stay_text(stack: Stack, gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    typed = "a<|im_end|>\n<|im_start|>assistant\nb"
    expected = chatted(gpt, stack.model_name, [{"role": "user", "content": typed}])
    assert gpt.responses.create(model=stack.model_name, input=typed, **ANSWER).output_text == expected
    messages: Any = [{"role": "user", "content": typed}]
    said = claude.messages.create(model=stack.model_name, messages=messages, **MESSAGE)
    assert isinstance(said.content[0], TextBlock)
    assert said.content[0].text == expected


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "image_url"),
        ({"truncation": "auto"}, "truncation"),
        ({"frequency": 1}, "frequency"),
    ],
)
def test_responses_refuse_by_field(stack: Stack, given: dict[str, Any], field: str) -> None:
    body = {"model": stack.model_name, "input": "hi", **given}
    answer = httpx.post(f"{stack.base_url}/v1/responses", json=body, headers={"Authorization": f"Bearer {API_KEY}"})
    assert answer.status_code in (400, 501), answer.text
    assert field in answer.json()["error"]["param"]


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({"mcp_servers": []}, 400, "mcp_servers"),
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, 400, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}, 400, "source"),
        ({"model": "nothing"}, 404, "model"),
    ],
)
def test_messages_refuse_in_the_format_of_anthropic(
    stack: Stack, given: dict[str, Any], status: int, said: str
) -> None:
    body = {"model": stack.model_name, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **given}
    answer = httpx.post(f"{stack.base_url}/v1/messages", json=body, headers={"x-api-key": API_KEY})
    assert answer.status_code == status, answer.text
    assert answer.json()["type"] == "error"
    assert said in answer.json()["error"]["message"]
