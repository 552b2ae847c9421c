"""Geometry-3K: problems with pictures, and a tool that scores an answer before it is given.

A row is a record with `env_class` "geometry3k" and the answer:

    {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,..."}},
                                             {"type": "text", "text": "<image>Find x."}]}],
     "env_class": "geometry3k", "reward_spec": {"method": "rule", "ground_truth": "3 \\\\sqrt { 2 }"},
     "extra_info": {"split": "train", "index": 0, "problem": "<image>Find x.", "answer": "3 \\\\sqrt { 2 }"}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.environment import Answer, Step, ToolCall
from fovea_rollout.environments.math_grading import is_same_answer
from fovea_rollout.messages import Message

MAX_TURNS = 3
TOOL = "calc_score"
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Scores an answer: 1 if it is right, 0 if it is wrong.",
            "parameters": {
                "type": "object",
                "properties": {"answer": {"type": "string", "description": "The answer."}},
                "required": ["answer"],
            },
        },
    },
)
"""Description of the tool, for `ChatTemplate(tokenizer, TOOLS)`."""
INSTRUCTION = (
    "Think within <think></think>. You may score an answer before you give it, as "
    '<tool_call>{"name": "calc_score", "arguments": {"answer": "..."}}</tool_call>. '
    "Give the final answer within \\boxed{}."
)
_BOXED = "\\boxed{"
_WRONG = "The score is 0.0: that is not the answer. Look at the picture and think again."
_LAST = "This is the last turn: give only the final answer within \\boxed{}."


class Geometry3kEnvironment:
    """One problem with at most three turns.

    A call of `calc_score` with the right answer ends the episode. After a call with a wrong answer, the model reads
    the score and tries again. An answer without a call is final: the content of `\\boxed{}`, or else its last line. The
    reward is 1 or 0, at the end. Answers are compared as mathematics (see `is_same_answer`).

    Metrics of each turn: `right` (1 if the answer was right), `is_called` (1 if it was a call).

    Args:
        prompt: The messages that the model reads first.
        truth: The right answer.
        max_turns: The most answers of the model.
        asks: Whether to add an explanation of the tool and the box to the prompt.
    """

    def __init__(
        self, prompt: Sequence[Message], truth: str, max_turns: int = MAX_TURNS, *, asks: bool = False
    ) -> None:
        if max_turns < 1:
            raise InvalidInput(f"max_turns is {max_turns}; it must be 1 or more", field="max_turns")
        self._prompt, self._truth, self._max_turns = tuple(prompt), truth, max_turns
        if asks:
            self._prompt = (*self._prompt[:-1], _with(self._prompt[-1], f"\n\n{INSTRUCTION}"))
        self._turns = 0

    def reset(self) -> Sequence[Message]:
        """Returns the problem."""
        return self._prompt

    def step(self, answer: Answer) -> Step:
        """Scores the answer of the model's call, or its final answer."""
        self._turns += 1
        called = _called(answer.tool_calls)
        is_call = bool(answer.tool_calls or answer.malformed)
        given = called if is_call else final_answer(answer.text)
        is_right = given is not None and is_same_answer(self._truth, given)
        metrics = {"right": float(is_right), "is_called": float(is_call)}
        if is_right or not is_call or self._turns == self._max_turns:
            return Step((), float(is_right), True, metrics)
        flaw = answer.malformed or f'call {TOOL} with an "answer"'
        feedback = _WRONG if called is not None else f"No answer was scored: {flaw}."
        if self._turns == self._max_turns - 1:
            feedback = f"{feedback} {_LAST}"
        # Qwen's templates write the role `tool` like this; other templates do not have that role.
        heard = Message("user", (f"<tool_response>\n{feedback}\n</tool_response>",), has_markup=True)
        return Step([heard], 0.0, False, metrics)

    def close(self) -> None:
        """Does nothing: the environment has no resources."""


def final_answer(text: str) -> str:
    """Returns the content of the last `\\boxed{}`, with nested braces, or else the last line that is not empty."""
    start = text.rfind(_BOXED)
    if start >= 0:
        depth, begin = 1, start + len(_BOXED)
        for place in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[begin:place].strip()
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def geometry3k_environment(
    record: Mapping[str, Any], *, max_turns: int = MAX_TURNS, asks: bool = False
) -> Geometry3kEnvironment:
    """Makes the environment of a row with `env_class` "geometry3k". Raises InvalidInput if the row has no answer."""
    truth = record.get("reward_spec", {}).get("ground_truth")
    if not isinstance(truth, str | int | float):
        raise InvalidInput(
            f"reward_spec.ground_truth is {truth!r}; it must be the answer, as text or number",
            field="reward_spec.ground_truth",
        )
    return Geometry3kEnvironment(record["prompt"], str(truth), record.get("max_turns", max_turns), asks=asks)


def _called(calls: Sequence[ToolCall]) -> str | None:
    """Returns the answer of the last call; None if there is none."""
    scored = [call.arguments["answer"] for call in calls if call.name == TOOL and "answer" in call.arguments]
    return str(scored[-1]) if scored else None


def _with(message: Message, text: str) -> Message:
    return replace(message, parts=(*message.parts, text), has_markup=True)
