"""stable_reinforce on recorded samples through the official SDK: it trains on the sampler's record."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tinker
from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan
from transformers import PreTrainedTokenizerBase

from tests.e2e.prompts import Prompt, PromptBuilder
from tests.e2e.stack import Stack
from tests.e2e.test_bad_input import assert_user_error
from tests.unit.trainer.losses import loss_references

LOSS: Any = "stable_reinforce"
PARAMS = tinker.SamplingParams(max_tokens=16, temperature=0.7, seed=3)


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    catalogue = PromptBuilder(tokenizer).catalogue()
    return [catalogue[name] for name in ("text", "one image", "150x224")]


def _floats(values: Any) -> tinker.TensorData:
    return tinker.TensorData(data=[float(value) for value in values], dtype="float32", shape=[len(values)])


def datum_of(
    prompt: Prompt, sequence: tinker.SampledSequence, advantage: float = 1.0, first: int | None = None
) -> tinker.Datum:
    """Returns a datum as the cookbook's rl_loop makes it, but with wrong log-probabilities of the client.

    With `first`, it claims another first sampled token.
    """
    tokens = list(sequence.tokens) if first is None else [first, *sequence.tokens[1:]]
    before, count = len(prompt.ids) - 1, len(tokens)
    targets = [0] * before + tokens
    datum = tinker.Datum(
        model_input=prompt.model_input.append(tinker.EncodedTextChunk(tokens=tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "logprobs": _floats([-5.0] * len(targets)),
            "advantages": _floats([0.0] * before + [advantage] * count),
        },
    )
    name = sequence.sequence_id
    return replace(
        datum,
        model_input_spans=[
            PromptProvenanceSpan(sequence_id=name, length=before + 1),
            SampledProvenanceSpan(sequence_id=name, length=count - 1),
        ],
        loss_fn_input_spans=[
            PromptProvenanceSpan(sequence_id=name, offset=1, length=before),
            SampledProvenanceSpan(sequence_id=name, length=count),
        ],
    )


def _trained(service: tinker.ServiceClient, stack: Stack) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=stack.model_name, rank=8).result()


def _sample(sampler: tinker.SamplingClient, prompt: Prompt, count: int = 1) -> list[tinker.SampledSequence]:
    return list(sampler.sample(prompt.model_input, count, PARAMS).result().sequences)


def test_what_the_sampler_recorded_is_trained_on(
    service: tinker.ServiceClient, stack: Stack, prompts: list[Prompt]
) -> None:
    """At the sampling temperature every ratio is 1 until a step; afterwards the loss follows its formula."""
    training = _trained(service, stack)
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
    sampled = [sequence for prompt in prompts for sequence in _sample(sampler, prompt, 2)]
    advantages = [1.0, -1.0] * len(prompts)
    whose = [prompt for prompt in prompts for _ in range(2)]
    data = [datum_of(*each) for each in zip(whose, sampled, advantages, strict=True)]
    first = training.forward_backward(data, LOSS, {"kl_coeff": 0.1}).result()
    assert first.metrics["ratio:max"] == pytest.approx(1, abs=1e-4)
    assert first.metrics["sampler_kl:sum"] == pytest.approx(0, abs=1e-3)
    assert first.metrics["policy_tokens:sum"] == sum(len(sequence.tokens) for sequence in sampled)
    training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    for config in ({}, {"kl_coeff": 0.5}, {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05, "max_weight": 1.0}):
        result = training.forward(data, LOSS, config).result()
        expected = 0.0
        for datum, sequence, output in zip(data, sampled, result.loss_fn_outputs, strict=True):
            lp = np.array(output["logprobs"].data, np.float64)
            assert sequence.logprobs is not None
            count = len(sequence.tokens)
            given = {
                "advantages": np.array(datum.loss_fn_inputs["advantages"].data, np.float64),
                "logprobs": np.r_[np.zeros(len(lp) - count), sequence.logprobs],
                "sampled": np.r_[np.zeros(len(lp) - count), np.ones(count)],
            }
            expected += loss_references.REFERENCES[LOSS](lp, given, config, lp)
        assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-3, abs=1e-3)
        assert result.metrics["ratio:max"] > 1.001


@pytest.mark.parametrize("options", [{"top_p": 0.8}, {"top_k": 5, "temperature": 1.3}])
def test_truncated_samples_are_trained_over_their_support(
    service: tinker.ServiceClient, stack: Stack, prompts: list[Prompt], options: dict[str, Any]
) -> None:
    """All ratios are 1, as without truncation; over the whole vocabulary they are not."""
    training = _trained(service, stack)
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
    params = PARAMS.model_copy(update=options)
    data = []
    for prompt in prompts:
        (sequence,) = sampler.sample(prompt.model_input, 1, params).result().sequences
        data.append(datum_of(prompt, sequence))
    metrics = training.forward(data, LOSS).result().metrics
    assert metrics["ratio:max"] == pytest.approx(1, abs=1e-4)
    assert metrics["sampler_kl:sum"] == pytest.approx(0, abs=1e-3)


def test_turns_of_one_conversation(service: tinker.ServiceClient, stack: Stack, prompts: list[Prompt]) -> None:
    """A datum may hold several sequences, with text between them that a later request had in its prompt."""
    training = _trained(service, stack)
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
    (one,) = _sample(sampler, prompts[1])
    said = [5, 6, 7]
    longer = prompts[1].model_input.append(tinker.EncodedTextChunk(tokens=one.tokens + said))
    two = sampler.sample(longer, 1, PARAMS).result().sequences[0]
    start = len(prompts[1].ids)
    spans: list[Any] = [
        PromptProvenanceSpan(sequence_id=one.sequence_id, length=start),
        SampledProvenanceSpan(sequence_id=one.sequence_id, length=len(one.tokens)),
        PromptProvenanceSpan(sequence_id=two.sequence_id, offset=start + len(one.tokens), length=len(said)),
        SampledProvenanceSpan(sequence_id=two.sequence_id, length=len(two.tokens) - 1),
    ]
    ends = [replace(spans[0], offset=1, length=start - 1), *spans[1:3], replace(spans[3], length=len(two.tokens))]
    targets = [*prompts[1].ids[1:], *one.tokens, *said, *two.tokens]
    sampled = [0.0] * (start - 1) + [1.0] * len(one.tokens) + [0.0] * len(said) + [1.0] * len(two.tokens)
    datum = tinker.Datum(
        model_input=longer.append(tinker.EncodedTextChunk(tokens=two.tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "advantages": _floats(sampled),
        },
    )
    # The cookbook's targets are 0 in image slots. Here they are placeholder ids, which prompts may not contain.
    targets[: start - 1] = [0] * (start - 1)
    datum = replace(datum, model_input_spans=spans, loss_fn_input_spans=ends)
    datum.loss_fn_inputs["target_tokens"] = tinker.TensorData(data=targets, dtype="int64", shape=[len(targets)])
    result = training.forward_backward([datum], LOSS).result()
    assert result.metrics["ratio:max"] == pytest.approx(1, abs=1e-4)
    assert result.metrics["policy_tokens:sum"] == len(one.tokens) + len(two.tokens)


def _with_spans(datum: tinker.Datum, change: Callable[[Any], Any]) -> tinker.Datum:
    assert datum.model_input_spans is not None
    assert datum.loss_fn_input_spans is not None
    return replace(
        datum,
        model_input_spans=[change(span) for span in datum.model_input_spans],
        loss_fn_input_spans=[change(span) for span in datum.loss_fn_input_spans],
    )


def test_refusals(service: tinker.ServiceClient, stack: Stack, prompts: list[Prompt]) -> None:
    """Each is a user error that names the datum; the client can continue."""
    training = _trained(service, stack)
    recording = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
    plain = training.save_weights_and_get_sampling_client().result()
    prompt = prompts[0]
    (sequence,) = _sample(recording, prompt)
    (unrecorded,) = _sample(plain, prompt)
    good = datum_of(prompt, sequence)
    with stack.service_client() as other:
        theirs = _trained(other, stack).save_weights_and_get_sampling_client(record_stability_info=True).result()
        (foreign,) = _sample(theirs, prompt)
    lying = replace(
        good, loss_fn_inputs={**good.loss_fn_inputs, "advantages": _floats([1.0] * good.model_input.length)}
    )
    cases: list[tuple[tinker.Datum, dict[str, Any], str]] = [
        (replace(good, model_input_spans=None, loss_fn_input_spans=None), {}, r"data\[0\] has no provenance spans"),
        (datum_of(prompt, unrecorded), {}, "has not recorded within the last day"),
        (datum_of(prompt, foreign), {}, "has not recorded within the last day"),
        (_with_spans(good, lambda span: replace(span, sequence_id="none")), {}, "names sequence 'none'"),
        (
            datum_of(prompt, sequence, first=sequence.tokens[0] ^ 1),
            {},
            r"data\[0\]\.\w+_spans\[1\] says that position \d+ is sampled token 0",
        ),
        (_with_spans(good, lambda span: replace(span, offset=span.offset + 1)), {}, r"but sequence .* has \d+"),
        (lying, {}, r"data\[0\]\.loss_fn_inputs\.advantages is 1 at \[0\], but that target was not sampled"),
        (good, {"temperature": 1.0}, r"temperature is 1, but the sequences of data were sampled at 0\.7"),
        (good, {"kl_coeff": -1.0}, r"kl_coeff is -1\.0, but must be 0 or more"),
        (good, {"kl_coeff": "high"}, r"kl_coeff is 'high'; stable_reinforce accepts numbers only"),
        (good, {"beta": 1.0}, r"beta is unknown for stable_reinforce; known: .*kl_coeff"),
    ]
    for datum, config, words in cases:
        with pytest.raises(tinker.RequestFailedError, match=words) as caught:
            training.forward([datum], LOSS, config).result()
        assert_user_error(caught.value)
    assert training.forward([good], LOSS).result().metrics["ratio:max"] == pytest.approx(1, abs=1e-4)
