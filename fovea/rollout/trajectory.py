"""What happened in a rollout, as the tokens that the model read and wrote. (Interface; helper R2 completes it.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fovea.rollout.environment import Answer
from fovea.rollout.messages import Message, Picture
from fovea.rollout.policy import Chunk, Sampled, WeightVersions


@dataclass(frozen=True)
class Turn:
    """One turn of the model.

    Attributes:
        prompt: All that it read.
        new_messages: Those that were not in the prompt of the turn before.
        sampled: What it wrote.
        answer: The same, read.
        reward: What the environment gave for it.
        metrics: As the environment named them.
    """

    prompt: tuple[Chunk, ...]
    new_messages: tuple[Message, ...]
    sampled: Sampled
    answer: Answer
    reward: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """Why a rollout ended before its time.

    Attributes:
        stage: `make`, `reset`, `render`, `sample`, `step`, `close` or `deadline`.
        error: Type and message of what was raised.
        traceback: Of it.
    """

    stage: str
    error: str
    traceback: str = ""


@dataclass(frozen=True)
class Segment:
    """A run of tokens that grew by appending only: becomes one datum.

    Attributes:
        chunks: Tokens and pictures, in order.
        sampled: For each `Tokens` chunk that was sampled, by its place in `chunks`: its log-probabilities.
        turns: Indices of the turns whose tokens it ends with loss on.
    """

    chunks: tuple[Chunk, ...]
    sampled: Mapping[int, tuple[float, ...]]
    turns: tuple[int, ...]

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return tuple(chunk for chunk in self.chunks if isinstance(chunk, Picture))


@dataclass
class Trajectory:
    """One rollout.

    Attributes:
        conversation: Its id.
        end: `done`, `max_turns`, `context` (the next prompt would not fit), or `failed`.
        prefix_breaks: Turns whose prompt did not begin with all that came before though the template only appends: 0.
        rewrites: Turns before which the template rewrote the history (stripped thinking): each began a segment.
    """

    conversation: str
    turns: list[Turn] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    end: str = ""
    failure: Failure | None = None
    prefix_breaks: int = 0
    rewrites: int = 0
    seconds: float = 0.0

    @property
    def reward(self) -> float:
        """Sum over its turns."""
        return sum(turn.reward for turn in self.turns)

    @property
    def versions(self) -> WeightVersions | None:
        """Of all weights that sampled it."""
        found = [turn.sampled.versions for turn in self.turns]
        if not found:
            return None
        return WeightVersions(min(one.oldest for one in found), max(one.newest for one in found))
