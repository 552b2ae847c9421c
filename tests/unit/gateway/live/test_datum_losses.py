"""Finds the datums with the largest loss per token in stored losses, and shows them with pictures and targets."""

import math
from typing import Any

import numpy as np
import pytest

from fovea.api.v1 import gateway_pb2, model_input_pb2, trainer_pb2
from fovea.wire import tensors
from fovea_gateway.live.sample_gallery import Picture
from fovea_gateway.live.step_curves import MOST_WORST, read_losses
from fovea_gateway.sessions.future import join_messages
from fovea_gateway.training.batches import LossRequest, blob_of_messages

Values = list[float]


def _datum(ids: list[int], targets: list[int], weights: Values | None, picture: bytes = b"") -> gateway_pb2.InputDatum:
    chunks = [model_input_pb2.Chunk(tokens=model_input_pb2.TokenChunk(tokens=tensors.encode_tokens(ids)))]
    if picture:
        chunks.insert(0, model_input_pb2.Chunk(image=model_input_pb2.ImageChunk(data=picture)))
    inputs = {"target_tokens": tensors.encode(np.asarray(targets, np.int64))}
    if weights is not None:
        inputs["weights"] = tensors.encode(np.asarray(weights, np.float32))
    return gateway_pb2.InputDatum(input=model_input_pb2.ModelInput(chunks=chunks), loss_inputs=inputs)


def _read(data: list[gateway_pb2.InputDatum], logprobs: list[Values], has_samples: bool = False, **header: Any) -> Any:
    asked = {"loss_function": "cross_entropy", "backward": True} | header
    request = blob_of_messages(LossRequest(gateway_pb2.SubmitForwardBackwardHeader(**asked), data))
    outputs = [
        trainer_pb2.DatumOutput(tensors={"logprobs": tensors.encode(np.asarray(values, np.float32))})
        for values in logprobs
    ]
    result = join_messages([gateway_pb2.WaitFutureResponse(output=output) for output in outputs])
    return read_losses("future", request, result, 5.0, has_samples)


def test_the_largest_loss_per_token_is_first() -> None:
    data = [
        _datum([1, 2, 3], [2, 3, 4], [0, 1, 1]),
        _datum([5, 6, 7, 8], [6, 7, 8, 9], [0, 0, 0, 2]),
        _datum([1, 2], [2, 3], [0, 0]),
        _datum([1, 2], [2, 3], None),
    ]
    found = _read(data, [[-9, -1, -2], [-9, -9, -9, -4], [-9, -9], [-1, -1]])
    assert [one.loss for one in found.worst] == [4, 1.5, 1], "a datum without weights must have no loss"
    first, second, third = found.worst
    assert [piece.tolist() for piece in first.pieces] == [[5, 6, 7, 8]]
    assert (first.drawn.tokens.tolist(), first.drawn.logprobs.tolist()) == ([9], [-4])
    assert [piece.tolist() for piece in second.pieces] == [[1, 2]], "up to the first target with a weight"
    assert (second.drawn.tokens.tolist(), second.drawn.logprobs.tolist()) == ([3, 4], [-1, -2])
    assert (first.drawn.sequence_id, first.drawn.at) == ("future:1", 5.0)
    assert third.drawn.tokens.tolist() == [2, 3]
    assert found.by_place == {}


def test_few_are_kept_and_a_loss_that_is_no_number_comes_first() -> None:
    data = [_datum([number], [number], [1]) for number in range(40)]
    values = [[-number / 8] for number in range(39)]
    found = _read(data, [*values, [math.nan]])
    assert len(found.worst) == MOST_WORST
    assert [one.loss for one in found.worst[:2]] == [math.inf, 38 / 8]


def test_a_picture_stays_before_its_text_and_equal_datums_are_recognized() -> None:
    data = [_datum([1, 2], [0, 0, 2, 3], [0, 0, 0, 1], picture=b"png"), _datum([1, 2], [2, 9], [0, 1])]
    (picture, ids), _ = [one.pieces for one in _read(data, [[-1] * 4, [-1] * 2]).worst]
    assert isinstance(picture, Picture)
    assert (picture.data, ids.tolist()) == (b"png", [1, 2])
    again, other = _read([data[1], _datum([1, 2], [2, 8], [0, 1])], [[-3] * 2, [-2] * 2]).worst
    known = _read(data, [[-1] * 4, [-2] * 2]).worst[0]
    assert again.digest == known.digest
    assert other.digest != known.digest, "another target"


@pytest.mark.parametrize("header", [{"loss_function": "importance_sampling"}, {"backward": False}])
def test_only_trained_datums_with_a_loss_per_token_are_kept(header: dict[str, Any]) -> None:
    found = _read([_datum([1, 2], [2, 3], [1, 1])], [[-1, -1]], has_samples=True, **header)
    assert found.worst == []
    assert [values.tolist() for values in found.by_place.values()] == [[-1, -1]]
