"""The interface between the sampler service and its engine: validated requests, their results, and the protocols.

`engine.vllm_engine.Engine` implements the protocols with vLLM; tests use an engine in memory.
"""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.wire.rendered_input import ImageSpan
from fovea.wire.tensors import FeatureTensors

SEED_MASK = 2**63 - 1
FILLER_LOGPROB = -99999.0

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Limits:
    """The largest requests that one engine accepts. All limits are inclusive."""

    vocabulary_size: int
    max_context: int
    max_sample_count: int
    max_top_logprobs: int
    max_images: int
    max_image_tokens: int
    expert_row_bytes: int = 0
    """Bytes of the routed expert ids of one token; 0 if the engine cannot return them."""
    experts_problem: str = "this engine cannot return routed experts"
    """The reason for `expert_row_bytes == 0`, as a clause for an error message."""


@dataclass(frozen=True)
class TargetRows:
    """Tokens to score at each position of a prompt of P tokens, as ragged rows.

    Attributes:
        token_ids: The ids of all rows, concatenated, int32 [M].
        row_offsets: int64 [P]. Row i scores tokens at prompt position i + 1 and begins at `row_offsets[i]`.
    """

    token_ids: npt.NDArray[np.int32]
    row_offsets: npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampleSpec:
    """A validated sample request.

    Attributes:
        request: The request as it was received. Read from it every field that has no attribute here.
        params: The request's `params` with defaults filled in and a `max_tokens` that fits into the context. Only
            `seed` may still be absent.
        tokens: The prompt, int32 [P].
        spans: The images of the prompt.
        targets: The tokens to score, if the request lists any.
    """

    request: sampler_pb2.SampleRequest
    params: sampler_pb2.SamplingParams
    tokens: npt.NDArray[np.int32]
    spans: tuple[ImageSpan, ...] = ()
    targets: TargetRows | None = None

    @property
    def scores_prompt(self) -> bool:
        """True if the request asks for log-probabilities, alternatives or draws at the prompt's positions."""
        request = self.request
        return bool(request.prompt_logprobs or request.top_prompt_logprobs or self.targets or request.alt_token_count)

    def seed_of(self, index: int) -> int | None:
        """Returns the seed of sequence `index`, or None if the request has no seed."""
        return sequence_seed(self.params.seed, index) if self.params.HasField("seed") else None


def sequence_seed(seed: int, index: int) -> int:
    """Returns a hash of the request's seed and the sequence's index, cut to the 63 bits that the engine distinguishes.

    vLLM uses seed + index for its own n > 1. Two requests with neighbouring seeds would then share all but one of their
    sequences, so this function hashes instead.
    """
    key = seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") & SEED_MASK


@dataclass(frozen=True)
class TopRows:
    """The k most probable tokens at each of N positions, best first: ids int32 [N, k], logprobs float32 [N, k]."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class AltRows:
    """k tokens drawn at each of N positions: ids int32 [N, k], log-probabilities at temperature 1 float32 [N, k]."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class PromptResult:
    """The engine's results for a prompt of P tokens. A result that the request did not ask for is None.

    Attributes:
        logprobs: Log-probability of each prompt token, float32 [P]; NaN at positions without one.
        top: P rows of alternatives; rows of filler at positions without any.
        cached_token_count: Prompt tokens that the prefix cache already held.
        target_logprobs: Log-probabilities of the M target tokens, float32 [M].
        alt: P - 1 rows of draws.
    """

    logprobs: npt.NDArray[np.float32] | None
    top: TopRows | None
    cached_token_count: int
    target_logprobs: npt.NDArray[np.float32] | None = None
    alt: AltRows | None = None


@dataclass(frozen=True)
class Delta:
    """New tokens of one sequence.

    Attributes:
        index: The sequence's number in its request.
        tokens: The n new tokens, int32 [n].
        logprobs: Their log-probabilities, float32 [n].
        top: Alternatives at each new token, if the request asks for them.
        finish: The reason why the sequence ended, in its last delta; else None.
        routed_experts: The experts of the whole sequence of P prompt and C completion tokens, uint8 or int32
            [P + C - 1, layers, k]. Only in the last delta, and only if the request asks for them.
        support: The support of each new token, packed as by `fovea.wire.tensors.pack_support`; empty if not asked for.
        snapshot_id: The full weights that generated the tokens; None if they are those that the request names.
    """

    index: int
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    top: TopRows | None
    finish: Finish | None
    routed_experts: npt.NDArray[np.generic] | None = None
    support: bytes = b""
    snapshot_id: str | None = None


Event = PromptResult | Delta


def slot_widths(slot_ranks: int) -> list[int]:
    """Returns the ranks for which an adapter may have memory in a slot, in ascending order; each divides the next.

    Args:
        slot_ranks: The ranks of a slot, a multiple of 8: the largest rank of an adapter.
    """
    powers = (8 << shift for shift in range(10))
    return sorted({slot_ranks, *(width for width in powers if slot_ranks % width == 0)})


@dataclass(frozen=True)
class AdapterName:
    """The engine's name and number of one adapter version.

    Neither is reused, so that the engine's caches never mix versions.
    """

    name: str
    lora_id: int


class SampleEngine(Protocol):
    """An engine that draws tokens."""

    def prompt(self, spec: SampleSpec, images: Sequence[FeatureTensors]) -> Any:
        """Returns the prompt in the engine's own form, to be shared by all sequences of the request.

        Args:
            spec: The request.
            images: The vision tensors of each of `spec.spans`, in order.
        """
        ...

    def sample(self, spec: SampleSpec, index: int, prompt: Any, adapter: AdapterName | None) -> AsyncGenerator[Event]:
        """Yields the events of sequence `index`: a PromptResult, then Deltas. Closing it aborts the sequence.

        Only sequence 0 scores the prompt, if the request asks for that. Raises Unavailable if the engine is dead, and
        NotFinite if a log-probability is not finite.
        """
        ...


class OpenAIAnswers(Protocol):
    """A translator of OpenAI's requests into sample requests, and of samples into OpenAI's responses."""

    def answer(
        self, asked: sampler_pb2.OpenAIRequest, sampled: AsyncIterator[sampler_pb2.SampledEvent], most_samples: int
    ) -> AsyncGenerator[sampler_pb2.OpenAIPlan | bytes]:
        """Yields the plan of what to sample for an OpenAI request, then the bytes of the response as samples arrive.

        Args:
            asked: The request of OpenAI's API.
            sampled: The events of the samples that the plan asks for.
            most_samples: The most sequences that one request may ask for.

        Raises InvalidInput or Unimplemented with the field of the request; Unavailable if `sampled` ends too early.
        """
        ...


class WeightEngine(Protocol):
    """An engine that receives weights.

    All methods raise Unavailable if the engine is dead and DeadlineExceeded if it does not answer in time.
    """

    async def join_group(self, request: sampler_pb2.JoinTransferGroupRequest) -> None:
        """Joins a transfer group, after leaving an earlier group of the same name.

        Raises Unavailable if the members do not all join in time.
        """
        ...

    async def leave_group(self, group_id: str) -> None:
        """Leaves a transfer group; a broadcast that is running in it fails."""
        ...

    async def check(self, manifest: weights_pb2.SnapshotManifest) -> None:
        """Raises InvalidInput for a manifest that does not fit the model."""
        ...

    async def start_receive(
        self, group_id: str, manifest: weights_pb2.SnapshotManifest, timeout_s: float
    ) -> tuple[str, sampler_pb2.SnapshotReady]:
        """Starts to receive the broadcasts of a snapshot.

        Returns the id of the receiving task, and the division of the tensors over the workers.

        Raises InvalidInput for a manifest that does not fit the model, before anything is received.
        """
        ...

    async def wait_received(self, task_id: str, timeout_s: float) -> str:
        """Waits for the tensors of a task; returns their digest. Raises Unavailable if the sender is gone or late."""
        ...

    async def forget_task(self, task_id: str) -> None:
        """Frees the tensors that a task received and that were not loaded."""
        ...

    async def store_adapter(self, task_id: str, adapter: AdapterName, digest: str, timeout_s: float) -> str:
        """Waits for the tensors of an adapter, and makes it ready to sample from if their digest is `digest`.

        Returns their digest. Raises Unavailable if the sender is gone or late.
        """
        ...

    async def forget_adapter(self, adapter: AdapterName) -> None:
        """Frees an adapter that no request uses."""
        ...

    async def load_full(self, task_id: str, version: str) -> float:
        """Loads received full weights into the model; returns the duration of the pause in generation, in seconds.

        Sequences that are being drawn from full weights pause, and continue with the new ones.
        """
        ...
