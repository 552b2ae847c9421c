"""What the service and an engine say to each other: checked requests, what becomes of them, and the calls.

`engine.vllm_engine.Engine` is the engine over vLLM; tests have one in memory.
"""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.wire.features import FeatureTensors
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
    expert_row_bytes: int = 0
    """What the experts of one token take; 0 if they cannot be told."""
    experts_problem: str = "the engine does not tell them"
    """Why they cannot."""


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
class PromptResult:
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
    """New tokens of sequence `index`: tokens int32 [n], logprobs float32 [n].

    `routed_experts`, uint8 or int32 [P + C - 1, layers, k], are the whole sequence's; with its end, if asked for.
    """

    index: int
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    top: TopRows | None
    finish: Finish | None
    routed_experts: npt.NDArray[np.generic] | None = None


Event = PromptResult | Delta


@dataclass(frozen=True)
class AdapterName:
    """How the engine knows one adapter version. Never used twice, so that its caches cannot mix versions up."""

    name: str
    lora_id: int


class SampleEngine(Protocol):
    def prompt(self, spec: SampleSpec, images: Sequence[FeatureTensors]) -> Any:
        """The prompt in the engine's own form, for all sequences of the request; `images` are those of each span."""
        ...

    def sample(self, spec: SampleSpec, index: int, prompt: Any, adapter: AdapterName | None) -> AsyncGenerator[Event]:
        """Events of sequence `index`: PromptResult first, then Deltas. Closing it aborts the request.

        Only sequence 0 scores the prompt, if the request asks for that. Raises Unavailable if the engine is dead,
        NotFinite for log-probabilities that are not.
        """
        ...


class OpenAIAnswers(Protocol):
    def answer(
        self, asked: sampler_pb2.OpenAIRequest, sampled: AsyncIterator[sampler_pb2.SampledEvent], most_samples: int
    ) -> AsyncGenerator[sampler_pb2.OpenAIPlan | bytes]:
        """What to sample for a request of OpenAI's API, then the bytes of its answer, as `sampled` comes.

        Raises InvalidInput, Unimplemented naming the field; Unavailable if `sampled` ends too early.
        """
        ...


class WeightEngine(Protocol):
    """Takes weights. All methods raise Unavailable if the engine is dead and DeadlineExceeded if it does not answer."""

    async def join_group(self, request: sampler_pb2.JoinTransferGroupRequest) -> None:
        """Joins a group, leaving one of the same name. Raises Unavailable if the members do not meet in time."""
        ...

    async def leave_group(self, group_id: str) -> None:
        """Leaves a transfer group; a broadcast under way fails."""
        ...

    async def check(self, manifest: weights_pb2.SnapshotManifest) -> None:
        """Raises InvalidInput for a manifest that does not fit the model."""
        ...

    async def start_receive(self, group_id: str, manifest: weights_pb2.SnapshotManifest, timeout_s: float) -> str:
        """Begins to take part in the broadcasts of a snapshot; returns the name of the task.

        Raises InvalidInput for a manifest that does not fit the model, before anything begins.
        """
        ...

    async def wait_received(self, task_id: str, timeout_s: float) -> str:
        """Waits for the tensors; returns their digest. Raises Unavailable if the sender is gone or late."""
        ...

    async def forget_task(self, task_id: str) -> None:
        """Frees what a task received and was not loaded."""
        ...

    async def keep_adapter(self, task_id: str, adapter: AdapterName, digest: str, timeout_s: float) -> str:
        """Waits for the tensors of an adapter and makes it ready to sample from if they have this digest.

        Returns their digest. Raises Unavailable if the sender is gone or late.
        """
        ...

    async def forget_adapter(self, adapter: AdapterName) -> None:
        """Frees an adapter that no request uses."""
        ...

    async def load_full(self, task_id: str, version: str) -> float:
        """Puts full weights that have arrived into the model; returns the seconds of standstill."""
        ...
