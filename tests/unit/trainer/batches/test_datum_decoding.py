"""Valid datums, and their decoded form."""

from dataclasses import replace

import numpy as np
import pytest

from fovea.api.v1 import model_input_pb2, trainer_pb2
from fovea.wire import tensors
from fovea.wire.errors import InvalidInput
from fovea_trainer.batches.datum_decoding import (
    DatumLimits,
    DatumSize,
    ExpertShape,
    check_digests,
    decode_datum,
)
from fovea_trainer.losses import LOSSES, loss_of
from tests.unit.trainer.losses.traced import square_loss
from tests.vision_families import IMAGE, OPENER, PAD, VIDEO, small_qwen3_vl

LIMITS = DatumLimits(100, 16, small_qwen3_vl())
TEXT_ONLY = DatumLimits(100, 16, None)
SHA = "0" * 64
CROSS_ENTROPY, IMPORTANCE = LOSSES["cross_entropy"]({}), LOSSES["importance_sampling"]({})


EXPERTS = ExpertShape(layers=3, k=3, count=8)


def _datum(tokens: list[int], **inputs: np.ndarray) -> trainer_pb2.Datum:
    return trainer_pb2.Datum(
        input=model_input_pb2.RenderedInput(tokens=tensors.encode_tokens(tokens)),
        loss_inputs={name: tensors.encode(value) for name, value in inputs.items()},
    )


def _with_image(tokens: int, offset: int = 2, length: int = 4, sha256: str = SHA) -> trainer_pb2.Datum:
    ids = [IMAGE if offset <= place < offset + length else 1 for place in range(tokens)]
    datum = _datum(ids, target_tokens=np.zeros(len(ids), np.int64), weights=np.zeros(len(ids), np.float32))
    feature = model_input_pb2.VisionFeature(digest=SHA, token_count=length, tensors_sha256=sha256)
    datum.input.spans.add(offset=offset, length=length, feature=feature)
    datum.input.positions.CopyFrom(tensors.encode(np.ones((3, tokens), np.int32)))
    return datum


def test_flat_targets_become_one_column() -> None:
    given = _datum([1, 2, 3], target_tokens=np.array([4, 5, 6]), weights=np.array([1, 2, 3]))
    datum = decode_datum(given, 0, CROSS_ENTROPY, LIMITS)
    assert datum.flat_targets
    np.testing.assert_array_equal(datum.targets, [[4], [5], [6]])
    np.testing.assert_array_equal(datum.inputs["weights"], np.array([1, 2, 3], np.float32))
    assert datum.inputs["weights"].dtype == np.float32
    assert datum.size == DatumSize(3, 0)


def test_missing_optional_input_is_ones() -> None:
    given = _datum(
        [1, 2], target_tokens=np.array([4, 5]), logprobs=np.zeros(2, np.float32), advantages=np.ones(2, np.float32)
    )
    datum = decode_datum(given, 0, IMPORTANCE, LIMITS)
    np.testing.assert_array_equal(datum.inputs["weights"], np.ones(2))


def test_missing_thresholds_are_the_settings_and_given_ones_come_first() -> None:
    ones = np.ones(2, np.float32)
    policy: dict[str, np.ndarray] = {"target_tokens": np.array([4, 5]), "logprobs": -ones, "advantages": ones}
    loss = LOSSES["ppo"]({"clip_high_threshold": 3.0})
    high = decode_datum(_datum([1, 2], **policy), 0, loss, LIMITS).inputs["clip_high_threshold"]
    np.testing.assert_array_equal(high, [3, 3])
    given = _datum([1, 2], **policy, clip_high_threshold=np.array([1.5, 2.5], np.float32))
    inputs = decode_datum(given, 0, loss, LIMITS).inputs
    np.testing.assert_array_equal(inputs["clip_high_threshold"], [1.5, 2.5])
    np.testing.assert_array_equal(inputs["clip_low_threshold"], np.full(2, 0.8, np.float32))
    low = _datum([1, 2], **policy, clip_low_threshold=np.array([1, 9], np.float32))
    with pytest.raises(InvalidInput, match=r"datum\[3\].loss_inputs.clip_low_threshold is 9 at \[1\]"):
        decode_datum(low, 3, loss, LIMITS)


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
def test_cross_entropy_without_weights_counts_each_target_once(shape: tuple[int, ...]) -> None:
    datum = decode_datum(
        _datum([1, 2, 3], target_tokens=np.ones(shape, np.int64)), 0, LOSSES["cross_entropy"]({}), LIMITS
    )
    np.testing.assert_array_equal(datum.inputs["weights"], np.ones(shape, np.float32))


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_policy_losses_name_what_is_missing_unknown_or_short(name: str) -> None:
    loss = LOSSES[name]({})
    ones = np.ones(3, np.float32)
    good: dict[str, np.ndarray] = {"target_tokens": np.array([4, 5, 6]), "logprobs": -ones, "advantages": ones}
    if name == "gspo":
        good["sequence_ratio_mask"] = ones
    assert set(decode_datum(_datum([1, 2, 3], **good), 0, loss, LIMITS).inputs) == {one.name for one in loss.inputs}
    for missing in good:
        with pytest.raises(InvalidInput, match=rf"loss_inputs.{missing} is missing: {name} requires it"):
            decode_datum(_datum([1, 2, 3], **{key: good[key] for key in good if key != missing}), 0, loss, LIMITS)
    for short in (*(key for key in good if key != "target_tokens"), "weights"):
        with pytest.raises(InvalidInput, match=rf"loss_inputs.{short} has shape \[2\], but must have the shape \[3\]"):
            decode_datum(_datum([1, 2, 3], **{**good, short: ones[:2]}), 0, loss, LIMITS)
    with pytest.raises(InvalidInput, match=rf"loss_inputs.mask is unknown for {name}"):
        decode_datum(_datum([1, 2, 3], **good, mask=ones), 0, loss, LIMITS)
    with pytest.raises(InvalidInput, match=rf"{name} accepts \[N\]"):
        decode_datum(_datum([1, 2, 3], **{**good, "target_tokens": np.zeros((3, 2), np.int64)}), 0, loss, LIMITS)


def test_a_traced_loss_says_what_its_inputs_are() -> None:
    message = square_loss(logprobs=2, beta=0, table=2)
    loss = loss_of(trainer_pb2.ForwardBackwardHeader(loss_function="custom", custom_loss=message))
    table = np.arange(6).reshape(3, 2)
    given = {"target_tokens": np.zeros((2, 4), np.int64), "table": table, "unread": np.ones(1, np.float32)}
    for beta in (np.array(0.5, np.float32), np.array([0.5], np.float32)):  # the SDK omits the shape of a number
        datum = decode_datum(_datum([1, 2], **given, beta=beta), 0, loss, LIMITS)
        assert datum.inputs["beta"].shape == ()
    assert datum.inputs["table"].dtype == np.int64
    np.testing.assert_array_equal(datum.inputs["table"], table)
    assert set(datum.inputs) == {"beta", "table"}
    with pytest.raises(InvalidInput, match=r"loss_inputs.table has shape \[3\], but the loss declares 2 dimensions"):
        decode_datum(_datum([1, 2], **{**given, "table": table[:, 0]}, beta=beta), 0, loss, LIMITS)
    with pytest.raises(InvalidInput, match=r"loss_inputs.beta is missing: custom requires it"):
        decode_datum(_datum([1, 2], **given), 0, loss, LIMITS)
    with pytest.raises(InvalidInput, match=r"custom accepts \[N, K\]"):
        decode_datum(_datum([1, 2], **{**given, "target_tokens": np.zeros(2, np.int64)}, beta=beta), 0, loss, LIMITS)


@pytest.mark.parametrize("placeholder", [IMAGE, VIDEO, PAD])
def test_a_placeholder_in_the_place_of_an_image_is_refused(placeholder: int) -> None:
    inputs = {"target_tokens": np.zeros(3, np.int64), "weights": np.zeros(3, np.float32)}
    with pytest.raises(InvalidInput, match=r"datum\[0\].input.tokens has the image placeholder \d+ at position 2"):
        decode_datum(_datum([1, OPENER, placeholder], **inputs), 0, CROSS_ENTROPY, LIMITS)
    sampled = decode_datum(_datum([OPENER, 1, placeholder], **inputs), 0, CROSS_ENTROPY, LIMITS)
    assert sampled.tokens.tolist() == [OPENER, 1, placeholder]


def test_image_is_counted() -> None:
    datum = decode_datum(_with_image(9), 0, CROSS_ENTROPY, LIMITS)
    assert datum.size == DatumSize(9, 16)
    assert datum.spans[0].embedding_count == 4
    assert datum.positions is not None
    assert datum.positions.shape == (3, 9)


@pytest.mark.parametrize(
    ("datum", "field"),
    [
        (_with_image(9, offset=6), "input.spans[0].offset"),
        (_with_image(9, offset=-1), "input.spans[0].offset"),
        (_with_image(9, length=0), "input.spans[0].feature.token_count"),
        (_with_image(9, sha256=""), "input.spans[0].feature.tensors_sha256"),
        (_with_image(17), "input.tokens"),
    ],
)
def test_bad_images_are_named(datum: trainer_pb2.Datum, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode_datum(datum, 7, CROSS_ENTROPY, LIMITS)
    assert caught.value.field == f"datum[7].{field}"
    assert caught.value.message.startswith(f"datum[7].{field} ")


def test_overlapping_images_are_refused() -> None:
    datum = _with_image(12)
    datum.input.spans.add().CopyFrom(datum.input.spans[0])
    datum.input.spans[1].offset = 5
    with pytest.raises(InvalidInput, match=r"must lie in 6 \.\. 11"):
        decode_datum(datum, 0, CROSS_ENTROPY, LIMITS)


def test_one_digest_has_one_set_of_tensors() -> None:
    datums = [_with_image(9), _with_image(9, sha256="1" * 64)]
    decoded = [decode_datum(datum, index, CROSS_ENTROPY, LIMITS) for index, datum in enumerate(datums)]
    check_digests([decoded[0], decoded[0]])
    with pytest.raises(InvalidInput, match=r"datum\[1\].*is 1+, but the same digest came with 0+ earlier"):
        check_digests(decoded)


def test_image_without_positions_is_refused() -> None:
    datum = _with_image(9)
    datum.input.ClearField("positions")
    with pytest.raises(InvalidInput, match="positions is missing"):
        decode_datum(datum, 0, CROSS_ENTROPY, LIMITS)


def test_text_model_takes_neither_images_nor_positions() -> None:
    datum = _with_image(9)
    with pytest.raises(InvalidInput, match="does not accept images"):
        decode_datum(datum, 0, CROSS_ENTROPY, TEXT_ONLY)
    del datum.input.spans[:]
    with pytest.raises(InvalidInput, match="no multimodal RoPE"):
        decode_datum(datum, 0, CROSS_ENTROPY, TEXT_ONLY)


def test_many_targets_only_where_the_loss_takes_them() -> None:
    many = {"target_tokens": np.zeros((2, 3), np.int64)}
    soft = decode_datum(_datum([1, 2], **many, weights=np.ones((2, 3), np.float32)), 0, CROSS_ENTROPY, LIMITS)
    assert soft.targets.shape == (2, 3)
    assert not soft.flat_targets
    with pytest.raises(InvalidInput, match=r"importance_sampling accepts \[N\]"):
        decode_datum(_datum([1, 2], **many), 0, IMPORTANCE, LIMITS)


def _routed(experts: np.ndarray) -> trainer_pb2.Datum:
    targets = {"target_tokens": np.array([4, 5]), "weights": np.ones(2, np.float32)}
    return _datum([1, 2], **targets, routed_experts=experts)


def test_experts_come_as_they_are_or_packed_into_words() -> None:
    limits = replace(TEXT_ONLY, experts=EXPERTS)
    ids = np.stack([np.random.default_rng(place).permutation(8)[:3] for place in range(6)]).reshape(2, 3, 3)
    packed = np.zeros((2, 16), np.uint8)
    packed[:, :9] = ids.reshape(2, 9)
    for given in (ids.astype(np.int64), ids.astype(np.int32), ids.astype(np.uint8), packed.view(np.int64)):
        experts = decode_datum(_routed(given), 0, CROSS_ENTROPY, limits).experts
        assert experts is not None
        assert experts.dtype == np.int16
        np.testing.assert_array_equal(experts, ids)
    many = replace(TEXT_ONLY, experts=replace(EXPERTS, count=300))
    words = np.zeros((2, 10), np.int32)
    words[:, :9] = (ids + 290).reshape(2, 9)
    experts = decode_datum(_routed(words.view(np.int64)), 0, CROSS_ENTROPY, many).experts
    assert experts is not None
    np.testing.assert_array_equal(experts, ids + 290)
    assert decode_datum(_datum([1], target_tokens=np.array([4])), 0, CROSS_ENTROPY, limits).experts is None


@pytest.mark.parametrize(
    ("experts", "problem"),
    [
        (
            np.zeros((2, 3, 2), np.int64),
            r"has type int64 and shape \[2, 3, 2\]; it must hold ids as int64 \[2, 3, 3\], or .* uint8 .* \[2, 2\]",
        ),
        (np.zeros((2, 3, 3), np.float32), "has type float32"),
        (np.zeros((1, 2), np.int64), r"has type int64 and shape \[1, 2\]"),
        (np.full((2, 3, 3), -1), r"has expert -1 at \[0, 0, 0\]; experts are 0 .. 7"),
        (np.arange(18).reshape(2, 3, 3), r"has expert 8 at \[0, 2, 2\]"),
        (np.zeros((2, 2), np.int64), r"names an expert twice at \[0, 0\]"),
    ],
)
def test_other_experts_are_refused_by_name(experts: np.ndarray, problem: str) -> None:
    with pytest.raises(InvalidInput, match=rf"datum\[5\].loss_inputs.routed_experts {problem}"):
        decode_datum(_routed(experts), 5, CROSS_ENTROPY, replace(TEXT_ONLY, experts=EXPERTS))


def test_a_dense_model_takes_no_experts() -> None:
    with pytest.raises(InvalidInput, match=r"loss_inputs.routed_experts is set, but the model has no experts"):
        decode_datum(_routed(np.zeros((2, 3, 3), np.int64)), 0, CROSS_ENTROPY, TEXT_ONLY)


def _supported(packed: bytes, targets: np.ndarray) -> trainer_pb2.Datum:
    support = np.frombuffer(packed, np.uint8)
    return _datum([1, 2, 3], target_tokens=targets, sampled_support=support)


def test_a_support_is_unpacked() -> None:
    packed = tensors.FULL_ROW + tensors.pack_support(np.array([5, 7, 6]), np.array([0, 2, 3]))
    datum = decode_datum(_supported(packed, np.array([4, 5, 6])), 0, CROSS_ENTROPY, LIMITS)
    assert datum.support is not None
    assert datum.support.ids.tolist() == [5, 7, 6]
    assert datum.support.offsets.tolist() == [0, 0, 2, 3]
    two = decode_datum(_supported(packed, np.array([[4, 9], [5, 7], [6, 6]])), 0, CROSS_ENTROPY, LIMITS)
    assert two.support is not None


@pytest.mark.parametrize(
    ("rows", "targets", "problem"),
    [
        ([[], [5, 7]], [4, 5, 6], "has 2 rows, but the input has 3 tokens"),
        ([[], [5, 100], []], [4, 5, 6], "token id 100"),
        ([[], [5, 7], [5]], [4, 5, 6], "does not contain the target 6 in row 2"),
        ([[], [5, 7], []], [[4, 4], [5, 6], [1, 1]], "does not contain the target 6 in row 1"),
        ([[], [1, 7], []], [4, 99, 6], "does not contain the target 99 in row 1"),
    ],
)
def test_a_support_that_does_not_fit_is_refused(rows: list[list[int]], targets: list[int], problem: str) -> None:
    ids = np.array([i for row in rows for i in row])
    packed = tensors.pack_support(ids, np.cumsum([0, *map(len, rows)]))
    with pytest.raises(InvalidInput, match=problem) as caught:
        decode_datum(_supported(packed, np.array(targets)), 3, CROSS_ENTROPY, LIMITS)
    assert caught.value.field == "datum[3].loss_inputs.sampled_support"


@pytest.mark.parametrize("given", [np.array([1, 0]), np.array([[1, 0]], np.uint8), np.array([1], np.uint8)])
def test_a_support_that_is_not_packed_is_refused(given: np.ndarray) -> None:
    datum = _datum([1], target_tokens=np.array([4]), sampled_support=given)
    with pytest.raises(InvalidInput, match="packed"):
        decode_datum(datum, 0, CROSS_ENTROPY, LIMITS)
