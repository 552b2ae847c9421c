"""Putting the events of a sample back together: one prompt result, one delta a sequence."""

from collections.abc import Iterable

import numpy as np

from fovea.api.v1 import gateway_pb2, sampler_pb2, tensor_pb2
from fovea.wire import tensors
from fovea.wire.errors import Internal
from gateway.sampling import target_tables as targets
from gateway.sampling.target_tables import Cells


def gather(
    events: Iterable[sampler_pb2.SampleResponse], request: gateway_pb2.SampleTokensRequest, cells: Cells | None
) -> list[gateway_pb2.SampleTokensResponse]:
    """Joins the deltas of each sequence; sequences come in order of index, after the request's own target table.

    Raises Internal if the sampler left out what was asked for: half an answer is never returned as a whole one.
    """
    sample_count = request.sample_count
    prompt: sampler_pb2.PromptResult | None = None
    deltas: dict[int, list[sampler_pb2.SequenceDelta]] = {index: [] for index in range(sample_count)}
    for event in events:
        if event.WhichOneof("event") == "prompt":
            prompt = event.prompt
        elif event.delta.index in deltas:
            deltas[event.delta.index].append(event.delta)
        else:
            raise Internal(f"the sampler returned sequence {event.delta.index} of {sample_count}")
    records = [gateway_pb2.SampleTokensResponse(prompt=_checked(prompt, request, cells))]
    if cells is not None:
        records.insert(0, gateway_pb2.SampleTokensResponse(target_table=request.target_table))
    for index, parts in deltas.items():
        records.append(gateway_pb2.SampleTokensResponse(delta=_join(index, parts)))
    return records


def _checked(
    prompt: sampler_pb2.PromptResult | None, request: gateway_pb2.SampleTokensRequest, cells: Cells | None
) -> sampler_pb2.PromptResult:
    prompt = prompt or sampler_pb2.PromptResult()
    if cells is not None:
        targets.spread(cells, prompt.target_logprobs)
    for asked, name in ((request.top_prompt_logprobs, "top_logprobs"), (request.alt_token_count, "alt_tokens")):
        if asked and not prompt.HasField(name):
            raise Internal(f"the sampler returned no {name} for the prompt")
    if request.prompt_logprobs and not prompt.logprobs:
        raise Internal("the sampler returned no logprobs for the prompt")
    return prompt


def _join(index: int, parts: list[sampler_pb2.SequenceDelta]) -> sampler_pb2.SequenceDelta:
    if not parts or parts[-1].finish_reason == sampler_pb2.FINISH_REASON_UNSPECIFIED:
        raise Internal(f"the sampler ended before sequence {index} did")
    whole = sampler_pb2.SequenceDelta(
        index=index,
        tokens=b"".join(part.tokens for part in parts),
        logprobs=b"".join(part.logprobs for part in parts),
        finish_reason=parts[-1].finish_reason,
        snapshot_id=parts[-1].snapshot_id,
    )
    tops = [part.top_logprobs for part in parts if part.HasField("top_logprobs")]
    if tops:
        whole.top_logprobs.token_ids.CopyFrom(_stack([top.token_ids for top in tops]))
        whole.top_logprobs.logprobs.CopyFrom(_stack([top.logprobs for top in tops]))
    return whole


def _stack(parts: list[tensor_pb2.Tensor]) -> tensor_pb2.Tensor:
    return tensors.encode(np.concatenate([tensors.decode(part) for part in parts]))
