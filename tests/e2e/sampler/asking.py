"""Sample requests and their responses, in numpy."""

import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import model_input_pb2, sampler_pb2
from fovea.client.inference import SamplerClient
from fovea.wire import tensors

Part = Sequence[int] | model_input_pb2.VisionFeature


def rendered(parts: Sequence[Part], image_token_id: int = 0) -> model_input_pb2.RenderedInput:
    """Returns a rendered input: token runs and images, spliced in order."""
    ids: list[int] = []
    result = model_input_pb2.RenderedInput()
    for part in parts:
        if isinstance(part, model_input_pb2.VisionFeature):
            result.spans.add(offset=len(ids), length=part.token_count, feature=part)
            ids += [image_token_id] * part.token_count
        else:
            ids += part
    result.tokens = tensors.encode_tokens(ids)
    return result


def request_for(
    prompt: model_input_pb2.RenderedInput,
    snapshot_id: str = "",
    sample_count: int = 1,
    prompt_logprobs: bool = False,
    top_prompt_logprobs: int = 0,
    top_sample_logprobs: int = 0,
    stop: sampler_pb2.StopCondition | None = None,
    target_rows: Sequence[Sequence[int]] | None = None,
    alt_token_count: int = 0,
    prompt_logprobs_last_n: int = 0,
    at_once: bool = False,
    cache_salt: str = "",
    **params: float,
) -> sampler_pb2.SampleRequest:
    """Returns a request. `params` are the fields of SamplingParams; `target_rows` has ids for each prompt token except
    the first.
    """
    return sampler_pb2.SampleRequest(
        request_id=uuid.uuid4().hex,
        snapshot_id=snapshot_id,
        prompt=prompt,
        sample_count=sample_count,
        params=sampler_pb2.SamplingParams(stop=stop, **params),
        prompt_logprobs=prompt_logprobs,
        top_prompt_logprobs=top_prompt_logprobs,
        top_sample_logprobs=top_sample_logprobs,
        target_tokens=None if target_rows is None else target_tokens(target_rows),
        alt_token_count=alt_token_count,
        prompt_logprobs_last_n=prompt_logprobs_last_n,
        at_once=at_once,
        cache_salt=cache_salt,
    )


def target_tokens(rows: Sequence[Sequence[int]]) -> sampler_pb2.TargetTokens:
    """Encodes ragged rows of ids as a message."""
    ids = np.concatenate([np.asarray(row, dtype=np.int32) for row in rows])
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return sampler_pb2.TargetTokens(token_ids=tensors.encode(ids), row_offsets=tensors.encode(offsets))


@dataclass
class Drawn:
    """One sampled sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    finish: int = 0
    delta_count: int = 0
    snapshot_ids: set[str] = field(default_factory=set)


@dataclass
class Answer:
    """The contents of a whole stream."""

    sequences: list[Drawn]
    prompt_logprobs: npt.NDArray[np.float32] | None = None
    prompt_top: sampler_pb2.TopLogprobs | None = None
    cached_token_count: int = 0
    target_logprobs: npt.NDArray[np.float32] | None = None
    alt_ids: npt.NDArray[np.int32] | None = None
    alt_logprobs: npt.NDArray[np.float32] | None = None


async def ask(client: SamplerClient, request: sampler_pb2.SampleRequest) -> Answer:
    """Runs a request to its end and checks the order of events."""
    answer = Answer([Drawn() for _ in range(request.sample_count)])
    prompt_count = 0
    async with aclosing(client.sample(request, timeout_s=120)) as events:
        async for event in events:
            if event.WhichOneof("event") == "prompt":
                prompt_count += 1
                answer.prompt_logprobs = tensors.decode_floats(event.prompt.logprobs)
                answer.prompt_top = event.prompt.top_logprobs if event.prompt.HasField("top_logprobs") else None
                answer.cached_token_count = event.prompt.cached_token_count
                answer.target_logprobs = tensors.decode_floats(event.prompt.target_logprobs)
                if event.prompt.HasField("alt_tokens"):
                    answer.alt_ids = tensors.decode(event.prompt.alt_tokens.token_ids)
                    answer.alt_logprobs = tensors.decode(event.prompt.alt_tokens.logprobs)
            else:
                assert prompt_count == 1, "the prompt's data must precede tokens"
                _add(answer.sequences[event.delta.index], event.delta)
    assert prompt_count == 1
    assert all(sequence.finish for sequence in answer.sequences)
    return answer


def _add(sequence: Drawn, delta: sampler_pb2.SequenceDelta) -> None:
    assert not sequence.finish, "no tokens may follow the end of a sequence"
    sequence.tokens += tensors.decode_tokens(delta.tokens).tolist()
    sequence.logprobs += tensors.decode_floats(delta.logprobs).tolist()
    if delta.HasField("top_logprobs"):
        sequence.top_ids += tensors.decode(delta.top_logprobs.token_ids).tolist()
        sequence.top_logprobs += tensors.decode(delta.top_logprobs.logprobs).tolist()
    sequence.finish = delta.finish_reason
    sequence.delta_count += 1
    sequence.snapshot_ids.add(delta.snapshot_id)
