"""A checked sample request, and what the engine says while it runs. The only types that cross into the engine."""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

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
class Draw:
    """How to draw tokens. `max_tokens` is resolved: prompt and new tokens fit into the context."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False

    def seed_of(self, index: int) -> int | None:
        """What sequence `index` draws with: a hash of both, in the 63 bits that the engine tells apart.

        With seed + index, which vLLM takes for its n > 1, requests of neighbouring seeds share nearly all sequences.
        """
        if self.seed is None:
            return None
        key = self.seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") & SEED_MASK


@dataclass(frozen=True)
class TargetRows:
    """Tokens to score: ids int32 [M], of which row i, for prompt position i + 1, begins at offset i of int64 [P]."""

    token_ids: npt.NDArray[np.int32]
    row_offsets: npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampleSpec:
    """One sample request, every part of it checked. `prompt_logprobs_last_n` is 0 for all.

    With `at_once` each sequence comes as one Delta if it is small. Only requests of the same `cache_salt` share what
    the engine caches of their prompts.
    """

    request_id: str
    snapshot_id: str
    tokens: npt.NDArray[np.int32]
    spans: tuple[ImageSpan, ...]
    sample_count: int
    draw: Draw
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0
    top_sample_logprobs: int = 0
    targets: TargetRows | None = None
    alt_token_count: int = 0
    prompt_logprobs_last_n: int = 0
    at_once: bool = False
    cache_salt: str = ""

    @property
    def scores_prompt(self) -> bool:
        """Whether anything is asked of the prompt's distributions."""
        return bool(self.prompt_logprobs or self.top_prompt_logprobs or self.targets or self.alt_token_count)


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
