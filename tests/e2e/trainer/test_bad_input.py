"""Each invalid input gets an error that names the field; the next valid call succeeds and nothing has changed."""

from collections.abc import AsyncIterator, Callable

import grpc
import numpy as np
import pytest

from fovea.api.v1 import model_input_pb2, trainer_pb2, trainer_pb2_grpc
from fovea.wire import tensors
from fovea.wire.errors import FeatureEvicted, FoveaError, Internal, InvalidInput
from tests.e2e.trainer.conftest import Bench, adam
from tests.e2e.trainer.examples import datums_of, header, logprobs_of

Change = Callable[[trainer_pb2.Datum], None]


def _set(name: str, value: np.ndarray) -> Change:
    return lambda datum: datum.loss_inputs[name].CopyFrom(tensors.encode(value))


def _drop(name: str) -> Change:
    return lambda datum: datum.loss_inputs.__delitem__(name)


def _span(**fields: int) -> Change:
    def change(datum: trainer_pb2.Datum) -> None:
        for name, value in fields.items():
            setattr(datum.input.spans[0], name, value)

    return change


def _feature(**fields: object) -> Change:
    def change(datum: trainer_pb2.Datum) -> None:
        for name, value in fields.items():
            setattr(datum.input.spans[0].feature, name, value)

    return change


def _tokens(ids: list[int]) -> Change:
    return lambda datum: datum.input.MergeFrom(model_input_pb2.RenderedInput(tokens=tensors.encode_tokens(ids)))


def _no_tokens(datum: trainer_pb2.Datum) -> None:
    datum.input.tokens = b""


def _no_positions(datum: trainer_pb2.Datum) -> None:
    datum.input.ClearField("positions")


def _short_positions(datum: trainer_pb2.Datum) -> None:
    datum.input.positions.CopyFrom(tensors.encode(np.zeros((3, 2), np.int32)))


TEXT_CASES: list[tuple[Change, str, str]] = [
    (_drop("target_tokens"), "loss_inputs.target_tokens", "is missing"),
    (_set("mask", np.ones(17, np.float32)), "loss_inputs.mask", "is unknown for cross_entropy"),
    (_set("weights", np.ones(16, np.float32)), "loss_inputs.weights", r"\[16\], but must have the shape \[17\]"),
    (
        _set("weights", np.ones((17, 2), np.float32)),
        "loss_inputs.weights",
        r"\[17, 2\], but must have the shape \[17\]",
    ),
    (_set("weights", np.full(17, np.nan, np.float32)), "loss_inputs.weights", r"nan at \[0\]"),
    (_set("weights", np.full(17, np.inf, np.float32)), "loss_inputs.weights", "numbers must be finite"),
    (_set("weights", np.ones(17, np.uint8)), "loss_inputs.weights", "must be float32"),
    (_set("target_tokens", np.zeros(18, np.int64)), "loss_inputs.target_tokens", "18 rows, but the input has 17"),
    (_set("target_tokens", np.zeros(17, np.float32)), "loss_inputs.target_tokens", "must be int64"),
    (_set("target_tokens", np.zeros((17, 0), np.int64)), "loss_inputs.target_tokens", "no target"),
    (_set("target_tokens", np.zeros((17, 1, 1), np.int64)), "loss_inputs.target_tokens", "accepts"),
    (_set("target_tokens", np.full(17, 10**6)), "loss_inputs.target_tokens", "id 1000000 at position 0"),
    (_set("target_tokens", np.full(17, -1)), "loss_inputs.target_tokens", "id -1"),
    (_tokens([5] * 16 + [10**6]), "input.tokens", "id 1000000 at position 16"),
    (_tokens([-3] * 17), "input.tokens", "id -3"),
    (_tokens([1] * 9000), "input.tokens", "9000 tokens; the model's context window is 8192"),
    (_no_tokens, "input.tokens", "has no tokens"),
    (lambda datum: setattr(datum.input, "tokens", b"abc"), "input.tokens", "not a multiple of 4"),
    (lambda datum: setattr(datum.loss_inputs["weights"], "data", b"abc"), "loss_inputs.weights", "3 bytes"),
]

IMAGE_CASES: list[tuple[Change, str, str]] = [
    (_span(length=5), "input.spans[0].length", "token_count is"),
    (_span(offset=10**6), "input.spans[0].offset", "must lie in"),
    (_span(offset=-1), "input.spans[0].offset", "must lie in 0"),
    (_feature(token_count=3), "input.spans[0].length", "token_count is 3"),
    (_feature(token_count=0), "input.spans[0].feature.token_count", "must be at least 1"),
    (_feature(embedding_mask=b"ab"), "input.spans[0].feature.embedding_mask", "has 2 bytes"),
    (_no_positions, "input.positions", "is missing"),
    (_short_positions, "input.positions", r"\[3, 2\]; it must be int32"),
]


@pytest.fixture
async def model(qwen3_vl: Bench) -> AsyncIterator[str]:
    """A model with one valid call."""
    model_id = await qwen3_vl.adapter(vision=True)
    yield model_id
    await _still_good(qwen3_vl, model_id)


@pytest.mark.parametrize(("change", "field", "message"), TEXT_CASES)
async def test_bad_text_datum(qwen3_vl: Bench, model: str, change: Change, field: str, message: str) -> None:
    await _refused(qwen3_vl, model, "text", change, field, message, InvalidInput)


@pytest.mark.parametrize(("change", "field", "message"), IMAGE_CASES)
async def test_bad_image_datum(qwen3_vl: Bench, model: str, change: Change, field: str, message: str) -> None:
    await _refused(qwen3_vl, model, "image", change, field, message, InvalidInput)


async def test_feature_that_the_renderer_lost(qwen3_vl: Bench, model: str) -> None:
    change = _feature(digest="f" * 64)
    await _refused(qwen3_vl, model, "image", change, "", "render the image again", FeatureEvicted)


async def test_feature_whose_bytes_differ(qwen3_vl: Bench, model: str) -> None:
    change = _feature(digest=_copied(qwen3_vl), tensors_sha256="e" * 64)
    await _refused(qwen3_vl, model, "image", change, "", "e" * 64, Internal)


async def test_feature_of_other_ids(qwen3_vl: Bench, model: str) -> None:
    """One embedding fewer than the tensors make, for an image that was fetched before and for one that was not."""

    def change(datum: trainer_pb2.Datum) -> None:
        feature = datum.input.spans[0].feature
        feature.embedding_mask = bytes([1]) * (feature.token_count - 1) + b"\0"

    def of_unknown(datum: trainer_pb2.Datum) -> None:
        change(datum)
        datum.input.spans[0].feature.digest = _copied(qwen3_vl)

    for wrong in (of_unknown, change):
        await _refused(qwen3_vl, model, "image", wrong, "input.spans[0].feature", "the renderer has", InvalidInput, 1)


async def test_renderer_that_is_not_there(qwen3_vl: Bench, model: str) -> None:
    change = _feature(digest="d" * 64, source="127.0.0.1:1")
    await _refused(qwen3_vl, model, "image", change, "", "127.0.0.1:1", FeatureEvicted)


async def test_image_without_source(qwen3_vl: Bench, model: str) -> None:
    change = _feature(digest="c" * 64, source="")
    await _refused(qwen3_vl, model, "image", change, "input.spans[0].feature", "name the renderer", InvalidInput)


async def test_image_for_a_text_model(qwen3: Bench, qwen3_vl: Bench) -> None:
    model_id = await qwen3.adapter()
    with pytest.raises(InvalidInput, match="does not accept images"):
        await qwen3.client.forward_backward(header(model_id, 1), datums_of(qwen3_vl.images, "image")[:1])
    await _still_good(qwen3, model_id)


async def test_unknown_loss_and_config(qwen3_vl: Bench, model: str) -> None:
    datums = datums_of(qwen3_vl.images, "text")
    with pytest.raises(InvalidInput, match="known: cross_entropy, importance_sampling"):
        await qwen3_vl.client.forward_backward(header(model, len(datums), "ppo2"), datums)
    with pytest.raises(InvalidInput, match=r"loss_config.beta is unknown for cross_entropy; known: temperature"):
        await qwen3_vl.client.forward_backward(header(model, len(datums), beta=1.0), datums)
    with pytest.raises(InvalidInput, match=r"loss_inputs.weights is unknown|loss_inputs.logprobs is missing"):
        await qwen3_vl.client.forward_backward(header(model, len(datums), "importance_sampling"), datums)


async def test_streams_out_of_order(qwen3_vl: Bench, model: str) -> None:
    datums = datums_of(qwen3_vl.images, "text")
    record = trainer_pb2.ForwardBackwardRequest
    first, one = record(header=header(model, 2)), record(datum=datums[0])
    wrong = {
        "one header, then datums": [one, first],
        "the stream was empty": [],
        "1 datums were sent": [first, one],
        "more datums were sent": [first, one, one, one],
        "is not in 1": [record(header=header(model, 0))],
        "stream must consist": [first, first],
    }
    async with grpc.aio.insecure_channel(qwen3_vl.process.address) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        for message, records in wrong.items():
            with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
                _ = [answer async for answer in stub.ForwardBackward(iter(records), timeout=30)]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def _copied(bench: Bench) -> str:
    """Returns the digest of a known image's tensors under a name that no rank has cached."""
    known = datums_of(bench.images, "image")[1].input.spans[0].feature.digest
    name = f"{len(bench.images.features):064x}"
    bench.images.features[name] = bench.images.features[known]
    return name


async def _refused(
    bench: Bench,
    model_id: str,
    kind: str,
    change: Change,
    field: str,
    message: str,
    error: type[FoveaError],
    index: int = 0,
) -> None:
    """Sends a call with one invalid datum; the whole call must be refused."""
    datums = datums_of(bench.images, kind)
    good, bad = datums[-1], datums[index]
    change(bad)
    with pytest.raises(error, match=message) as caught:
        await bench.client.forward_backward(header(model_id, 2), [good, bad])
    if field:
        assert (caught.value.field or "").startswith(f"datum[1].{field}")


async def _still_good(bench: Bench, model_id: str) -> None:
    """Checks that the refused call left no gradient and that a valid one works."""
    response = await bench.client.optim_step(model_id, adam())
    assert response.metrics.values["grad_norm:mean"] == 0
    datums = datums_of(bench.images, "text" if bench.kind == "qwen3" else "mixed")
    result = await bench.client.forward_backward(header(model_id, len(datums)), datums)
    assert all(np.isfinite(logprobs_of(output)).all() for output in result.outputs)
