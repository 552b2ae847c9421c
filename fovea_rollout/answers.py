"""Sampled text, read: thinking, tool calls, and the rest."""

from __future__ import annotations

import json
import re

from fovea_rollout.environment import Answer, ToolCall

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

_TOOL_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def read_answer(text: str, is_cut: bool) -> Answer:
    """Splits what a model wrote in one turn, its end of turn removed.

    Thinking is all before the last `</think>`, as chat templates have it; all after a `<think>` at the start that is
    never closed. Tool calls are left in `Answer.text`, where the model wrote them.

    Args:
        is_cut: Whether max_tokens ended it.
    """
    thinking, close, rest = text.rpartition(THINK_CLOSE)
    if not close and rest.lstrip().startswith(THINK_OPEN):
        thinking, rest = rest, ""
    if thinking:
        thinking = thinking.lstrip().removeprefix(THINK_OPEN).strip("\n")
        rest = rest.lstrip("\n")
    calls: list[ToolCall] = []
    flaws: list[str] = []
    for index, found in enumerate(_TOOL_CALL.finditer(rest)):
        try:
            calls.append(_read_tool_call(found[1], is_closed=found[2] == "</tool_call>"))
        except ValueError as error:
            flaws.append(f"tool_call[{index}] {error}")
    return Answer(rest, thinking, tuple(calls), "; ".join(flaws), is_cut)


def _read_tool_call(body: str, is_closed: bool) -> ToolCall:
    """Raises ValueError with what is wrong, for the model to read."""
    if not is_closed:
        raise ValueError("has no </tool_call>")
    try:
        call = json.loads(body)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError('must be an object with a "name", a text')
    if unknown := sorted(set(call) - {"name", "arguments"}):
        raise ValueError(f'has the unknown field {unknown[0]!r}; known are "name" and "arguments"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError('"arguments" must be an object')
    return ToolCall(call["name"], arguments)
