"""Conversations of OpenAI's Responses API and Anthropic's Messages API become chat messages."""

from typing import Any

import pytest
from vllm.tool_parsers.abstract_tool_parser import ToolParserManager

from fovea.wire.errors import FoveaError
from fovea_sampler.engine.message_apis import read_messages, read_responses
from fovea_sampler.engine.openai_requests import PICTURE

PARAMETERS = {"type": "object", "properties": {"way": {"enum": ["left", "right"]}}, "required": ["way"]}


class Unguarded:
    """A renderer with a tokenizer that has no control tokens."""

    async def guard(self, messages: Any) -> Any:
        return messages


RENDERER: Any = Unguarded()


async def responses(**given: Any) -> tuple[Any, list[dict[str, Any]]]:
    return await read_responses({"model": "m", "input": "hi", **given}, RENDERER, 8)


async def message(**given: Any) -> Any:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **given}
    _, chat = await read_messages(body, RENDERER, 8)
    return chat


async def test_a_response_is_asked_with_a_text_or_with_turns() -> None:
    asked, messages = await responses(instructions="Be brief.", store=False, metadata={}, prompt_cache_key="k")
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert not asked.stream
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "What?"}, dict(PICTURE)]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A bird."}]},
        {"role": "user", "content": "Sure?"},
    ]
    _, messages = await responses(input=turns)
    assert messages == [
        {"role": "user", "content": [{"type": "text", "text": "What?"}, PICTURE]},
        {"role": "assistant", "content": "A bird."},
        {"role": "user", "content": "Sure?"},
    ]


async def test_a_response_continues_after_a_tool() -> None:
    tool = {"type": "function", "name": "move", "parameters": PARAMETERS}
    turns: list[Any] = [
        {"role": "user", "content": "Go."},
        {"type": "function_call", "call_id": "c1", "name": "move", "arguments": '{"way": "left"}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Done."}]},
    ]
    _, (_, call, result) = await responses(input=turns, tools=[tool])
    assert call["tool_calls"][0]["function"] == {"name": "move", "arguments": '{"way": "left"}'}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Done."}]}


async def test_a_message_is_a_chat() -> None:
    chat = await message(system=[{"type": "text", "text": "Be brief."}], stop_sequences=["END"], top_k=3, stream=True)
    assert [(one["role"], one["content"]) for one in chat.messages] == [("system", "Be brief."), ("user", "hi")]
    assert (chat.max_completion_tokens, chat.stop, chat.top_k, chat.stream) == (9, ["END"], 3, True)


async def test_a_message_may_list_no_tools() -> None:
    assert not (await message(tools=[])).tools


async def test_a_message_with_images_and_tools_is_a_chat() -> None:
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "What?", "cache_control": {}}, PICTURE]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "move", "input": {"way": "left"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [dict(PICTURE)]}]},
    ]  # fmt: skip
    tools = [{"name": "move", "description": "Moves.", "input_schema": PARAMETERS}]
    chat = await message(messages=turns, tools=tools, tool_choice={"type": "tool", "name": "move"})
    first, call, result, seen = chat.messages
    assert first["content"] == [{"type": "text", "text": "What?"}, PICTURE]
    assert next(iter(call["tool_calls"]))["function"]["name"] == "move"
    assert result["role"] == "tool"
    assert seen == {"role": "user", "content": [PICTURE]}
    assert chat.tools[0].function.parameters == PARAMETERS
    assert chat.tool_choice.function.name == "move"


async def test_a_message_may_ask_for_a_schema() -> None:
    chat = await message(output_config={"format": {"type": "json_schema", "schema": PARAMETERS}})
    assert chat.response_format.json_schema.json_schema == PARAMETERS


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"metadata": {"a": "b"}}, "metadata"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input.0.content.0.type"),
        ({"temperature": "warm"}, "temperature"),
    ],
)
async def test_a_response_that_asks_for_more_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(FoveaError) as refused:
        await responses(**given)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"mcp_servers": []}, "mcp_servers"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 4096, "thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking.budget_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages.0.content.str"),
    ],
)
async def test_a_message_that_asks_for_more_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(FoveaError) as refused:
        await message(**given)
    assert refused.value.field == field


CALL = '<tool_call>\n{"name": "move", "arguments": {"way": "left"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("ending", "count", "content"),
    [
        ("", 1, None),
        ('<tool_call>\n{"name": "mo', 1, None),
        ('\n<tool_call>\n{"name": "move", "arguments": {"way": "left"}}\n</tool', 1, None),
        ('<tool_call>\n{"name": "move", "arguments": {"way": "left"}}\n', 2, None),
        (CALL + "<tool_call>", 2, None),
    ],
)
def test_complete_calls_before_an_incomplete_one_are_kept(ending: str, count: int, content: str | None) -> None:
    parser = ToolParserManager.get_tool_parser("hermes")(Any)  # it only reads the tokenizer in streams
    found = parser.extract_tool_calls(CALL + ending, Any)
    assert found.tools_called
    assert [call.function.name for call in found.tool_calls] == ["move"] * count
    assert found.content == content


@pytest.mark.parametrize("text", ["No tool.", '<tool_call>\n{"name": "mo'])
def test_an_answer_without_a_complete_call_is_text(text: str) -> None:
    found = ToolParserManager.get_tool_parser("hermes")(Any).extract_tool_calls(text, Any)
    assert (found.tools_called, found.content) == (False, text)


async def test_a_deep_conversation_is_refused() -> None:
    part: dict[str, Any] = {"type": "text", "text": "x"}
    for _ in range(3000):
        part = {"content": [part]}
    with pytest.raises(FoveaError, match="nests too deeply"):
        await message(messages=[{"role": "user", "content": [part]}])
