"""Trajectories: the tokens that the model read and wrote in a rollout."""

from __future__ import annotations

import logging
import traceback as tracebacks
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fovea_rollout.environments.environment import Answer
from fovea_rollout.messages import Message, Picture
from fovea_rollout.policies.policy import Chunk, Sampled, Tokens, WeightVersions, joined_versions

logger = logging.getLogger(__name__)

End = Literal["done", "max_turns", "context", "failed"]
"""The end of a rollout: by the environment, after the last turn, before a prompt that did not fit, or by a failure."""


@dataclass(frozen=True)
class Turn:
    """One turn of the model.

    Attributes:
        prompt: The whole input of the model.
        new_messages: The messages that were not in the prompt of the turn before.
        sampled: The sampled tokens.
        answer: The parsed answer.
        reward: Reward of the environment for the answer; 0 if the environment failed.
        metrics: Metrics of the environment.
    """

    prompt: tuple[Chunk, ...]
    new_messages: tuple[Message, ...]
    sampled: Sampled
    answer: Answer
    reward: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """The reason why a rollout failed.

    Attributes:
        stage: `make`, `reset`, `render`, `sample`, `step`, `close` or `deadline`; or after the episode `batch` (making
            datums of it), `score` (by the base model) or `train` (refused by the server).
        error: Type and message of the error.
        traceback: Traceback of the error; empty for a deadline.
    """

    stage: str
    error: str
    traceback: str = ""

    @classmethod
    def of(cls, stage: str, error: BaseException) -> Failure:
        """Describes an error of a stage."""
        return cls(stage, f"{type(error).__name__}: {error}", "".join(tracebacks.format_exception(error)))


@dataclass(frozen=True)
class Segment:
    """A sequence of tokens that grew only by appending. It becomes one datum.

    Attributes:
        chunks: Tokens and pictures, in order.
        sampled: Log-probabilities of each sampled `Tokens` chunk, by its index in `chunks`.
        turns: Index of the turn that sampled each of these chunks, in the same order.
    """

    chunks: tuple[Chunk, ...]
    sampled: Mapping[int, tuple[float, ...]]
    turns: tuple[int, ...]

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures of the segment, in order."""
        return tuple(chunk for chunk in self.chunks if isinstance(chunk, Picture))

    def grown(self, appended: Sequence[Chunk], sampled: Sampled, turn: int) -> Segment:
        """Returns the segment with the chunks that a turn read in addition, and the tokens that it wrote."""
        if not sampled.ids:
            return Segment((*self.chunks, *appended), self.sampled, self.turns)
        chunks = (*self.chunks, *appended, Tokens(sampled.ids))
        return Segment(chunks, {**self.sampled, len(chunks) - 1: sampled.logprobs}, (*self.turns, turn))


@dataclass
class Trajectory:
    """The trajectory of one rollout.

    Attributes:
        conversation: Id of the rollout.
        turns: The turns of the model.
        segments: The tokens of the turns, in sequences that only grew by appending.
        end: How the rollout ended; None while it runs.
        failure: The failure, if there was one. If only closing the environment failed, `end` is unaffected.
        prefix_breaks: Number of turns with a prompt that did not begin with all earlier tokens, although the template
            only appends. It must be 0.
        rewrites: Number of turns before which the template rewrote the history, for instance without its thinking. Each
            began a new segment.
        seconds: Duration of the rollout.
    """

    conversation: str
    turns: list[Turn] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    end: End | None = None
    failure: Failure | None = None
    prefix_breaks: int = 0
    rewrites: int = 0
    seconds: float = 0.0

    @property
    def reward(self) -> float:
        """Sum of the rewards of all turns."""
        return sum(turn.reward for turn in self.turns)

    @property
    def is_scored(self) -> bool:
        """True if the reward counts: the rollout did not fail and has a turn."""
        return self.end != "failed" and bool(self.turns)

    @property
    def versions(self) -> WeightVersions | None:
        """Bounds of the weights that sampled the turns; None without a turn."""
        return joined_versions(turn.sampled.versions for turn in self.turns) if self.turns else None

    def append(self, turn: Turn, is_append_only: bool) -> None:
        """Adds a turn. The last segment grows if the prompt begins with it; otherwise a new segment begins.

        Args:
            turn: The turn.
            is_append_only: Whether the template only appends. Then a new segment counts as a prefix break.
        """
        last = self.segments[-1] if self.segments else None
        added = None if last is None else after_prefix(turn.prompt, last.chunks)
        index = len(self.turns)
        if last is not None and added is not None:
            self.segments[-1] = last.grown(added, turn.sampled, index)
        else:
            self.segments.append(Segment((), {}, ()).grown(turn.prompt, turn.sampled, index))
            if last is not None:
                self.prefix_breaks += is_append_only
                self.rewrites += not is_append_only
        self.turns.append(turn)

    def finish(self, end: End, failure: Failure | None, seconds: float) -> None:
        """Sets how the rollout ended."""
        self.end, self.failure, self.seconds = end, failure, seconds

    def fail(self, failure: Failure) -> None:
        """Marks a rollout as failed, so that it is left out of statistics and of training, and logs it."""
        self.end, self.failure = "failed", failure
        logger.info("rollout %s failed: %s: %s", self.conversation, failure.stage, failure.error)


def reward_mean(trajectories: Sequence[Trajectory]) -> float:
    """Returns the mean reward of the rollouts that did not fail; NaN if there are none."""
    rewards = [one.reward for one in trajectories if one.is_scored]
    return float(np.mean(rewards)) if rewards else float("nan")


def failures_of(trajectories: Sequence[Trajectory]) -> tuple[tuple[str, Failure], ...]:
    """Returns pairs of conversation and failure, including failures to close an environment."""
    return tuple((one.conversation, one.failure) for one in trajectories if one.failure is not None)


def mean_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Averages the environments' metrics over the rollouts that did not fail, with each rollout's last value."""
    found: dict[str, list[float]] = defaultdict(list)
    for trajectory in (one for one in trajectories if one.is_scored):
        last = {name: value for turn in trajectory.turns for name, value in turn.metrics.items()}
        for name, value in last.items():
            found[name].append(value)
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}


def after_prefix(prompt: Sequence[Chunk], prefix: Sequence[Chunk]) -> tuple[Chunk, ...] | None:
    """Returns the rest of a prompt after a prefix; None if the prompt does not begin with the prefix.

    Tokens and pictures are compared; the boundaries of chunks do not matter.
    """
    remaining = deque(chunk for chunk in prompt if isinstance(chunk, Picture) or chunk.ids)
    for chunk in prefix:
        if isinstance(chunk, Picture):
            if not remaining or not _is_same(remaining.popleft(), chunk):
                return None
            continue
        ids = chunk.ids
        while ids:
            head = remaining.popleft() if remaining else None
            if not isinstance(head, Tokens):
                return None
            count = min(len(ids), len(head.ids))
            if head.ids[:count] != ids[:count]:
                return None
            ids = ids[count:]
            if count < len(head.ids):
                remaining.appendleft(Tokens(head.ids[count:]))
    return tuple(remaining)


def _is_same(chunk: Chunk, picture: Picture) -> bool:
    return chunk is picture or (isinstance(chunk, Picture) and chunk.digest == picture.digest)
