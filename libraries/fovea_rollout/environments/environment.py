"""The interface of environments, the answers that they receive, and the registry of their names."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fovea.wire.errors import InvalidInput
from fovea_rollout.messages import MessageLike

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

_TOOL_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    The arguments may also be a text that contains JSON. Name and arguments may be inside `function`, as in OpenAI's
    format, or `function` may be the name itself.
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """The model's answer in one turn.

    Attributes:
        text: The answer without the thinking and without the token that ends the turn.
        thinking: The thinking before the answer; empty without any.
        tool_calls: The tool calls that could be read.
        malformed: The reason why a tool call could not be read; empty if all could.
        is_cut: Whether `max_tokens` cut the answer off.
    """

    text: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: str = ""
    is_cut: bool = False


@dataclass(frozen=True)
class Step:
    """The environment's response to an answer.

    Attributes:
        messages: The messages that the model reads next; ignored if `is_done`.
        reward: Reward of this step.
        is_done: Whether the episode is over.
        metrics: Numbers that are averaged over rollouts.
    """

    messages: Sequence[MessageLike] = ()
    reward: float = 0.0
    is_done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode. Its methods are async or plain functions; plain functions run in a thread."""

    def reset(self) -> Awaitable[Sequence[MessageLike]] | Sequence[MessageLike]:
        """Begins the episode; returns the messages that the model reads first."""
        ...

    def step(self, answer: Answer) -> Awaitable[Step] | Step:
        """Takes the model's answer; returns the response."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Frees the resources of the episode. It is called once, also after a failure."""
        ...


EnvironmentFactory = Callable[[Mapping[str, Any]], Environment]
"""Makes an environment from a record of a dataset."""

_FACTORIES: dict[str, EnvironmentFactory] = {}
_OWN = {
    "geometry3k": "fovea_rollout.environments.geometry3k_environment:geometry3k_environment",
    "visgym": "fovea_rollout.environments.visgym_environment:visgym_environment",
}
"""Environments of this library, unless another is registered under the name. Imported when the first one is made."""


def register(name: str, factory: EnvironmentFactory) -> None:
    """Registers a kind of environment. Raises InvalidInput if another one has the name."""
    if _FACTORIES.setdefault(name, factory) is not factory:
        raise InvalidInput(f"env_class {name!r} is registered already: unregister it first", field="env_class")


def unregister(name: str) -> None:
    """Removes a name from the registry. Raises InvalidInput if it is unknown."""
    if _FACTORIES.pop(name, None) is None:
        raise InvalidInput(f"env_class {name!r} is not registered", field="env_class")


def make(name: str, record: Mapping[str, Any]) -> Environment:
    """Makes an environment of a registered kind, or with `module:factory`. Raises InvalidInput for other names."""
    if name in _FACTORIES:
        return _FACTORIES[name](record)
    module, colon, attribute = _OWN.get(name, name).partition(":")
    if not colon:
        known = sorted({*_FACTORIES, *_OWN})
        raise InvalidInput(
            f"env_class {name!r} is not registered; known are {known}, or module:Class", field="env_class"
        )
    try:
        factory: EnvironmentFactory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"env_class {name!r} cannot be imported: {error}", field="env_class") from error
    return factory(record)


def read_answer(text: str, is_cut: bool) -> Answer:
    """Splits the text of one turn into thinking, answer and tool calls.

    The thinking ends at the last `</think>`, as in chat templates. If the text begins with a `<think>` that is never
    closed, all of it is thinking. Tool calls stay in `Answer.text`, where the model wrote them.

    Args:
        text: The text without the token that ends the turn.
        is_cut: Whether `max_tokens` cut it off.
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
    """Reads one call. Raises ValueError with a message for the model to read."""
    if not is_closed:
        raise ValueError("has no </tool_call>")
    try:
        call = json.loads(body)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    elif isinstance(call, dict) and "function" in call:
        call = {"name": call["function"], **{key: value for key, value in call.items() if key != "function"}}
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError('must be an object with a "name", a text')
    if unknown := sorted(set(call) - {"name", "arguments"}):
        raise ValueError(f'has the unknown field {unknown[0]!r}; known are "name" and "arguments"')
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f'has "arguments" that are not JSON: {error}') from None
    if not isinstance(arguments, dict):
        raise ValueError('"arguments" must be an object')
    return ToolCall(call["name"], arguments)
