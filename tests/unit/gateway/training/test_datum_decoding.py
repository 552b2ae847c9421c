"""Decoding of Tinker's requests as the SDK encodes them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from fovea.api.v1 import model_input_pb2
from fovea.tinker.v1 import tinker_pb2
from fovea.wire import tensors
from fovea.wire.errors import InvalidInput, Unimplemented
from fovea_gateway.http.model_inputs import ModelInput, input_from_json
from fovea_gateway.http.request_body import peek_address
from fovea_gateway.training.batches import LossRequest, blob_of_body, blob_of_messages, request_from_blob
from fovea_gateway.training.training_wire import (
    check_dense_size,
    data_from_proto,
    datum_from_proto,
    header_from_proto,
    loss_config_from_proto,
    tensor_from_proto,
)

ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)
text = ids.map(lambda tokens: types.EncodedTextChunk(tokens=tokens))
image = st.builds(
    types.ImageChunk,
    data=st.binary(max_size=50),
    format=st.sampled_from(["png", "jpeg"]),
    expected_tokens=st.none() | st.integers(1, 9000),
)
chunks = st.lists(text | image, max_size=5)
names = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=8)


@st.composite
def tensor(draw: st.DrawFn) -> types.TensorData:
    """Draws a dense tensor of one or two dimensions, or a CSR tensor."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([np.float32, np.int64]))
    values = draw(st.lists(st.integers(-3, 3), min_size=rows * columns, max_size=rows * columns))
    array = np.array(values, dtype).reshape(rows, columns)
    if draw(st.booleans()):
        import torch

        return types.TensorData.from_torch_sparse(torch.from_numpy(array))
    return types.TensorData.from_numpy(array if draw(st.booleans()) else array.ravel())


def encode(data: list[types.Datum], **more: Any) -> tinker_pb2.ForwardBackwardRequest:
    """Encodes a request as the SDK does, parsed by our own copy of the schema."""
    request = ForwardBackwardRequest(
        model_id="sess-1:train:0",
        seq_id=more.pop("seq_id", 3),
        forward_backward_input=ForwardBackwardInput(data=data, loss_fn="cross_entropy", **more),
    )
    return tinker_pb2.ForwardBackwardRequest.FromString(forward_backward_request_to_proto(request).SerializeToString())


def assert_same_chunks(sent: list[Any], decoded: model_input_pb2.ModelInput) -> None:
    assert len(sent) == len(decoded.chunks)
    for chunk, message in zip(sent, decoded.chunks, strict=True):
        if isinstance(chunk, types.EncodedTextChunk):
            assert tensors.decode_tokens(message.tokens.tokens).tolist() == list(chunk.tokens)
            assert message.WhichOneof("kind") == "tokens"
        else:
            expected = message.image.expected_token_count if message.image.HasField("expected_token_count") else None
            assert (message.image.data, expected) == (chunk.data, chunk.expected_tokens)
            name = model_input_pb2.ImageFormat.Name(message.image.format)
            assert name == f"IMAGE_FORMAT_{chunk.format.upper()}"


@given(chunks, st.dictionaries(names, tensor(), max_size=3))
def test_datums_arrive_as_they_were_sent(sent: list[Any], loss_inputs: dict[str, types.TensorData]) -> None:
    datum = types.Datum(model_input=types.ModelInput(chunks=sent), loss_fn_inputs=loss_inputs)
    decoded = datum_from_proto(encode([datum]).data[0], "data[0]")
    assert_same_chunks(sent, decoded.input)
    assert set(decoded.loss_inputs) == set(loss_inputs)
    for name, value in loss_inputs.items():
        array = tensors.decode(decoded.loss_inputs[name])
        np.testing.assert_array_equal(array, value.to_numpy())
        assert array.dtype == value.to_numpy().dtype


@given(chunks)
def test_json_prompts_arrive_as_they_were_sent(sent: list[Any]) -> None:
    dumped = types.ModelInput(chunks=sent).model_dump_json()
    assert_same_chunks(sent, input_from_json(ModelInput.model_validate_json(dumped)))


@given(st.integers(1, 2**31 - 1), chunks)
def test_address_is_read_from_the_start_of_a_body(seq_id: int, sent: list[Any]) -> None:
    body = encode([types.Datum(model_input=types.ModelInput(chunks=sent), loss_fn_inputs={})], seq_id=seq_id)
    blob = body.SerializeToString()
    assert peek_address(blob[:4096]) == ("sess-1:train:0", seq_id)
    assert peek_address(blob[:10]) is None


@given(st.binary(max_size=64))
def test_peeking_into_noise_never_fails(noise: bytes) -> None:
    address = peek_address(noise)
    assert address is None or (isinstance(address[0], str) and address[1] > 0)


def test_sparse_targets_and_weights_have_their_own_patterns() -> None:
    import torch

    targets = torch.zeros(8, 16, dtype=torch.int64)
    weights = torch.zeros(8, 16)
    targets[0, 1], weights[0, 0], weights[3, 2] = 7, 0.5, 1.0
    sparse = {
        "target_tokens": types.TensorData.from_torch_sparse(targets),
        "weights": types.TensorData.from_torch_sparse(weights),
    }
    assert all(value.sparse_crow_indices is not None for value in sparse.values())
    datum = types.Datum(model_input=types.ModelInput.from_ints([1] * 8), loss_fn_inputs=sparse)
    decoded = datum_from_proto(encode([datum]).data[0], "data[0]")
    np.testing.assert_array_equal(tensors.decode(decoded.loss_inputs["target_tokens"]), targets.numpy())
    np.testing.assert_array_equal(tensors.decode(decoded.loss_inputs["weights"]), weights.numpy())


def int64(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [
        (int64(0, 1), int64(0), [2, 2]),
        (int64(1, 1, 1), int64(0), [2, 2]),
        (int64(0, 2, 1), int64(0), [2, 2]),
        (int64(0, 1, 1), int64(2), [2, 2]),
        (int64(0, 1, 1), int64(-1), [2, 2]),
        (int64(0, 1, 1), int64(0, 1), [2, 2]),
        (int64(0, 1, 1), b"abc", [2, 2]),
        (int64(0, 1, 1), int64(0), [2]),
        (int64(0, 1, 1), int64(0), [2, -2]),
        (int64(0, 1, 1), int64(0), [2, 2**40]),
    ],
)
def test_broken_sparse_tensors_are_refused(rows: bytes, columns: bytes, shape: list[int]) -> None:
    csr = tinker_pb2.SparseCsr(values=int64(5), crow_indices=rows, col_indices=columns)
    tensor = tinker_pb2.Tensor(sparse_csr=csr, dtype=tinker_pb2.DTYPE_INT64, shape=shape)
    with pytest.raises(InvalidInput, match=r"data\.target_tokens"):
        tensor_from_proto(tensor, "data.target_tokens")


@pytest.mark.parametrize(
    "tensor",
    [
        tinker_pb2.Tensor(dense=b"1234", dtype=tinker_pb2.DTYPE_BFLOAT16),
        tinker_pb2.Tensor(dense=b"123", dtype=tinker_pb2.DTYPE_FLOAT32),
        tinker_pb2.Tensor(dense=b"1234", dtype=tinker_pb2.DTYPE_FLOAT32, shape=[2]),
        tinker_pb2.Tensor(dense=b"1234", dtype=tinker_pb2.DTYPE_FLOAT32, shape=[-1]),
    ],
)
def test_broken_dense_tensors_are_refused(tensor: tinker_pb2.Tensor) -> None:
    with pytest.raises(InvalidInput, match="weights"):
        tensor_from_proto(tensor, "weights")


def test_newer_loss_config_wins_and_text_is_refused() -> None:
    request = tinker_pb2.ForwardBackwardRequest(loss_fn="dro", loss_fn_config={"beta": 1.0, "old": 3.0})
    assert loss_config_from_proto(request) == ({"beta": 1.0, "old": 3.0}, "")
    request.loss_fn_config_v2["beta"].number = 2.0
    assert loss_config_from_proto(request) == ({"beta": 2.0}, "")
    request.loss_fn_config_v2["loss_id"].text = "x"
    with pytest.raises(InvalidInput, match=r"loss_fn_config\.loss_id is 'x'; dro accepts numbers only"):
        loss_config_from_proto(request)
    request.loss_fn = "custom"
    assert loss_config_from_proto(request) == ({"beta": 2.0}, "x")
    request.loss_fn_config_v2["kind"].text = "y"
    with pytest.raises(InvalidInput, match=r"loss_fn_config\.kind is 'y'"):
        loss_config_from_proto(request)


def test_sparse_targets_and_weights_are_each_made_dense_by_their_own_pattern() -> None:
    """Token id 0 is a valid target, which a client's sparse tensor may omit while its weight is stored (C85)."""
    targets = np.array([[7, 0, 3], [0, 9, 0]])
    weights = np.array([[0.5, 2.0, 0.0], [1.0, 0.0, 0.0]], np.float32)
    for dense in (targets, weights):
        rows, columns = dense.nonzero()
        counts = np.bincount(rows, minlength=2).cumsum()
        csr = tinker_pb2.SparseCsr(
            values=dense[rows, columns].tobytes(),
            crow_indices=np.array([0, *counts], "<i8").tobytes(),
            col_indices=columns.astype("<i8").tobytes(),
        )
        dtype = tinker_pb2.DTYPE_FLOAT32 if dense.dtype.kind == "f" else tinker_pb2.DTYPE_INT64
        made = tensor_from_proto(tinker_pb2.Tensor(sparse_csr=csr, dtype=dtype, shape=[2, 3]), "x")
        np.testing.assert_array_equal(tensors.decode(made), dense)


def test_a_sparse_support_is_packed_and_never_made_dense() -> None:
    csr = tinker_pb2.SparseCsr(crow_indices=int64(0, 0, 2, 3), col_indices=int64(9, 4, 149_999))
    tensor = tinker_pb2.Tensor(sparse_csr=csr, dtype=tinker_pb2.DTYPE_FLOAT32, shape=[3, 150_000])
    datum = tinker_pb2.Datum(loss_fn_inputs={"sampled_support": tensor})
    check_dense_size([datum], 1000)
    packed = tensors.decode(datum_from_proto(datum, "data[0]").loss_inputs["sampled_support"]).tobytes()
    ids, offsets = tensors.unpack_support(packed, "x")
    assert ids.tolist() == [4, 9, 149_999]
    assert offsets.tolist() == [0, 0, 2, 3]


@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [
        (int64(0, 1), int64(5), [1, 5]),
        (int64(0, 2), int64(1), [1, 5]),
        (int64(0, 1), int64(1), [2, 5]),
        (int64(0, 1), int64(1), [1]),
        (int64(0, 1), b"abc", [1, 5]),
        (int64(0, 0), b"", [1, -1]),
    ],
)
def test_a_broken_support_is_refused(rows: bytes, columns: bytes, shape: list[int]) -> None:
    csr = tinker_pb2.SparseCsr(crow_indices=rows, col_indices=columns)
    tensor = tinker_pb2.Tensor(sparse_csr=csr, dtype=tinker_pb2.DTYPE_INT64, shape=shape)
    with pytest.raises(InvalidInput, match=r"data\[0\]\.loss_fn_inputs\.sampled_support"):
        datum_from_proto(tinker_pb2.Datum(loss_fn_inputs={"sampled_support": tensor}), "data[0]")


def test_what_has_no_meaning_here_is_refused_by_name() -> None:
    dmel = tinker_pb2.Datum(model_input=[tinker_pb2.Chunk(dmel=tinker_pb2.DmelChunk(dmel=b"x"))])
    with pytest.raises(Unimplemented, match=r"chunks\[0\] is a dmel"):
        datum_from_proto(dmel, "data[0]")
    sized = tinker_pb2.ImageChunk(data=b"x", format="png", override_dimensions=tinker_pb2.ImageDimensions(width=1))
    with pytest.raises(Unimplemented, match="override_dimensions"):
        datum_from_proto(tinker_pb2.Datum(model_input=[tinker_pb2.Chunk(image=sized)]), "data[0]")
    with pytest.raises(InvalidInput, match="neither text nor an image"):
        datum_from_proto(tinker_pb2.Datum(model_input=[tinker_pb2.Chunk()]), "data[0]")


@pytest.mark.parametrize("shape", [[0, 2**62], [2**62, 0], [0, 2**63 - 1, 4], [0] * 70, [-1, 0]])
def test_a_shape_that_no_array_has_is_refused_by_name(shape: list[int]) -> None:
    for tensor in (
        tinker_pb2.Tensor(dtype=tinker_pb2.DTYPE_FLOAT32, shape=shape, dense=b""),
        tinker_pb2.Tensor(
            dtype=tinker_pb2.DTYPE_FLOAT32, shape=shape, sparse_csr=tinker_pb2.SparseCsr(crow_indices=bytes(8))
        ),
    ):
        with pytest.raises(InvalidInput, match=r"x\.shape"):
            tensor_from_proto(tensor, "x")


@given(st.lists(st.tuples(chunks, st.dictionaries(names, tensor(), max_size=3)), max_size=3))
def test_a_stored_request_is_read_in_both_forms(sent: list[tuple[list[Any], dict[str, types.TensorData]]]) -> None:
    data = [types.Datum(model_input=types.ModelInput(chunks=one), loss_fn_inputs=inputs) for one, inputs in sent]
    body = encode(data, loss_fn_config={"clip": 0.5})
    header = header_from_proto(body)
    decoded = LossRequest(header, data_from_proto(body, header))
    assert dict(header.loss_config) == {"clip": 0.5}
    assert request_from_blob(blob_of_body(body.SerializeToString())) == decoded
    # The form of requests over gRPC, and of all requests that version 0.1.0 stored.
    assert request_from_blob(blob_of_messages(decoded)) == decoded
