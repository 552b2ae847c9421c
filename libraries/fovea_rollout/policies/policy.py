"""The interface of policies, which sample from a model behind a Tinker server or behind Fovea's gRPC front."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from fovea.wire.errors import InvalidInput, similar
from fovea_rollout.messages import Picture


@dataclass(frozen=True)
class Tokens:
    """A sequence of token ids."""

    ids: tuple[int, ...]


Chunk = Tokens | Picture
"""A part of a prompt. Adjacent `Tokens` are equivalent to one."""


class Settings:
    """Base of the dataclasses of settings. A wrong field raises InvalidInput with the nearest name."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        known = [one.name for one in fields(cls)]  # type: ignore[arg-type]  # every subclass is a dataclass
        for name in given.keys() - set(known):
            hint = similar(name, known) or f"; it has {', '.join(known)}"
            raise InvalidInput(f"{cls.__name__} has no field {name!r}{hint}", field=name)
        return super().__new__(cls)


@dataclass(frozen=True)
class SamplingSettings(Settings):
    """Settings of sampling a turn.

    Attributes:
        max_tokens: The most tokens of one turn.
        temperature: Sampling temperature; 0 is greedy. Log-probabilities are those of the tempered distribution.
        top_p: Samples from the likeliest tokens that have this probability together; 1 from all tokens.
        top_k: Samples from this many of the likeliest tokens; -1 from all tokens.
        stop: Texts that end a turn, in addition to the template's end of turn. The turn contains the text that ends it.
        seed: Base of the seeds: each turn of each rollout derives its own seed from it. None samples without seeds.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class WeightVersions:
    """Bounds of the weights that sampled, as numbers of training steps.

    `oldest` and `newest` are equal if the weights did not change, or if the server reports the snapshot. The Tinker API
    does not report which snapshot an in-flight update gave a sample. The bounds then are the versions at submission and
    at return.
    """

    oldest: int
    newest: int


@dataclass(frozen=True)
class Portion:
    """The tokens of a turn that one request sampled.

    Attributes:
        count: Number of tokens.
        versions: Bounds of the weights that sampled them.
        sequence_id: The server's id of the request's sequence; empty if the server does not report it.
    """

    count: int
    versions: WeightVersions
    sequence_id: str = ""


@dataclass(frozen=True)
class Sampled:
    """The result of sampling one turn.

    Attributes:
        ids: The tokens, including the last one, which ends the turn or completes a stop text.
        logprobs: Log-probability of each token, in nats.
        stop_reason: `length` if `max_tokens` ended the turn.
        versions: Bounds of the weights that sampled.
        experts: The experts that computed each token of prompt and `ids` except the last, [P + C - 1, layers, k], for
            training to follow (router replay); None if they were not requested.
        sequence_id: The server's id of the sequence; empty if the server does not report it, or if several requests
            sampled the turn.
        resumed: The portions of the turn, in order, if several requests sampled it. Each read those before it.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"]
    versions: WeightVersions
    experts: npt.NDArray[np.integer] | None = field(default=None, compare=False, repr=False)
    sequence_id: str = field(default="", compare=False, repr=False)
    resumed: tuple[Portion, ...] = field(default=(), compare=False, repr=False)

    @property
    def portions(self) -> tuple[Portion, ...]:
        """The portions of the turn, in order: one, unless it was resumed."""
        return self.resumed or (Portion(len(self.ids), self.versions, self.sequence_id),)


def joined_versions(versions: Iterable[WeightVersions]) -> WeightVersions:
    """Returns the bounds of all these weights."""
    each = list(versions)
    return WeightVersions(min(one.oldest for one in each), max(one.newest for one in each))


def derived_seed(seed: int, *parts: str | int) -> int:
    """Returns a seed that depends on a base seed and on parts, which identify a request. It has 31 bits, which every
    server accepts.
    """
    digest = hashlib.sha256("/".join(map(str, (seed, *parts))).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


class Policy(Protocol):
    """A model, behind any interface, that samples turns and counts the tokens of pictures."""

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """Samples one turn.

        Args:
            prompt: The whole input of the model.
            settings: Settings of sampling.
            stop_ids: Tokens that end the turn.
            conversation: Id of the rollout, so that a server can send all of its turns to one sampler.
        """

    async def token_count(self, picture: Picture) -> int:
        """Returns the number of placeholder tokens of a picture in this model's prompts."""
