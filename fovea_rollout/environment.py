"""Environments: what a model talks to, what they get of its answers, and the registry that names them."""

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

    The arguments may be a text of JSON, and name and arguments may stand within `function`, as OpenAI has them; or the
    name itself may.
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What the model said in one turn.

    Attributes:
        text: Without the end of turn, thinking left out.
        thinking: What it thought before, empty if nothing.
        tool_calls: Those that could be read.
        malformed: Why a tool call could not be read; empty if all could.
        is_cut: Whether max_tokens ended it.
    """

    text: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: str = ""
    is_cut: bool = False


@dataclass(frozen=True)
class Step:
    """What an environment answers.

    Attributes:
        messages: What the model reads next; ignored if `is_done`.
        reward: Reward of this step.
        metrics: Numbers to be averaged over rollouts.
    """

    messages: Sequence[MessageLike] = ()
    reward: float = 0.0
    is_done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode. Methods are async or plain: plain ones are run in a thread."""

    def reset(self) -> Awaitable[Sequence[MessageLike]] | Sequence[MessageLike]:
        """Begins the episode; returns what the model reads first."""
        ...

    def step(self, answer: Answer) -> Awaitable[Step] | Step:
        """Takes what the model said."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Frees what the episode holds; called once, whatever happened."""
        ...


EnvironmentFactory = Callable[[Mapping[str, Any]], Environment]
"""Makes an environment from a dataset's record."""

_FACTORIES: dict[str, EnvironmentFactory] = {}
_OWN = {
    "geometry3k": "fovea_rollout.geometry3k_environment:geometry3k_environment",
    "visgym": "fovea_rollout.visgym_environment:visgym_environment",
}
"""Kinds that this library has, unless another is registered under the name; imported when one is made."""


def register(name: str, factory: EnvironmentFactory) -> None:
    """Names a kind of environment. Raises InvalidInput if the name is taken by another one."""
    if _FACTORIES.setdefault(name, factory) is not factory:
        raise InvalidInput(f"env_class {name!r} is registered already: unregister it first", field="env_class")


def unregister(name: str) -> None:
    """Forgets a name. Raises InvalidInput if it is unknown."""
    if _FACTORIES.pop(name, None) is None:
        raise InvalidInput(f"env_class {name!r} is not registered", field="env_class")


def make(name: str, record: Mapping[str, Any]) -> Environment:
    """An environment of a registered kind, or of `module:factory`. Raises InvalidInput if there is none."""
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
