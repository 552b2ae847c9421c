"""Putting the events of a sample back together: one prompt result, one delta a sequence."""

from collections.abc import Iterable

import numpy as np

from fovea.api.v1 import gateway_pb2, sampler_pb2, tensor_pb2
from fovea.wire import tensors
from fovea.wire.errors import Internal


def gather(events: Iterable[sampler_pb2.SampleResponse], sample_count: int) -> list[gateway_pb2.SampleTokensResponse]:
    """Joins the deltas of each sequence; sequences come in order of index.

    Raises Internal if the sampler left a sequence unfinished: half an answer is never returned as a whole one.
    """
    prompt: sampler_pb2.PromptResult | None = None
    deltas: dict[int, list[sampler_pb2.SequenceDelta]] = {index: [] for index in range(sample_count)}
    for event in events:
        if event.WhichOneof("event") == "prompt":
            prompt = event.prompt
        elif event.delta.index in deltas:
            deltas[event.delta.index].append(event.delta)
        else:
            raise Internal(f"the sampler returned sequence {event.delta.index} of {sample_count}")
    records = [gateway_pb2.SampleTokensResponse(prompt=prompt or sampler_pb2.PromptResult())]
    for index, parts in deltas.items():
        records.append(gateway_pb2.SampleTokensResponse(delta=_join(index, parts)))
    return records


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
