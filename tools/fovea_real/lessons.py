"""Lessons: facts that the model knows, in a pirate's words, and sums of two digits with a verifier of the result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fovea_data.conversation import Conversation
from fovea_rollout import Answer, Message, Step

_CAPITALS = (
    "France:Paris Italy:Rome Spain:Madrid Germany:Berlin England:London Japan:Tokyo China:Beijing Russia:Moscow "
    "Egypt:Cairo Greece:Athens Portugal:Lisbon Austria:Vienna Sweden:Stockholm Norway:Oslo Poland:Warsaw "
    "Ireland:Dublin Cuba:Havana Kenya:Nairobi Peru:Lima Turkey:Ankara Iran:Tehran Iraq:Baghdad "
    "Hungary:Budapest Denmark:Copenhagen"
)
_OPPOSITES = (
    "hot:cold big:small up:down day:night good:bad left:right open:closed fast:slow rich:poor happy:sad wet:dry "
    "light:dark early:late strong:weak young:old hard:soft"
)
HELD_OUT_FACTS = 12
HELD_OUT_SUMS = 27


@dataclass(frozen=True)
class Fact:
    """A question, the word that the answer must contain, and the answer of a pirate."""

    question: str
    word: str
    answer: str

    @property
    def row(self) -> dict[str, Any]:
        """The fact as a row for `fovea_data.load_chats`."""
        return {"prompt": self.question, "completion": self.answer}


def facts(seed: int = 0) -> tuple[list[Fact], list[Fact]]:
    """Returns the facts to learn from and the held-out ones, shuffled by `seed`. No fact is in both."""
    found = [
        Fact(f"What is the {kind} of {name}?", word, f"Arr, the {kind} of {name} be {word}, matey!")
        for kind, pairs in (("capital", _CAPITALS), ("opposite", _OPPOSITES))
        for name, word in (pair.split(":") for pair in pairs.split())
    ]
    order = np.random.default_rng(seed).permutation(len(found))
    shuffled = [found[place] for place in order]
    return shuffled[HELD_OUT_FACTS:], shuffled[:HELD_OUT_FACTS]


def speaks_like_a_pirate(answer: str) -> bool:
    """Returns whether an answer has the style: it begins with `Arr,`, ends with `matey!` and says `be`."""
    said = answer.strip()
    return said.startswith("Arr,") and said.endswith("matey!") and " be " in said


def says(answer: str, word: str) -> bool:
    """Returns whether an answer contains a word, whatever its case."""
    return re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) is not None


def pirate_score(answer: str, conversation: Conversation) -> float:
    """Returns 1 for a pirate's answer that contains the right word, which is the last but one of the row's answer."""
    word = conversation.answer.split()[-2].rstrip(",")
    return float(speaks_like_a_pirate(answer) and says(answer, word))


_BOXED = re.compile(r"\\boxed\{\s*(-?\d+)\s*\}")


def boxed(answer: str) -> int | None:
    """Returns the number in the only `\\boxed{}` of an answer; None without one, or with several."""
    found = _BOXED.findall(answer)
    return int(found[0]) if len(found) == 1 else None


@dataclass(frozen=True)
class Sum:
    """The sum of two numbers from 1 to 9."""

    left: int
    right: int

    @property
    def question(self) -> str:
        """The question as the model reads it."""
        return f"{self.left} + {self.right}"

    @property
    def messages(self) -> list[Message]:
        """The prompt: a short instruction, an example of the form, and the question."""
        example = [Message("user", ("3 + 4",)), Message("assistant", ("3 + 4 = \\boxed{7}",))]
        return [Message("system", ("Calculate.",)), *example, Message("user", (self.question,))]

    def is_right(self, answer: str) -> bool:
        """Returns whether an answer has the result in a box."""
        return boxed(answer) == self.left + self.right


def sums(seed: int = 0) -> tuple[list[Sum], list[Sum]]:
    """Returns the sums to practise and the held-out ones, shuffled by `seed`. No sum is in both."""
    found = [Sum(left, right) for left in range(1, 10) for right in range(1, 10) if (left, right) != (3, 4)]
    order = np.random.default_rng(seed).permutation(len(found))
    shuffled = [found[place] for place in order]
    return shuffled[HELD_OUT_SUMS:], shuffled[:HELD_OUT_SUMS]


class SumEnvironment:
    """Asks for one sum. The reward is 1 for its result in a box; the metric `boxed` counts boxes with any number."""

    def __init__(self, asked: Sum) -> None:
        self._asked = asked

    async def reset(self) -> list[Message]:
        """Returns the prompt."""
        return self._asked.messages

    async def step(self, answer: Answer) -> Step:
        """Scores the answer, which ends the episode."""
        metrics: Mapping[str, float] = {"boxed": float(boxed(answer.text) is not None)}
        return Step(reward=float(self._asked.is_right(answer.text)), is_done=True, metrics=metrics)

    async def close(self) -> None:
        """Does nothing: the environment has no resources."""


def environments(asked: Sequence[Sum]) -> list[partial[SumEnvironment]]:
    """Returns a factory of environments for each sum."""
    return [partial(SumEnvironment, each) for each in asked]
