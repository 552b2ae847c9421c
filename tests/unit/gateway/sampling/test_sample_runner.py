"""Concatenation of deltas."""

import numpy as np
import pytest

from fovea.api.v1 import gateway_pb2, sampler_pb2
from fovea.wire import tensors
from fovea.wire.errors import ContextOverflow, Internal, InvalidInput
from fovea_gateway.sampling import sample_wire as targets
from fovea_gateway.sampling.sample_runner import check_context, check_limits
from fovea_gateway.sampling.sample_wire import gather


def delta(index: int, ids: list[int], finish: int = 0, top: int = 0) -> sampler_pb2.SampleResponse:
    message = sampler_pb2.SequenceDelta(
        index=index, tokens=tensors.encode_tokens(ids), logprobs=tensors.encode_floats([-1.0] * len(ids)),
        finish_reason=sampler_pb2.FinishReason.Name(finish), snapshot_id="s",
    )  # fmt: skip
    if top:
        message.top_logprobs.token_ids.CopyFrom(tensors.encode(np.full((len(ids), top), index, np.int32)))
        message.top_logprobs.logprobs.CopyFrom(tensors.encode(np.zeros((len(ids), top), np.float32)))
    return sampler_pb2.SampleResponse(delta=message)


def test_interleaved_deltas_come_back_in_order() -> None:
    prompt = sampler_pb2.SampleResponse(prompt=sampler_pb2.PromptResult(cached_token_count=2))
    events = [prompt, delta(1, [10], top=2), delta(0, [1, 2]), delta(1, [11, 12], 2, top=2), delta(0, [3], 1)]
    first, *rest = gather(events, gateway_pb2.SampleTokensRequest(sample_count=2), None)
    assert first.prompt.cached_token_count == 2
    assert [tensors.decode_tokens(record.delta.tokens).tolist() for record in rest] == [[1, 2, 3], [10, 11, 12]]
    assert [record.delta.finish_reason for record in rest] == [1, 2]
    assert tensors.decode(rest[1].delta.top_logprobs.token_ids).shape == (3, 2)
    assert not rest[0].delta.HasField("top_logprobs")


def test_the_joined_sequence_says_which_snapshots_made_which_tokens() -> None:
    events = [delta(0, [1, 2]), delta(0, [3]), delta(0, [4, 5, 6]), delta(0, [7], 1)]
    for event, name in zip(events, ("m@1", "m@1", "m@2", "m@3"), strict=True):
        event.delta.snapshot_id = name
    _, record = gather(events, gateway_pb2.SampleTokensRequest(sample_count=1), None)
    made = [(one.snapshot_id, one.token_count) for one in record.delta.snapshots]
    assert made == [("m@1", 3), ("m@2", 3), ("m@3", 1)]
    assert record.delta.snapshot_id == "m@3"
    _, record = gather([delta(0, [1]), delta(0, [2], 1)], gateway_pb2.SampleTokensRequest(sample_count=1), None)
    assert not record.delta.snapshots


def test_supports_of_a_sequence_are_joined() -> None:
    first, last = delta(0, [1]), delta(0, [2, 3], 1)
    first.delta.sampled_support, last.delta.sampled_support = b"\x05\0", b"\0\x03\x04\0"
    request = gateway_pb2.SampleTokensRequest(sample_count=1, sampled_support=True)
    _, record = gather([first, last], request, None)
    assert record.delta.sampled_support == b"\x05\0\0\x03\x04\0"
    with pytest.raises(Internal, match="no support of a token of sequence 0"):
        gather([first, delta(0, [2, 3], 1)], request, None)


def test_the_experts_of_a_sequence_come_with_its_end() -> None:
    experts = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    last = delta(0, [2], 1)
    last.delta.routed_experts.CopyFrom(tensors.encode(experts))
    request = gateway_pb2.SampleTokensRequest(sample_count=1, routed_experts=True)
    _, record = gather([delta(0, [1]), last], request, None)
    assert np.array_equal(tensors.decode(record.delta.routed_experts), experts)
    with pytest.raises(Internal, match="no experts of sequence 0"):
        gather([delta(0, [1]), delta(0, [2], 1)], request, None)


@pytest.mark.parametrize("events", [[], [delta(0, [1])], [delta(0, [1], 1), delta(5, [1], 1)]])
def test_half_an_answer_is_never_a_whole_one(events: list[sampler_pb2.SampleResponse]) -> None:
    with pytest.raises(Internal):
        gather(events, gateway_pb2.SampleTokensRequest(sample_count=1), None)


def test_missing_prompt_results_are_an_internal_error() -> None:
    table = gateway_pb2.TargetTable(column_count=2)
    table.tokens.token_ids.CopyFrom(tensors.encode(np.asarray([7, -1, 9], np.int32)))
    table.tokens.row_offsets.CopyFrom(tensors.encode(np.asarray([0, 1, 3], np.int64)))
    table.column_indices.CopyFrom(tensors.encode(np.asarray([1, 0, 1], np.int32)))
    cells = targets.read_table(table)
    assert tensors.decode(targets.to_score(cells).token_ids).tolist() == [7, 9]
    assert tensors.decode(targets.to_score(cells).row_offsets).tolist() == [0, 1, 2]
    scored = sampler_pb2.SampleResponse(
        prompt=sampler_pb2.PromptResult(target_logprobs=tensors.encode_floats([-1, -2]))
    )
    request = gateway_pb2.SampleTokensRequest(sample_count=1, target_table=table)
    events = [scored, delta(0, [1], 1)]
    assert gather(events, request, cells)[0].target_table == table
    with pytest.raises(Internal, match="scored 0 of 2"):
        gather(events[1:], request, cells)
    for more in ({"prompt_logprobs": True}, {"alt_token_count": 1}, {"top_prompt_logprobs": 1}):
        with pytest.raises(Internal, match="for the prompt"):
            gather(events, gateway_pb2.SampleTokensRequest(sample_count=1, **more), None)


def test_context_check_uses_the_known_words() -> None:
    check_context(10, 6, 16)
    with pytest.raises(ContextOverflow) as caught:
        check_context(67984, 4096, 65536)
    assert caught.value.message == (
        "Prompt length plus max_tokens exceeds the model's context window: "
        "67984 prompt tokens + 4096 max_tokens > 65536."
    )


def test_limits_name_the_field() -> None:
    info = sampler_pb2.GetSamplerInfoResponse(max_sample_count=4, max_top_logprobs=2)
    check_limits(gateway_pb2.SampleTokensRequest(sample_count=4, top_prompt_logprobs=2), info)
    with pytest.raises(InvalidInput, match=r"num_samples is 5; it must be 1 \.\. 4"):
        check_limits(gateway_pb2.SampleTokensRequest(sample_count=5), info)
    with pytest.raises(InvalidInput, match="topk_sample_logprobs is 3"):
        check_limits(gateway_pb2.SampleTokensRequest(sample_count=1, top_sample_logprobs=3), info)


def test_a_table_that_no_message_could_carry_is_refused_by_size() -> None:
    count = 2**18 + 1
    cells = targets.Cells(np.ones(count, np.int64), np.arange(count), np.asarray([0, count]))
    with pytest.raises(InvalidInput, match="lists 262145 cells; at most 262144"):
        targets.check_table(cells, 2, 10)
