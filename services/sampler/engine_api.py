"""A checked sample request, and what the engine says while it runs. The only types that cross into the engine."""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import sampler_pb2
from fovea.wire.rendered_input import ImageSpan

SEED_MASK = 2**63 - 1
FILLER_LOGPROB = -99999.0

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Limits:
    """What one engine takes. All are inclusive."""

    vocabulary_size: int
    max_context: int
    max_sample_count: int
    max_top_logprobs: int
    max_images: int
    max_image_tokens: int


@dataclass(frozen=True)
class TargetRows:
    """Tokens to score: ids int32 [M], of which row i, for prompt position i + 1, begins at offset i of int64 [P]."""

    token_ids: npt.NDArray[np.int32]
    row_offsets: npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampleSpec:
    """One sample request, every part of it checked.

    Attributes:
        request: As it came: what is asked is read from here, but for what follows.
        params: Its `params`, complete: what was absent has its default, and `max_tokens` fits into the context. Only
            `seed` may still be absent.
        tokens: The prompt, int32 [P].
        spans: Its images.
        targets: Tokens to score.
    """

    request: sampler_pb2.SampleRequest
    params: sampler_pb2.SamplingParams
    tokens: npt.NDArray[np.int32]
    spans: tuple[ImageSpan, ...] = ()
    targets: TargetRows | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether anything is asked of the prompt's distributions."""
        request = self.request
        return bool(request.prompt_logprobs or request.top_prompt_logprobs or self.targets or request.alt_token_count)

    def seed_of(self, index: int) -> int | None:
        """What sequence `index` draws with; None if its draws need not be repeatable."""
        return sequence_seed(self.params.seed, index) if self.params.HasField("seed") else None


def sequence_seed(seed: int, index: int) -> int:
    """A hash of the request's seed and of the sequence's index, in the 63 bits that the engine tells apart.

    With seed + index, which vLLM takes for its n > 1, requests of neighbouring seeds share nearly all sequences.
    """
    key = seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") & SEED_MASK


@dataclass(frozen=True)
class TopRows:
    """Alternatives at each of N positions, best first: ids int32 [N, k], logprobs float32 [N, k]."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class AltRows:
    """Draws at each of N positions: ids int32 [N, k], logprobs at temperature 1 float32 [N, k]."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class PromptFacts:
    """What the engine says of a prompt of P tokens; what was not asked for is None.

    Args:
        logprobs: float32 [P], NaN where there is none.
        top: P rows, filler where there is none.
        cached_token_count: Prompt tokens that came from the prefix cache.
        target_logprobs: float32 [M].
        alt: P - 1 rows.
    """

    logprobs: npt.NDArray[np.float32] | None
    top: TopRows | None
    cached_token_count: int
    target_logprobs: npt.NDArray[np.float32] | None = None
    alt: AltRows | None = None


@dataclass(frozen=True)
class Delta:
    """New tokens of sequence `index`: tokens int32 [n], logprobs float32 [n]."""

    index: int
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    top: TopRows | None
    finish: Finish | None


Event = PromptFacts | Delta


@dataclass(frozen=True)
class AdapterName:
    """How the engine knows one adapter version. Never used twice, so that its caches cannot mix versions up."""

    name: str
    lora_id: int
