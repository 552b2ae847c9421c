"""Tensors, errors, manifests and features survive the wire, and malformed ones are refused with a reason."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fovea.api.v1 import tensor_pb2, weights_pb2
from fovea.wire import errors, manifest, tensors
from fovea.wire.conventions import PIECE_BYTES

DTYPES = st.sampled_from([np.float32, np.int64, np.int32, np.uint8, np.uint16]).map(np.dtype)


@given(hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)))
def test_a_tensor_comes_back_bit_for_bit(array: np.ndarray) -> None:
    decoded = tensors.decode(tensors.encode(array))
    assert decoded.dtype == array.dtype
    assert decoded.shape == array.shape
    assert decoded.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (tensor_pb2.Tensor(shape=[1], data=b"0000"), "element_type 0"),
        (
            tensor_pb2.Tensor(element_type=1, shape=[2], data=b"0000"),
            "has 4 bytes, but shape \\[2\\] of float32 needs 8",
        ),
        (tensor_pb2.Tensor(element_type=1, shape=[-1], data=b""), "negative size"),
        (tensor_pb2.Tensor(element_type=1, shape=[0, 2**62], data=b""), "is too large"),
        (tensor_pb2.Tensor(element_type=1, shape=[0] * 70, data=b""), "70 dimensions"),
    ],
)
def test_a_malformed_tensor_is_refused_by_name(tensor: tensor_pb2.Tensor, message: str) -> None:
    with pytest.raises(errors.InvalidInput, match=message) as caught:
        tensors.decode(tensor, "weights")
    assert caught.value.field == "weights"


def test_tokens_of_odd_length_are_refused() -> None:
    with pytest.raises(errors.InvalidInput, match="not a multiple of 4"):
        tensors.decode_tokens(b"12345")
    assert tensors.decode_tokens(tensors.encode_tokens([1, -1, 2**31 - 1])).tolist() == [1, -1, 2**31 - 1]
    with pytest.raises(OverflowError):
        tensors.encode_tokens([2**31])


def all_errors(cls: type[errors.FoveaError] = errors.FoveaError) -> list[type[errors.FoveaError]]:
    ours = [child for child in cls.__subclasses__() if child.__module__ == errors.__name__]
    return [leaf for child in ours for leaf in [child, *all_errors(child)]]


@pytest.mark.parametrize("cls", all_errors())
def test_every_error_keeps_its_class_over_grpc_and_pickle(cls: type[errors.FoveaError]) -> None:
    error = cls("what", field="data[0]", seen=3)
    for again in (errors.from_status(errors.to_status(error)), pickle.loads(pickle.dumps(error))):
        assert (type(again), again.message, again.field, again.metadata) == (cls, "what", "data[0]", {"seen": "3"})


def test_reasons_are_unique_and_documented() -> None:
    reasons = [cls.reason for cls in all_errors()]
    assert len(set(reasons)) == len(reasons)
    assert errors.__doc__ is not None
    for cls in all_errors():
        assert f"{cls.__name__} " in errors.__doc__
        line = next(line for line in errors.__doc__.splitlines() if line.strip().startswith(cls.__name__ + " "))
        assert line.split()[1:4] == [cls.code.name, str(cls.http_status), cls.category]


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 200))
def test_buckets_keep_order_and_bound(sizes: list[int], bound: int) -> None:
    specs = [weights_pb2.TensorSpec(name=str(i), dtype="uint8", shape=[size]) for i, size in enumerate(sizes)]
    split = manifest.buckets(specs, bound)
    assert [spec.name for bucket in split for spec in bucket] == [spec.name for spec in specs]
    for bucket in split:
        assert len(bucket) == 1 or sum(map(manifest.padded_bytes, bucket)) <= bound


@pytest.mark.parametrize("rows", [0, 1, 683, 2000])
def test_features_are_cut_and_put_together(rows: int) -> None:
    rng = np.random.default_rng(0)
    sent = {
        "pixel_values": rng.integers(0, 255, (rows, 1536), dtype=np.uint8),
        "image_grid_thw": np.array([[1, rows, 1]]),
    }
    assembler = tensors.FeatureAssembler()
    pieces = list(tensors.iter_pieces("d", sent)) + list(tensors.iter_pieces("e", sent))
    assert all(len(piece.data) <= PIECE_BYTES for piece in pieces)
    complete = [done for piece in pieces if (done := assembler.feed(piece))]
    assert [digest for digest, _ in complete] == ["d", "e"]
    for _, feature in complete:
        assert tensors.tensors_sha256(feature) == tensors.tensors_sha256(sent)


def test_a_stream_that_begins_in_the_middle_is_refused() -> None:
    pieces = list(tensors.iter_pieces("d", {"x": np.zeros((2 * PIECE_BYTES,), np.uint8)}))
    with pytest.raises(errors.Internal, match="without a header"):
        tensors.FeatureAssembler().feed(pieces[1])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/data/ckpt/u/1/adapter_model.safetensors is damaged: cut", "adapter_model.safetensors is damaged: cut"),
        ("/data/ckpt/m/weights/state holds another model", "the checkpoint holds another model"),
        ("uri '/data/ckpt/m/a' does not lie there", "uri 'the checkpoint' does not lie there"),
        ("the disk of /data/ckpt is full, delete some", "the disk of the checkpoints is full, delete some"),
        ("bucket/x/m/state has format 7", "the checkpoint has format 7"),
        ("s3://bucket/x/m/state has no weights.q", "the checkpoint has no weights.q"),
        ("file:///srv/recovery/m/4 cannot be read", "the checkpoint cannot be read"),
        ("/srv/models/tiny/config.json has no rope", "config.json has no rope"),
        ("GET /fovea/api/v1/nothing is not offered", None),
        ("/v1/models does not support the parameter a", None),
        ("https://a.example/b/c.png answers 404", None),
        ("tinker://run/weights/state is no export", None),
        ("the location '/etc/host/name' is no address", None),
        ("/data/ckpt-of-others/a costs 1/2/3 tokens/s", "the checkpoint costs 1/2/3 tokens/s"),
    ],
)
def test_paths_of_the_server_are_hidden_and_nothing_else(text: str, told: str | None) -> None:
    paths = errors.ServerPaths(["/data/ckpt", "s3://bucket/x"])
    error = errors.DiskFull(text, field="uri", place="/data/ckpt")
    hidden = paths.hide(error)
    assert (type(hidden), hidden.message, hidden.field) == (errors.DiskFull, told or text, "uri")
    assert hidden.metadata == {"place": "the checkpoints"}
    assert error.message == text, "the logs must contain it"
