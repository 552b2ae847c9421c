"""Every loss through the official SDK against float64 formulas, on prompts with and without images."""

import numpy as np
import pytest
import tinker
import torch
from transformers import PreTrainedTokenizerBase

from tests.e2e.prompts import Prompt, PromptBuilder
from tests.e2e.stack import Stack
from tests.e2e.test_bad_input import assert_user_error
from tests.unit.trainer.losses import loss_references

CONFIGS: dict[str, dict[str, float]] = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.5},
    "gspo": {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01},
}


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    catalogue = PromptBuilder(tokenizer).catalogue()
    return [catalogue[name] for name in ("text", "one image", "150x224")]


def _tensor(values: np.ndarray) -> tinker.TensorData:
    return tinker.TensorData(data=values.tolist(), dtype="float32", shape=list(values.shape))


def _policy_data(training: tinker.TrainingClient, prompts: list[Prompt], name: str) -> list[tinker.Datum]:
    plain = [prompt.datum() for prompt in prompts]
    scored = training.forward(plain, "cross_entropy").result()
    for seed, (datum, output) in enumerate(zip(plain, scored.loss_fn_outputs, strict=True)):
        random = np.random.default_rng(seed)
        current = np.array(output["logprobs"].data, np.float32)
        datum.loss_fn_inputs["logprobs"] = _tensor(current + random.normal(0, 0.2, current.shape).astype(np.float32))
        datum.loss_fn_inputs["advantages"] = _tensor(random.normal(size=current.shape).astype(np.float32))
        datum.loss_fn_inputs["weights"] = _tensor((random.random(current.shape) > 0.3).astype(np.float32))
        if name == "gspo":
            datum.loss_fn_inputs["sequence_ratio_mask"] = datum.loss_fn_inputs["weights"]
    return plain


def _sampled_datum(prompt: Prompt, sequence: tinker.SampledSequence) -> tinker.Datum:
    """Returns a datum of a sample, with its log-probabilities and advantages of 1."""
    assert sequence.logprobs is not None
    before = len(prompt.ids) - 1
    own = np.array([0.0] * before + [1.0] * len(sequence.tokens), np.float32)
    targets = [0] * before + sequence.tokens
    return tinker.Datum(
        model_input=prompt.model_input.append(tinker.EncodedTextChunk(tokens=sequence.tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "logprobs": _tensor(np.array([0.0] * before + list(sequence.logprobs), np.float32)),
            "advantages": _tensor(own),
            "weights": _tensor(own),
        },
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_policy_losses(service: tinker.ServiceClient, stack: Stack, prompts: list[Prompt], name: str) -> None:
    training = service.create_lora_training_client(base_model=stack.model_name, rank=8).result()
    data = _policy_data(training, prompts, name)
    for config in ({}, CONFIGS[name]):
        result = training.forward_backward(data, name, config).result()  # type: ignore[arg-type]
        expected = 0.0
        for datum, output in zip(data, result.loss_fn_outputs, strict=True):
            lp = np.array(output["logprobs"].data, np.float64)
            given = {key: np.array(value.data, np.float64) for key, value in datum.loss_fn_inputs.items()}
            expected += loss_references.REFERENCES[name](lp, given, config, lp)
        assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert all(key.count(":") == 1 for key in result.metrics)
    step = training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    assert step.metrics is not None
    assert step.metrics["grad_norm:mean"] > 0


def test_a_loss_at_the_temperature_of_sampling(
    service: tinker.ServiceClient, stack: Stack, prompts: list[Prompt]
) -> None:
    """Ratios of fresh samples are 1 at the sampling temperature, and not at another."""
    training = service.create_lora_training_client(base_model=stack.model_name, rank=8).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=24, temperature=0.5, seed=7)
    sampled = [sampler.sample(prompt.model_input, 1, params).result().sequences[0] for prompt in prompts]
    data = [_sampled_datum(prompt, one) for prompt, one in zip(prompts, sampled, strict=True)]
    configs: list[dict[str, float | str]] = [{"temperature": 0.5}, {}]
    ratios = [training.forward(data, "ppo", config).result().metrics["ratio:max"] for config in configs]
    assert ratios[0] == pytest.approx(1, abs=1e-4)
    assert ratios[1] > 1.01
    words = r"loss_config\.temperature is 3, but must be in 0\.01 \.\. 2"
    with pytest.raises(tinker.RequestFailedError, match=words) as caught:
        training.forward(data, "ppo", {"temperature": 3.0}).result()
    assert_user_error(caught.value)


def test_settings_and_names_that_no_loss_has(
    service: tinker.ServiceClient, stack: Stack, prompts: list[Prompt]
) -> None:
    """C83, C97: refused as a user error that names the field; the client can continue."""
    training = service.create_lora_training_client(base_model=stack.model_name, rank=4).result()
    data = _policy_data(training, prompts[:1], "ppo")
    cases: list[tuple[str, dict[str, float | str], str]] = [
        ("ppo", {"beta": 1.0}, r"beta is unknown for ppo; known: clip_low_threshold, clip_high_threshold"),
        ("ppo", {"clip_low_threshold": "low"}, r"clip_low_threshold is 'low'; ppo accepts numbers only"),
        ("ppo", {"clip_low_threshold": 2.0}, r"clip_low_threshold is 2\.0, which is above"),
        ("gspo", {}, r"sequence_ratio_mask is missing: gspo requires it"),
        ("cross_entropy", {}, r"(advantages|logprobs) is unknown for cross_entropy"),
        ("stable_reinforce", {}, r"data\[0\] has no provenance spans"),
        ("reinforce", {}, r"'reinforce' is unknown; known: cross_entropy, .*stable_reinforce"),
        ("custom", {}, r"loss_id is missing"),
    ]
    for name, config, words in cases:
        with pytest.raises(tinker.RequestFailedError, match=words) as caught:
            training.forward(data, name, config).result()  # type: ignore[arg-type]
        assert_user_error(caught.value)
    training.forward_backward(data, "ppo").result()


def test_sparse_targets_with_token_zero_equal_dense_ones(
    service: tinker.ServiceClient, stack: Stack, prompts: list[Prompt]
) -> None:
    """[N, K] targets: the shape of the answer, and token id 0, which a sparse tensor omits (C84, C85)."""
    training = service.create_lora_training_client(base_model=stack.model_name, rank=4).result()
    random = np.random.default_rng(3)
    count = len(prompts[0].ids)
    targets = torch.tensor(random.integers(0, 40, (count, 12)) * (random.random((count, 12)) > 0.8))
    weights = torch.tensor(random.random((count, 12)) * (random.random((count, 12)) > 0.8), dtype=torch.float32)
    assert ((targets == 0) & (weights > 0)).any()
    outcomes = []
    for sparse in (False, True):
        make = tinker.TensorData.from_torch_sparse if sparse else tinker.TensorData.from_torch
        inputs = {"target_tokens": make(targets), "weights": make(weights)}
        datum = tinker.Datum(model_input=prompts[0].model_input, loss_fn_inputs=inputs)
        assert (inputs["target_tokens"].sparse_crow_indices is not None) == sparse
        outcomes.append(training.forward([datum], "cross_entropy").result())
    dense, csr = outcomes
    assert dense.metrics["loss:sum"] == pytest.approx(csr.metrics["loss:sum"], rel=1e-6)
    logprobs = dense.loss_fn_outputs[0]["logprobs"]
    assert logprobs.shape == [count, 12]
    np.testing.assert_allclose(logprobs.data, csr.loss_fn_outputs[0]["logprobs"].data, atol=1e-6)
    expected = -float((weights.double().numpy().ravel() * np.array(logprobs.data)).sum())
    assert dense.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
