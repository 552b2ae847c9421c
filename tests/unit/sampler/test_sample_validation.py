"""Limits of a request. The end-to-end tests show that the engine survives refused ones; this is the whole table."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.api.v1 import sampler_pb2
from fovea.wire import tensors
from fovea.wire.errors import ContextOverflow, InvalidInput
from fovea_sampler.engine_api import Limits, sequence_seed
from fovea_sampler.sample_validation import read_request
from tests.vision_families import IMAGE, OPENER, PAD, VIDEO, small_qwen3_vl

VISION = small_qwen3_vl()
LIMITS = Limits(
    vocabulary_size=100, max_context=50, max_sample_count=4, max_top_logprobs=5, max_images=2, max_image_tokens=8
)
SHA = "0" * 64


def request(image_count: int = 1) -> sampler_pb2.SampleRequest:
    """Returns two tokens, then images of four tokens with a token after each."""
    result = sampler_pb2.SampleRequest(request_id="r", sample_count=1)
    ids = [1, 2]
    for _ in range(image_count):
        span = result.prompt.spans.add(offset=len(ids), length=4)
        span.feature.CopyFrom(type(span.feature)(digest=SHA, token_count=4, tensors_sha256=SHA))
        ids += [IMAGE] * 4 + [3]
    result.prompt.tokens = tensors.encode_tokens(ids)
    return result


def test_a_good_request() -> None:
    wanted = request(2)
    wanted.params.seed = -3
    spec = read_request(wanted, LIMITS, VISION)
    assert spec.tokens.tolist() == [1, 2, 90, 90, 90, 90, 3, 90, 90, 90, 90, 3]
    assert [(span.offset, span.length) for span in spec.spans] == [(2, 4), (7, 4)]
    assert spec.params == sampler_pb2.SamplingParams(
        max_tokens=38, temperature=1, top_p=1, top_k=-1, seed=-3, min_p=0, presence_penalty=0, frequency_penalty=0,
        repetition_penalty=1,
    )  # fmt: skip


@pytest.mark.parametrize(("length", "max_tokens"), [(50, None), (51, None), (49, 2), (1, 50), (1, 2**31 - 1)])
def test_the_context(length: int, max_tokens: int | None) -> None:
    wanted = sampler_pb2.SampleRequest(sample_count=1)
    wanted.prompt.tokens = tensors.encode_tokens([1] * length)
    if max_tokens is not None:
        wanted.params.max_tokens = max_tokens
    asked = 1 if max_tokens is None else max_tokens
    pattern = rf"^Prompt length plus max_tokens exceeds the context: {length} prompt tokens \+ {asked} max_tokens > 50$"
    with pytest.raises(ContextOverflow, match=pattern):
        read_request(wanted, LIMITS, VISION)


def test_cache_salts() -> None:
    wanted = request()
    assert read_request(wanted, LIMITS, VISION).request.cache_salt == ""
    wanted.cache_salt = "o" * 256
    assert read_request(wanted, LIMITS, VISION).request.cache_salt == "o" * 256
    wanted.cache_salt += "o"
    with pytest.raises(InvalidInput, match="257 characters") as caught:
        read_request(wanted, LIMITS, VISION)
    assert caught.value.field == "cache_salt"


def test_the_context_may_be_filled() -> None:
    wanted = sampler_pb2.SampleRequest(sample_count=1)
    wanted.prompt.tokens = tensors.encode_tokens([1] * 49)
    assert read_request(wanted, LIMITS, VISION).params.max_tokens == 1


@pytest.mark.parametrize("video", [IMAGE, VIDEO, PAD])
def test_a_placeholder_in_the_place_of_an_image(video: int) -> None:
    wanted = request()
    ids = tensors.decode_tokens(wanted.prompt.tokens).copy()
    ids[:2] = OPENER, video
    wanted.prompt.tokens = tensors.encode_tokens(ids)
    with pytest.raises(InvalidInput, match=rf"tokens has the image placeholder {video} at position 1"):
        read_request(wanted, LIMITS, VISION)


@pytest.mark.parametrize("place", [0, 1, 6])
def test_a_placeholder_that_a_model_sampled(place: int) -> None:
    wanted = request()
    ids = tensors.decode_tokens(wanted.prompt.tokens).copy()
    ids[place] = IMAGE
    wanted.prompt.tokens = tensors.encode_tokens(ids)
    assert read_request(wanted, LIMITS, VISION).tokens.tolist() == ids.tolist()


def test_an_image_above_the_engines_budget() -> None:
    wanted = sampler_pb2.SampleRequest(sample_count=1)
    wanted.prompt.tokens = tensors.encode_tokens([IMAGE] * 16)
    span = wanted.prompt.spans.add(offset=0, length=16)
    feature = request().prompt.spans[0].feature
    feature.token_count = 16
    span.feature.CopyFrom(feature)
    with pytest.raises(InvalidInput, match="at most 8 embeddings per image are allowed"):
        read_request(wanted, LIMITS, VISION)


@given(st.floats(width=32))
def test_temperatures(temperature: float) -> None:
    wanted = request()
    wanted.params.temperature = temperature
    if temperature == 0 or 0.0099999 < temperature <= 2:
        assert read_request(wanted, LIMITS, VISION).params.temperature == temperature
    else:
        with pytest.raises(InvalidInput, match="temperature"):
            read_request(wanted, LIMITS, VISION)


@given(st.floats(width=32))
def test_top_p(top_p: float) -> None:
    wanted = request()
    wanted.params.top_p = top_p
    if not math.isnan(top_p) and 0 < top_p <= 1:
        assert read_request(wanted, LIMITS, VISION).params.top_p == top_p
    else:
        with pytest.raises(InvalidInput, match="top_p"):
            read_request(wanted, LIMITS, VISION)


@pytest.mark.parametrize("first", [0, -50, 2**40, 2**63 - 100])
def test_no_sequence_of_one_seed_is_one_of_another(first: int) -> None:
    draws = [sequence_seed(seed, index) for seed in range(first, first + 100) for index in range(100)]
    assert len(set(draws)) == len(draws)


def test_draws_need_no_seed() -> None:
    wanted = request()
    assert read_request(wanted, LIMITS, VISION).seed_of(0) is None
    wanted.params.seed = 7
    assert read_request(wanted, LIMITS, VISION).seed_of(3) == sequence_seed(7, 3)


def test_a_seed_means_the_same_in_every_release() -> None:
    assert sequence_seed(7, 3) == 3405383674353699258


@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 1000))
def test_seeds_stay_within_63_bits(seed: int, index: int) -> None:
    assert 0 <= sequence_seed(seed, index) < 2**63


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: setattr(r, "sample_count", 0), "sample_count"),
        (lambda r: setattr(r.params, "min_p", 1.5), "params.min_p"),
        (lambda r: setattr(r.params, "presence_penalty", -2.5), "params.presence_penalty"),
        (lambda r: setattr(r.params, "frequency_penalty", math.nan), "params.frequency_penalty"),
        (lambda r: setattr(r.params, "repetition_penalty", 0.0), "params.repetition_penalty"),
        (lambda r: setattr(r.params, "structured_outputs", "[1]"), "params.structured_outputs"),
        (lambda r: setattr(r.params, "structured_outputs", "{"), "params.structured_outputs"),
        (lambda r: setattr(r.params, "structured_outputs", " " * 70_000), "params.structured_outputs"),
        (lambda r: setattr(r, "sample_count", 5), "sample_count"),
        (lambda r: setattr(r, "top_prompt_logprobs", 6), "top_prompt_logprobs"),
        (lambda r: setattr(r, "top_sample_logprobs", -1), "top_sample_logprobs"),
        (lambda r: setattr(r.params, "max_tokens", 0), "params.max_tokens"),
        (lambda r: setattr(r.params, "max_tokens", -1), "params.max_tokens"),
        (lambda r: setattr(r.params, "top_k", 0), "params.top_k"),
        (lambda r: setattr(r.params, "top_k", -2), "params.top_k"),
        (lambda r: r.params.stop.token_ids.append(100), "params.stop.token_ids"),
        (lambda r: r.params.stop.token_ids.append(-1), "params.stop.token_ids"),
        (lambda r: r.params.stop.token_ids.extend([1] * 65), "params.stop.token_ids"),
        (lambda r: r.params.stop.strings.append(""), "params.stop.strings"),
        (lambda r: r.params.stop.strings.append("x" * 1001), "params.stop.strings"),
        (lambda r: r.params.stop.strings.extend(["x"] * 65), "params.stop.strings"),
        (lambda r: r.prompt.spans.add().CopyFrom(r.prompt.spans[0]), "prompt.spans[1].offset"),
        (lambda r: r.prompt.spans.extend([r.prompt.spans[0]] * 2), "prompt.spans"),
        (lambda r: r.prompt.positions.CopyFrom(tensors.encode(np.zeros((3, 6), np.int32))), "prompt.positions"),
        (lambda r: r.prompt.positions.CopyFrom(tensors.encode(np.zeros((3, 7), np.int64))), "prompt.positions"),
        (lambda r: setattr(r.prompt, "tokens", b"abc"), "prompt.tokens"),
        (lambda r: setattr(r.prompt, "tokens", b""), "prompt.tokens"),
    ],
)
def test_the_field_is_named(change: object, field: str) -> None:
    wanted = request()
    change(wanted)  # type: ignore[operator]
    with pytest.raises(InvalidInput) as caught:
        read_request(wanted, LIMITS, VISION)
    assert caught.value.field == field


def test_the_prompts_facts_must_fit_into_a_message() -> None:
    limits = Limits(100, 100_000, 1, 64, 0, 0)
    wanted = sampler_pb2.SampleRequest(sample_count=1, top_prompt_logprobs=20)
    wanted.prompt.tokens = tensors.encode_tokens([1] * 30_000)
    with pytest.raises(InvalidInput, match="at most 16") as caught:
        read_request(wanted, limits, VISION)
    assert caught.value.field == "top_prompt_logprobs"
    wanted.top_prompt_logprobs = 16
    read_request(wanted, limits, VISION)


def test_experts_are_told_where_there_are_any_and_they_fit() -> None:
    wanted = sampler_pb2.SampleRequest(sample_count=1, routed_experts=True)
    wanted.prompt.tokens = tensors.encode_tokens([1] * 9_000)
    with pytest.raises(InvalidInput, match="routed_experts is set, but the model has no experts; leave it out") as none:
        read_request(wanted, Limits(100, 100_000, 1, 64, 0, 0, 0, "the model has no experts"), None)
    assert none.value.field == "routed_experts"
    limits = Limits(100, 100_000, 1, 64, 0, 0, expert_row_bytes=384)
    wanted.params.max_tokens = 1_600
    assert read_request(wanted, limits, None).request.routed_experts
    wanted.params.max_tokens = 1_700
    with pytest.raises(InvalidInput, match=r"experts of at most 106.. tokens; the prompt and max_tokens are 10700"):
        read_request(wanted, limits, None)


def test_a_text_model_takes_no_images() -> None:
    with pytest.raises(InvalidInput, match="does not accept images"):
        read_request(request(), LIMITS, None)
