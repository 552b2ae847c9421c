"""Options for a prompt's distributions, and their limits within one message."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.api.v1 import sampler_pb2
from fovea.wire import tensors
from fovea.wire.conventions import MESSAGE_BYTES
from fovea.wire.errors import InvalidInput
from fovea_sampler.engine_api import Limits, SampleSpec
from fovea_sampler.sample_validation import read_request

LIMITS = Limits(
    vocabulary_size=100, max_context=100_000, max_sample_count=1, max_top_logprobs=64, max_images=0, max_image_tokens=0
)


def request(length: int = 4, **fields: int | bool) -> sampler_pb2.SampleRequest:
    """Returns a prompt of `length` tokens."""
    result = sampler_pb2.SampleRequest(sample_count=1, **fields)  # type: ignore[arg-type]
    result.prompt.tokens = tensors.encode_tokens([1] * length)
    return result


def read(wanted: sampler_pb2.SampleRequest) -> SampleSpec:
    """Returns the checked request."""
    return read_request(wanted, LIMITS, None)


def with_targets(wanted: sampler_pb2.SampleRequest, ids: list[int], offsets: list[int]) -> sampler_pb2.SampleRequest:
    """Adds target tokens."""
    wanted.target_tokens.token_ids.CopyFrom(tensors.encode(np.asarray(ids, dtype=np.int32)))
    wanted.target_tokens.row_offsets.CopyFrom(tensors.encode(np.asarray(offsets, dtype=np.int64)))
    return wanted


def test_nothing_is_asked_for() -> None:
    spec = read(request())
    assert not spec.scores_prompt
    assert spec.targets is None


def test_all_is_asked_for() -> None:
    wanted = with_targets(
        request(prompt_logprobs=True, prompt_logprobs_last_n=3, alt_token_count=64, top_prompt_logprobs=2),
        [0, 99, 99],
        [0, 2, 2, 3],
    )
    spec = read(wanted)
    assert spec.targets is not None
    assert spec.targets.token_ids.tolist() == [0, 99, 99]
    assert spec.targets.row_offsets.tolist() == [0, 2, 2, 3]
    assert (spec.request.prompt_logprobs_last_n, spec.request.alt_token_count, spec.scores_prompt) == (3, 64, True)


@pytest.mark.parametrize("field", ["prompt_logprobs", "top_prompt_logprobs", "alt_token_count"])
def test_each_option_scores_the_prompt(field: str) -> None:
    assert read(request(**{field: 1})).scores_prompt
    assert read(with_targets(request(), [5], [0, 0, 0, 1])).scores_prompt


@given(ids=st.lists(st.integers(-2, 101), max_size=3), offsets=st.lists(st.integers(-1, 4), min_size=3, max_size=5))
def test_only_sound_targets_pass(ids: list[int], offsets: list[int]) -> None:
    wanted = with_targets(request(), ids, offsets)
    sound = (
        bool(ids)
        and all(0 <= token < 100 for token in ids)
        and len(offsets) == 4
        and (offsets[0], offsets[-1]) == (0, len(ids))
        and sorted(offsets) == offsets
    )
    if sound:
        targets = read(wanted).targets
        assert targets is not None
        assert targets.token_ids.tolist() == ids
    else:
        with pytest.raises(InvalidInput) as caught:
            read(wanted)
        assert caught.value.field
        assert caught.value.field.startswith("target_tokens.")


def test_targets_without_tensors() -> None:
    wanted = request()
    wanted.target_tokens.SetInParent()
    with pytest.raises(InvalidInput, match=r"target_tokens\.token_ids\.element_type 0"):
        read(wanted)


@pytest.mark.parametrize("token_count", [1, 2])
def test_targets_of_a_prompt_of_one_token(token_count: int) -> None:
    """It has no position to score."""
    with pytest.raises(InvalidInput, match="row_offsets"):
        read(with_targets(request(1), [1] * token_count, [0]))


@given(last_n=st.integers(-3, 6), logprobs=st.booleans(), top=st.integers(0, 1))
def test_last_n(last_n: int, logprobs: bool, top: int) -> None:
    wanted = request(prompt_logprobs=logprobs, top_prompt_logprobs=top, prompt_logprobs_last_n=last_n)
    if last_n == 0 or (0 < last_n < 4 and logprobs):
        assert read(wanted).request.prompt_logprobs_last_n == last_n
    else:
        with pytest.raises(InvalidInput) as caught:
            read(wanted)
        assert caught.value.field == "prompt_logprobs_last_n"


def test_last_n_of_a_prompt_of_one_token() -> None:
    with pytest.raises(InvalidInput, match="between 1 and 0"):
        read(request(1, prompt_logprobs=True, prompt_logprobs_last_n=1))


@pytest.mark.parametrize("field", ["alt_token_count", "top_prompt_logprobs"])
@pytest.mark.parametrize("count", [-1, 65])
def test_counts(field: str, count: int) -> None:
    with pytest.raises(InvalidInput, match=f"{field} is {count}, must be between 0 and 64") as caught:
        read(request(**{field: count}))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "target_count", "field"),
    [
        ({"alt_token_count": 18}, 0, "alt_token_count"),
        ({"alt_token_count": 9, "top_prompt_logprobs": 9}, 0, "top_prompt_logprobs"),
        ({}, 1_030_000, "target_tokens"),
        ({"alt_token_count": 1}, 1_000_000, "alt_token_count"),
    ],
)
def test_what_does_not_fit_into_a_message(fields: dict[str, int], target_count: int, field: str) -> None:
    wanted = request(30_000, **fields)
    if target_count:
        with_targets(wanted, [1] * target_count, [0] * 29_999 + [target_count])
    with pytest.raises(InvalidInput, match="at most") as caught:
        read(wanted)
    assert caught.value.field == field


@given(
    length=st.integers(2, 60_000),
    alt=st.integers(0, 64),
    top=st.integers(0, 64),
    logprobs=st.booleans(),
    target_count=st.integers(0, 100_000),
)
def test_whatever_passes_fits_into_a_message(
    length: int, alt: int, top: int, logprobs: bool, target_count: int
) -> None:
    wanted = request(length, alt_token_count=alt, top_prompt_logprobs=top, prompt_logprobs=logprobs)
    if target_count:
        with_targets(wanted, [1] * target_count, [0] * (length - 1) + [target_count])
    try:
        read(wanted)
    except InvalidInput:
        return
    cells = np.zeros((length, top), np.int32), np.zeros((length - 1, alt), np.int32)
    facts = sampler_pb2.PromptResult(
        logprobs=bytes(4 * length * logprobs),
        top_logprobs=sampler_pb2.TopLogprobs(token_ids=tensors.encode(cells[0]), logprobs=tensors.encode(cells[0])),
        target_logprobs=bytes(4 * target_count),
        alt_tokens=sampler_pb2.AltTokens(token_ids=tensors.encode(cells[1]), logprobs=tensors.encode(cells[1])),
    )
    assert sampler_pb2.SampleResponse(prompt=facts).ByteSize() <= MESSAGE_BYTES
