"""VisGym's tickets: any `gymnasium.Env` of its shape, a new picture after every answer, a reward at the end.

A ticket is a record with `env_class` "visgym" and, of the environment, its registered id and more:

    {"prompt": [{"role": "user", "content": "placeholder"}], "env_class": "visgym", "visgym_env_id": "maze_2d/easy",
     "seed": 7, "max_turns": 10, "visgym_kwargs": {}}

The environment needs `get_prompt()` for the task in words, `render()` for uint8 [height, width, 3] and `step(action)`
for an action written as a Python pair, such as "('move', 0)"; what it says of an action is `info["env_feedback"]`.
Source: VisGym (https://github.com/visgym/VisGym). It takes gymnasium's place, so that nothing here imports it: whoever
has it, or registers environments of the same shape, can play.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fovea.wire.errors import InvalidInput
from fovea_rollout.environment import Answer, Step
from fovea_rollout.gymnasium_environment import FIRST_FRAME, enlarged
from fovea_rollout.messages import Message, Picture
from fovea_rollout.records import Record

if TYPE_CHECKING:
    import gymnasium

Answering = Literal["instruct", "tagged"]
"""How the model says what it does: `instruct` reasons freely and names a direction, `tagged` writes a Python pair."""

WORDS: Mapping[str, tuple[str, Any]] = {
    "right": ("move", 0),
    "up": ("move", 1),
    "left": ("move", 2),
    "down": ("move", 3),
    "stop": ("stop", "stop"),
}
"""VisGym's actions that have a name."""
MAX_TURNS = 10
TASK_SHARE, FORMAT_SHARE = 0.8, 0.2
"""Of the reward, for tagged answers."""
_EXECUTED = "Action executed."
_LONGEST_ACTION = 2000
"""Characters: longer ones are not read, since a literal may be nested without end."""

_ACTION = re.compile(r"<action>(.*?)(?:</action>|(?=<action>)|\Z)", re.DOTALL | re.IGNORECASE)
_TAGGED = re.compile(
    r"\s*<observation>.*?</observation>\s*<justification>.*?</justification>\s*<action>[^<]*</action>\s*", re.DOTALL
)
_BARE_NAME = re.compile(r"\(\s*([A-Za-z_]\w*)\s*,")


@dataclass(frozen=True)
class Move:
    """What an answer does.

    Attributes:
        action: A Python pair, as the environment reads it; None if the answer has none.
        is_formatted: Whether the answer is written as was asked, reasoning included.
    """

    action: str | None
    is_formatted: bool


def read_word(text: str) -> Move:
    """`<action>left</action>` after any reasoning: one of `WORDS`, whatever its case, alone or among other words.

    The last tag counts, and may be left open.
    """
    found = _ACTION.findall(text)
    named = {word for word in re.findall(r"[a-z]+", found[-1].lower()) if word in WORDS} if found else set()
    return Move(repr(WORDS[named.pop()]), True) if len(named) == 1 else Move(None, False)


def read_tagged(text: str) -> Move:
    """`<observation>..</observation><justification>..</justification><action>('move', 0)</action>`.

    The pair may nest, and its name may lack quotes; it is read as a literal and never executed. The last action counts,
    also where the other tags are missing.
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
    """One of the ways of acting: how answers are read, what is asked, and what is said of one without an action."""

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

    The first message has the task and the frame, the later ones the environment's feedback and the new frame: by turn
    N the model has seen N + 1 pictures. An answer without an action costs its turn, and brings an error message with
    the same frame. Only the step that ends the episode is rewarded: with the environment's reward; for tagged answers
    with 0.8 of it and 0.2 of the share of answers that were well formed.

    Metrics of each turn: `is_valid`, `is_formatted`; at the end `success` (1 if the task's reward is above 0).

    Args:
        env: Of VisGym's shape.
        seed: Of its reset; the members of a group share one, or each plays another game.
        max_turns: The most answers.
        asks: Whether the first message says how to answer; else the environment's own prompt does.
        least_side: See `Rules`.

    Raises:
        InvalidInput: It has no `get_prompt`, or a setting is out of range.
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
            raise InvalidInput(f"{env} has no get_prompt(): an environment of VisGym's shape has one", field="env")
        self._env, self._way, self._seed, self._asks = env, _WAYS[answering], seed, asks
        self._max_turns, self._least_side = max_turns, least_side
        self._has_format_reward = answering == "tagged"
        self._answers = self._well_formed = 0

    def reset(self) -> list[Message]:
        """The task and the first frame."""
        self._env.reset(seed=self._seed)
        prompt = str(self._env.get_wrapper_attr("get_prompt")())
        with FIRST_FRAME:
            return [self._look(f"{prompt}\n\n{self._way.asked}" if self._asks else prompt)]

    def step(self, answer: Answer) -> Step:
        """Does what the model said."""
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
    """Makes a ticket's environment; `env_class` "visgym" is this. To play in another way, register it anew:
    `register("visgym", partial(visgym_environment, answering="tagged"))`.

    Args:
        record: With `visgym_env_id` (`module:id` imports the module that registers it), and optionally `seed`,
            `max_turns` and `visgym_kwargs`, which go to `gymnasium.make`.
        max_turns: Where the ticket has none.

    Raises:
        InvalidInput: Naming the field of the ticket.
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
        # Its actions are texts that no action space knows: gymnasium's checker would refuse them.
        env = gymnasium.make(name, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise InvalidInput(f"visgym_env_id {name!r} cannot be made: {error}", field="visgym_env_id") from error
    return VisgymEnvironment(env, answering, seed=seed, max_turns=turns, asks=asks, least_side=least_side)


def with_seeds(tickets: Sequence[Record], seed: int) -> list[Record]:
    """The same tickets, those without a seed given one each, so that the rollouts of a group play one game."""
    drawn = np.random.default_rng(seed).integers(2**31, size=len(tickets))
    return [
        replace(ticket, extra={"seed": int(own), **ticket.extra}) for ticket, own in zip(tickets, drawn, strict=True)
    ]
