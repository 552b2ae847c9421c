"""Results encoded as the SDK decodes them."""

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from fovea.api.v1 import gateway_pb2, sampler_pb2, trainer_pb2
from fovea.wire import tensors
from fovea.wire.errors import FailedPrecondition, Internal
from fovea_gateway.sampling import sample_wire
from fovea_gateway.sessions.future import Kind, Outcome, join_messages
from fovea_gateway.sessions.session_routes import error_json
from fovea_gateway.training import training_routes

ENCODERS = {**training_routes.ENCODERS, **sample_wire.ENCODERS}

logprob = st.floats(-1e4, 0, width=32)


def to_proto(outcome: Outcome) -> bytes:
    encode = ENCODERS[outcome.kind].to_proto
    assert encode is not None
    return encode(outcome.result)


def to_json(outcome: Outcome) -> dict[str, Any]:
    return ENCODERS[outcome.kind].to_json(outcome.result)


@st.composite
def arrays(draw: st.DrawFn) -> npt.NDArray[np.float32]:
    """Returns logprobs of shape [N] or [N, K]."""
    shape = draw(st.sampled_from([(3,), (1,), (0,), (4, 2), (2, 3)]))
    return np.array(draw(st.lists(logprob, min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))), "<f4").reshape(
        shape
    )


@given(st.lists(arrays(), max_size=8), st.dictionaries(st.sampled_from(["loss:sum", "x:mean"]), logprob))
def test_losses_reach_the_sdk_in_order_and_shape(
    outputs: list[npt.NDArray[np.float32]], metrics: dict[str, float]
) -> None:
    messages = [
        gateway_pb2.WaitFutureResponse(output=trainer_pb2.DatumOutput(tensors={"logprobs": tensors.encode(array)}))
        for array in outputs
    ]
    last = gateway_pb2.WaitFutureResponse(metrics=trainer_pb2.Metrics(values=metrics))
    outcome = Outcome(Kind.FORWARD_BACKWARD, join_messages([*messages, last]))
    blob = to_proto(outcome)
    assert blob == to_proto(outcome)
    decoded = deserialize_forward_backward_output(blob)
    assert decoded.metrics == metrics
    assert decoded.loss_fn_output_type == "TorchLossReturn"
    assert len(decoded.loss_fn_outputs) == len(outputs)
    for sent, got in zip(outputs, decoded.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(got["logprobs"].to_numpy(), sent)
        assert got["logprobs"].shape == list(sent.shape)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), logprob), min_size=1, max_size=6), min_size=1, max_size=4),
    st.none() | st.lists(logprob, min_size=1, max_size=5),
    st.integers(0, 100),
)
def test_samples_reach_the_sdk(
    sequences: list[list[tuple[int, float]]], prompt: list[float] | None, cached: int
) -> None:
    result = sampler_pb2.PromptResult(cached_token_count=cached)
    if prompt is not None:
        result.logprobs = tensors.encode_floats([np.nan, *prompt])
    messages = [gateway_pb2.SampleTokensResponse(prompt=result)]
    for index, sequence in enumerate(sequences):
        ids, logprobs = zip(*sequence, strict=True)
        delta = sampler_pb2.SequenceDelta(
            index=index, tokens=tensors.encode_tokens(ids), logprobs=tensors.encode_floats(logprobs),
            finish_reason=("FINISH_REASON_STOP", "FINISH_REASON_LENGTH")[index % 2],
        )  # fmt: skip
        messages.append(gateway_pb2.SampleTokensResponse(delta=delta))
    outcome = Outcome(Kind.SAMPLE, join_messages(messages))
    decoded = deserialize_sample_response(to_proto(outcome))
    assert decoded.prompt_cache_hit_tokens == cached
    assert decoded.prompt_logprobs == (None if prompt is None else [None, *prompt])
    for index, (sent, got) in enumerate(zip(sequences, decoded.sequences, strict=True)):
        assert list(zip(got.tokens, got.logprobs or [], strict=True)) == sent
        assert got.stop_reason == ("stop", "length")[index % 2]
    listed = to_json(outcome)
    assert [s["tokens"] for s in listed["sequences"]] == [[i for i, _ in s] for s in sequences]
    assert not {"error", "status"} & set(listed)


def test_top_logprobs_keep_filler_rows() -> None:
    ids, logprobs = np.array([[0, 0], [5, 3]], "<i4"), np.array([[-99999.0, -99999.0], [-0.5, -1.5]], "<f4")
    top = sampler_pb2.TopLogprobs(token_ids=tensors.encode(ids), logprobs=tensors.encode(logprobs))
    message = gateway_pb2.SampleTokensResponse(prompt=sampler_pb2.PromptResult(top_logprobs=top))
    outcome = Outcome(Kind.SAMPLE, join_messages([message]))
    assert deserialize_sample_response(to_proto(outcome)).topk_prompt_logprobs == [None, [(5, -0.5), (3, -1.5)]]
    assert to_json(outcome)["topk_prompt_logprobs"] == [None, [[5, -0.5], [3, -1.5]]]


def test_errors_survive_the_database_with_class_and_field() -> None:
    outcome = Outcome(Kind.OPTIM_STEP, b"", FailedPrecondition("not now", field="seq_id"))
    again = Outcome.from_blob(outcome.kind, outcome.state, outcome.to_blob())
    assert isinstance(again.error, FailedPrecondition)
    assert error_json(again.error) == {"error": "not now", "category": "user", "reason": "FAILED_PRECONDITION"}
    assert error_json(Internal("x"))["category"] == "server"


def test_metrics_come_in_the_same_order_whatever_order_a_process_gives_to_maps() -> None:
    names = [f"{letter}:sum" for letter in "zkbqamx"]
    metrics = trainer_pb2.Metrics(values=dict.fromkeys(names, 1.0))
    blob = join_messages([gateway_pb2.WaitFutureResponse(metrics=metrics)])
    for kind in (Kind.OPTIM_STEP, Kind.FORWARD):
        assert list(to_json(Outcome(kind, blob))["metrics"]) == sorted(names)
