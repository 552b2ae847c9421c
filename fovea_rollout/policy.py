"""What samples: the model under training behind any server that speaks the Tinker API, or behind Fovea's gRPC front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from fovea_rollout.messages import Picture


@dataclass(frozen=True)
class Tokens:
    """A run of token ids."""

    ids: tuple[int, ...]


Chunk = Tokens | Picture
"""What a prompt is a list of. Neighbouring `Tokens` mean the same as one."""


@dataclass(frozen=True)
class SamplingSettings:
    """How a turn is sampled.

    Attributes:
        max_tokens: The most tokens of one turn.
        temperature: 0 is greedy. Log-probabilities are those of the distribution that was drawn from.
        stop: Texts that end a turn, besides the template's own end of turn. Kept in the turn when they end it.
        seed: What every turn of every rollout derives its own seed from; None draws without one.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class WeightVersions:
    """Which weights sampled, as training steps: `oldest` and `newest` are equal if the server tells or nothing moved.

    A sample names exactly one snapshot, but the Tinker API does not tell which one an in-flight update gave it; then
    the versions current at submission and at return are the bounds.
    """

    oldest: int
    newest: int


@dataclass(frozen=True)
class Sampled:
    """What one call sampled.

    Attributes:
        ids: The tokens, a closing one (end of turn, or the one that completes a stop text) included.
        logprobs: One per token, in nats.
        stop_reason: `length` if max_tokens ended it.
        experts: Those that computed each token of prompt and `ids` but the last, [P + C - 1, layers, k], for training
            to follow (router replay); None if nobody asked for them.
        sequence_id: What the server calls it; empty if it does not say.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"]
    versions: WeightVersions
    experts: npt.NDArray[np.integer] | None = field(default=None, compare=False, repr=False)
    sequence_id: str = field(default="", compare=False, repr=False)


class Policy(Protocol):
    """Samples, and knows how many tokens a picture takes."""

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """Samples one turn.

        Args:
            prompt: All that the model reads.
            stop_ids: Tokens that end the turn.
            conversation: Same for all turns of one rollout, so that a server can keep them on one sampler.
        """

    async def token_count(self, picture: Picture) -> int:
        """Placeholder tokens that a picture takes in this model's prompts."""
