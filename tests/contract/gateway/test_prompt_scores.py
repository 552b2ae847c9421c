"""Scores of prompt tokens: given targets, drawn alternatives, the last n only (tinker-contract.md, section 4)."""

from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.proto.response_conv import deserialize_sample_response

from fovea.api.v1 import gateway_pb2
from fovea.client import GatewayClient
from fovea.wire import tensors
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import MODEL, FakeSampler
from tests.contract.gateway.requests import PROTOBUF, Rest, image_input
from tests.contract.gateway.test_samplers import base_session

SCORE = FakeSampler.logprob_of
PARAMS = types.SamplingParams(max_tokens=1)


def prompt(length: int) -> types.ModelInput:
    """Returns the tokens 1, 2, 3 ..."""
    return types.ModelInput.from_ints(list(range(1, length + 1)))


async def test_sdk_gets_dense_targets_back_in_their_shape_with_zero_where_it_skipped(stand: Stand) -> None:
    ids = torch.tensor([[5, -1, 0], [-1, -1, -1], [7, 8, -1]])

    def use(client: tinker.ServiceClient) -> types.SampleResponse:
        sampling = client.create_sampling_client(base_model=MODEL).result()
        target = types.TensorData.from_torch(ids)
        return sampling.sample(prompt(4), 1, PARAMS, target_prompt_logprobs=target).result()

    answer = (await stand.sdk(use)).target_prompt_logprobs
    assert answer.sparse_crow_indices is None
    assert answer.tolist() == [[SCORE(5), 0.0, SCORE(0)], [0.0, 0.0, 0.0], [SCORE(7), SCORE(8), 0.0]]
    sent = stand.sampler.of("Sample")[0].target_tokens
    assert tensors.decode(sent.token_ids).tolist() == [5, 0, 7, 8]
    assert tensors.decode(sent.row_offsets).tolist() == [0, 2, 2, 4]


async def test_sdk_gets_sparse_targets_back_with_their_indices(stand: Stand) -> None:
    ids = torch.full((30, 4), -1, dtype=torch.int64)
    ids[3, 1], ids[3, 2], ids[29, 0] = 9, 0, 4
    target = types.TensorData.from_torch_sparse(ids, pad_value=-1)
    assert target.sparse_crow_indices is not None

    def use(client: tinker.ServiceClient) -> types.SampleResponse:
        sampling = client.create_sampling_client(base_model=MODEL).result()
        return sampling.sample(
            prompt(31), 2, PARAMS, include_prompt_logprobs=True, target_prompt_logprobs=target, prompt_alt_tokens_k=2
        ).result()

    response = await stand.sdk(use)
    answer = response.target_prompt_logprobs
    assert (answer.shape, answer.dtype) == ([30, 4], "float32")
    assert answer.sparse_crow_indices == target.sparse_crow_indices
    assert answer.sparse_col_indices == target.sparse_col_indices
    assert list(answer.data) == [SCORE(9), SCORE(0), SCORE(4)]
    alt = response.prompt_alt_tokens
    assert (alt.tokens.dtype, alt.tokens.shape, alt.logprobs.dtype) == ("int64", [30, 2], "float32")
    assert alt.tokens.tolist() == [[2 * row, 2 * row + 1] for row in range(30)]
    assert alt.logprobs.tolist() == [[-2.0 * row, -2.0 * row - 1] for row in range(30)]


async def test_a_sparse_cell_of_minus_one_is_kept_and_scores_zero_also_in_json_and_after_a_restart(
    stand: Stand, rest: Rest
) -> None:
    sampling_id = await base_session(rest)
    target = {
        "data": [6, -1, 2], "dtype": "int64", "shape": [2, 1000],
        "sparse_crow_indices": [0, 2, 3], "sparse_col_indices": [10, 999, 0],
    }  # fmt: skip
    submitted = await rest.sample(sampling_id, 0, target_prompt_logprobs=target, prompt_alt_tokens_k=1)
    request_id = submitted.json()["request_id"]
    expected = {**target, "data": [SCORE(6), 0.0, SCORE(2)], "dtype": "float32"}
    answer = await rest.result(request_id)
    assert answer["target_prompt_logprobs"] == expected
    assert answer["prompt_alt_tokens"]["tokens"] == {"data": [0, 1], "dtype": "int64", "shape": [2, 1]}
    first = (await rest.poll(request_id, PROTOBUF)).content
    await stand.stop()
    await stand.start()
    assert (await rest.poll(request_id, PROTOBUF)).content == first
    decoded = deserialize_sample_response(first).target_prompt_logprobs
    assert decoded is not None
    assert decoded.sparse_col_indices == [10, 999, 0]


async def test_last_n_reaches_the_sampler_and_images_count(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> tuple[types.SampleResponse, str]:
        sampling = client.create_sampling_client(base_model=MODEL).result()
        scored = sampling.sample(
            image_input(), 1, PARAMS, include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=3
        ).result()
        target = types.TensorData(data=[1, 2, 3], dtype="int64", shape=[3, 1])
        with pytest.raises(tinker.RequestFailedError) as caught:
            sampling.sample(image_input(), 1, PARAMS, target_prompt_logprobs=target).result()
        return scored, str(caught.value)

    scored, words = await stand.sdk(use)
    assert scored.prompt_logprobs == [None] * 5 + [-0.5] * 3
    assert stand.sampler.of("Sample")[0].prompt_logprobs_last_n == 3
    assert "has 3 rows; a prompt of 8 tokens needs 7" in words


def dense(data: list[Any], shape: list[int] | None, **more: Any) -> dict[str, Any]:
    return {"target_prompt_logprobs": {"data": data, "dtype": "int64", "shape": shape, **more}}


BAD: list[tuple[dict[str, Any], str]] = [
    (dense([1], None), "shape is None"),
    (dense([1, 2], [2]), "shape is [2]"),
    (dense([1], [1, 1]), "has 1 rows; a prompt of 3 tokens needs 2"),
    (dense([1, 2, 3], [2, 1]), "data has 3 values, but shape is [2, 1]"),
    (dense([1, -2], [2, 1]), "data holds -2"),
    (dense([1, 2**40], [2, 1]), f"data holds {2**40}"),
    (dense([1, 2**70], [2, 1]), "whole numbers within 64 bits"),
    (dense([1.5, 2.5], [2, 1]), "whole numbers"),
    (dense([1, 1000], [2, 1]), "token id 1000; ids are 0 .. 999"),
    (dense([-1, -1], [2, 1]), "contains no token id"),
    (dense([], [2, 0]), "shape is [2, 0]; it must be [prompt tokens - 1, K], K from 1"),
    (dense([1, 2], [-2, -1]), "shape is [-2, -1]"),
    (dense([1], [2, 2], sparse_crow_indices=[0, 1, 1]), "must be given together"),
    (dense([1], [2, 2], sparse_crow_indices=[0, 1], sparse_col_indices=[0]), "sparse_crow_indices"),
    (dense([1], [2, 2], sparse_crow_indices=[1, 0, 1], sparse_col_indices=[0]), "sparse_crow_indices"),
    (dense([1, 1], [2, 2], sparse_crow_indices=[0, 3, 2], sparse_col_indices=[0, 1]), "sparse_crow_indices"),
    (dense([1], [2, 2], sparse_crow_indices=[0, 1, 1], sparse_col_indices=[2]), "sparse_col_indices"),
    (dense([1], [2, 2], sparse_crow_indices=[0, 1, 1], sparse_col_indices=[0, 1]), "sparse_col_indices"),
    ({"target_prompt_logprobs": {"data": [1.0], "dtype": "float32", "shape": [2, 1]}}, "dtype is float32"),
    ({"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1], "k": 1}}, "target_prompt_logprobs"),
    ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k is -1"),
    ({"prompt_alt_tokens_k": 10**6}, "prompt_alt_tokens_k is 1000000"),
    ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n is 0"),
    ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "it must be 1 .. 2"),
    ({"prompt_logprobs_last_n": 2}, "needs prompt_logprobs"),
]


async def test_wrong_tables_fail_the_future_by_name(stand: Stand, rest: Rest) -> None:
    sampling_id = await base_session(rest)
    for seq_id, (more, words) in enumerate(BAD):
        response = await rest.sample(sampling_id, seq_id, **more)
        assert response.status_code == 200, response.text
        answer = await rest.result(response.json()["request_id"])
        assert words in answer["error"], (more, answer)
        assert answer["category"] == "user"
    assert not stand.sampler.of("Sample")
    good = await rest.sample(sampling_id, 1000, **dense([1, 2], [2, 1]))
    assert "target_prompt_logprobs" in await rest.result(good.json()["request_id"])


async def test_grpc_clients_get_their_table_first_and_then_the_scores(stand: Stand) -> None:
    assert stand.gateway is not None
    async with GatewayClient(f"127.0.0.1:{stand.gateway.grpc.port}", KEY) as client:
        session_id = await client.create_session()
        sampling_id = await client.create_sampling_session(session_id, 0, base_model=MODEL)
        request = gateway_pb2.SampleTokensRequest(sampling_session_id=sampling_id, sample_count=1, alt_token_count=1)
        request.prompt.chunks.add().tokens.tokens = tensors.encode_tokens([1, 2, 3])
        request.params.max_tokens = 2
        table = request.target_table
        table.column_count = 2
        table.tokens.token_ids.CopyFrom(tensors.encode(_int32([4, 5, 6])))
        table.tokens.row_offsets.CopyFrom(tensors.encode(_int32([0, 1, 3]).astype("<i8")))
        table.column_indices.CopyFrom(tensors.encode(_int32([1, 0, 1])))
        events = [event async for event in client.sample(request)]
        assert [event.WhichOneof("event") for event in events[:2]] == ["target_table", "prompt"]
        assert events[0].target_table == table
        assert tensors.decode_floats(events[1].prompt.target_logprobs).tolist() == [SCORE(4), SCORE(5), SCORE(6)]
        assert list(events[1].prompt.alt_tokens.token_ids.shape) == [2, 1]
        table.column_indices.CopyFrom(tensors.encode(_int32([2, 0, 1])))
        with pytest.raises(Exception, match="column_indices must contain integers"):
            [event async for event in client.sample(request)]


def _int32(values: list[int]) -> Any:
    return np.asarray(values, "<i4")
