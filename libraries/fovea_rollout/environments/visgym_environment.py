"""Plays VisGym tickets: a `gymnasium.Env` with a new picture after every answer and a reward at the end.

A ticket is a record with `env_class` "visgym", the environment's registered id and its options:

    {"prompt": [{"role": "user", "content": "placeholder"}], "env_class": "visgym", "visgym_env_id": "maze_2d/easy",
     "seed": 7, "max_turns": 10, "visgym_kwargs": {}}

The environment needs three methods: `get_prompt()` returns the task in words, `render()` returns uint8 [height, width,
3], and `step(action)` takes an action written as a Python pair, such as "('move', 0)". Its feedback to an action is
`info["env_feedback"]`. Source: VisGym (https://github.com/visgym/VisGym). This module does not import VisGym: any
registered environment with these methods works.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.environment import Answer, Step
from fovea_rollout.environments.gymnasium_environment import FIRST_FRAME, enlarged
from fovea_rollout.environments.records import Record
from fovea_rollout.messages import Message, Picture

if TYPE_CHECKING:
    import gymnasium

Answering = Literal["instruct", "tagged"]
"""The format of answers: free reasoning and the name of an action (`instruct`), or a Python pair (`tagged`)."""

WORDS: Mapping[str, tuple[str, Any]] = {
    "right": ("move", 0),
    "up": ("move", 1),
    "left": ("move", 2),
    "down": ("move", 3),
    "stop": ("stop", "stop"),
}
"""Names of VisGym's actions."""
MAX_TURNS = 10
TASK_SHARE, FORMAT_SHARE = 0.8, 0.2
"""Shares of the task and of the format in the reward of tagged answers."""
_EXECUTED = "Action executed."
_LONGEST_ACTION = 2000
"""The most characters of an action. Longer ones are not parsed, because literals may be nested deeply."""

_ACTION = re.compile(r"<action>(.*?)(?:</action>|(?=<action>)|\Z)", re.DOTALL | re.IGNORECASE)
_TAGGED = re.compile(
    r"\s*<observation>.*?</observation>\s*<justification>.*?</justification>\s*<action>[^<]*</action>\s*", re.DOTALL
)
_BARE_NAME = re.compile(r"\(\s*([A-Za-z_]\w*)\s*,")


@dataclass(frozen=True)
class Move:
    """The action of an answer.

    Attributes:
        action: A Python pair in the environment's format; None if the answer has no action.
        is_formatted: Whether the whole answer has the requested format.
    """

    action: str | None
    is_formatted: bool


def read_word(text: str) -> Move:
    """Reads `<action>left</action>` after any reasoning.

    The tag contains exactly one of `WORDS`, in any case, alone or among other words. The last tag counts, and may be
    left open.
    """
    found = _ACTION.findall(text)
    named = {word for word in re.findall(r"[a-z]+", found[-1].lower()) if word in WORDS} if found else set()
    return Move(repr(WORDS[named.pop()]), True) if len(named) == 1 else Move(None, False)


def read_tagged(text: str) -> Move:
    """Reads `<observation>..</observation><justification>..</justification><action>('move', 0)</action>`.

    The pair may be nested, and its name may lack quotes. It is parsed as a literal and never executed. The last action
    counts, even if the other tags are missing.
    """
    found = _ACTION.findall(text)
    pair = _read_pair(found[-1].strip()) if found else None
    return Move(None if pair is None else repr(pair), pair is not None and _TAGGED.fullmatch(text) is not None)


def _read_pair(text: str) -> tuple[str, Any] | None:
    if len(text) > _LONGEST_ACTION:
        return None
    if bare := _BARE_NAME.match(text):
        text = f"({bare[1]!r},{text[bare.end() :]}"
    try:
        pair = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return pair if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) else None


@dataclass(frozen=True)
class _Way:
    """A format of answers: its parser, its description, and the response to an answer without an action."""

    read: Callable[[str], Move]
    asked: str
    missing: str


_WAYS: Mapping[Answering, _Way] = {
    "instruct": _Way(
        read_word,
        f"Think first, then write one of {', '.join(WORDS)} as <action>left</action>.",
        f"There is no action in the answer. End it with one of {', '.join(WORDS)} as <action>left</action>.",
    ),
    "tagged": _Way(
        read_tagged,
        "Answer as <observation>what you see</observation><justification>why</justification>"
        "<action>('move', 0)</action>.",
        "There is no action in the answer. End it with a pair as <action>('move', 0)</action>.",
    ),
}


class VisgymEnvironment:
    """One episode of a ticket.

    The first message has the task and the frame, and later messages have the environment's feedback and the new frame.
    So the model has seen N + 1 pictures by turn N. An answer without an action uses up its turn, and the model gets an
    error message with the same frame. Only the last step has a reward: the environment's, or 0 if the turns ran out.
    For tagged answers it is 0.8 times that reward plus 0.2 times the share of well-formed answers.

    Metrics of each turn: `is_valid`, `is_formatted`; at the end `success` (1 if the task's reward is above 0).

    Args:
        env: An environment with VisGym's methods.
        answering: Format of answers.
        seed: Seed of the reset. The members of a group must share it to play the same game.
        max_turns: The most answers of the model.
        asks: Whether the first message describes the format of answers; otherwise the environment's prompt must.
        least_side: See `Rules`.

    Raises:
        InvalidInput: The environment has no `get_prompt`, or a setting is out of range.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        answering: Answering = "instruct",
        *,
        seed: int | None = None,
        max_turns: int = MAX_TURNS,
        asks: bool = True,
        least_side: int = 0,
    ) -> None:
        if answering not in _WAYS:
            raise InvalidInput(f"answering is {answering!r}; use one of {list(_WAYS)}", field="answering")
        if max_turns < 1:
            raise InvalidInput(f"max_turns is {max_turns}; it must be 1 or more", field="max_turns")
        if not env.has_wrapper_attr("get_prompt"):
            raise InvalidInput(f"{env} has no get_prompt(), which VisGym's environments have", field="env")
        self._env, self._way, self._seed, self._asks = env, _WAYS[answering], seed, asks
        self._max_turns, self._least_side = max_turns, least_side
        self._has_format_reward = answering == "tagged"
        self._answers = self._well_formed = 0

    def reset(self) -> list[Message]:
        """Returns the task and the first frame."""
        self._env.reset(seed=self._seed)
        prompt = str(self._env.get_wrapper_attr("get_prompt")())
        with FIRST_FRAME:
            return [self._look(f"{prompt}\n\n{self._way.asked}" if self._asks else prompt)]

    def step(self, answer: Answer) -> Step:
        """Takes the action of the model's answer."""
        self._answers += 1
        move = self._way.read(answer.text)
        self._well_formed += move.is_formatted
        metrics = {"is_valid": float(move.action is not None), "is_formatted": float(move.is_formatted)}
        task, is_over = 0.0, self._answers == self._max_turns
        if move.action is None:
            message = Message("user", (self._way.missing, self._frame))
        else:
            _, reward, is_terminated, is_truncated, info = self._env.step(move.action)
            if is_terminated or is_truncated:
                task, is_over = float(reward), True
            message = self._look(str(info.get("env_feedback") or _EXECUTED))
        if not is_over:
            return Step([message], 0.0, False, metrics)
        return Step((), self._reward(task), True, {**metrics, "success": float(task > 0)})

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _reward(self, task: float) -> float:
        if not self._has_format_reward:
            return task
        return TASK_SHARE * task + FORMAT_SHARE * self._well_formed / self._answers

    def _look(self, text: str) -> Message:
        self._frame = Picture.of_pixels(enlarged(self._env.render(), self._least_side))
        return Message("user", (text, self._frame))


def visgym_environment(
    record: Mapping[str, Any],
    *,
    answering: Answering = "instruct",
    max_turns: int = MAX_TURNS,
    asks: bool = True,
    least_side: int = 0,
) -> VisgymEnvironment:
    """Makes the environment of a ticket with `env_class` "visgym".

    To change its arguments, register it again: `register("visgym", partial(visgym_environment, answering="tagged"))`.

    Args:
        record: A ticket with `visgym_env_id` (`module:id` imports the module that registers the id), and optionally
            `seed`, `max_turns` and `visgym_kwargs`, the arguments of `gymnasium.make`.
        answering: Format of answers.
        max_turns: The most answers for tickets without `max_turns`.
        asks: Whether the first message describes the format of answers.
        least_side: See `Rules`.

    Raises:
        InvalidInput: A field of the ticket is wrong; the error names it.
    """
    import gymnasium

    name, options, seed = record.get("visgym_env_id"), record.get("visgym_kwargs", {}), record.get("seed")
    turns = record.get("max_turns", max_turns)
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"visgym_env_id is {name!r}; it must be a registered id", field="visgym_env_id")
    if not isinstance(options, Mapping):
        raise InvalidInput(f"visgym_kwargs is {options!r}; it must be an object", field="visgym_kwargs")
    for field, value in (("seed", seed), ("max_turns", turns)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidInput(f"{field} is {value!r}; it must be a whole number", field=field)
    try:
        # VisGym's actions are texts outside the action space, which gymnasium's checker would refuse.
        env = gymnasium.make(name, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise InvalidInput(f"gymnasium cannot make visgym_env_id {name!r}: {error}", field="visgym_env_id") from error
    return VisgymEnvironment(env, answering, seed=seed, max_turns=turns, asks=asks, least_side=least_side)


def with_seeds(tickets: Sequence[Record], seed: int) -> list[Record]:
    """Returns the tickets, with a seed for each that has none, so that the rollouts of a group play the same game."""
    drawn = np.random.default_rng(seed).integers(2**31, size=len(tickets))
    return [
        replace(ticket, extra={"seed": int(own), **ticket.extra}) for ticket, own in zip(tickets, drawn, strict=True)
    ]
