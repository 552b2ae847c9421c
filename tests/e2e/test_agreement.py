"""Sampler and trainer agree on log-probabilities of the same tokens under the same weights (float32, CPU)."""

import numpy as np
import pytest
import tinker
from tinker import AdamParams
from transformers import PreTrainedTokenizerBase

from benchmarks.agreement import Drawn, score
from tests.e2e.prompts import Prompt, PromptBuilder, max_difference
from tests.e2e.stack import Stack

TOLERANCE = 1e-3
UNMOVED = 1e-4
"""Tolerance between scores of the same weights in different batches; a training step changes scores by 0.05."""


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Prompt]:
    return PromptBuilder(tokenizer).catalogue()


def trainer_logprobs(training: tinker.TrainingClient, prompts: dict[str, Prompt]) -> dict[str, list[float]]:
    outputs = training.forward([prompt.datum() for prompt in prompts.values()], "cross_entropy").result()
    return {name: list(output["logprobs"].data) for name, output in zip(prompts, outputs.loss_fn_outputs, strict=True)}


def sampler_logprobs(sampling: tinker.SamplingClient, prompts: dict[str, Prompt]) -> dict[str, list[float | None]]:
    pending = {name: sampling.compute_logprobs(prompt.model_input) for name, prompt in prompts.items()}
    return {name: future.result() for name, future in pending.items()}


def assert_agree(sampled: dict[str, list[float | None]], trained: dict[str, list[float]]) -> None:
    for name, values in sampled.items():
        assert values[0] is None
        assert None not in values[1:]
        assert max_difference(values[1:], trained[name][:-1]) <= TOLERANCE, name


def assert_unmoved(found: dict[str, list[float | None]], before: dict[str, list[float | None]]) -> None:
    for name, values in found.items():
        assert max_difference(values[1:], before[name][1:]) <= UNMOVED, name


def take_steps(training: tinker.TrainingClient, prompts: dict[str, Prompt], count: int, rate: float) -> None:
    data = [prompt.datum() for prompt in prompts.values()]
    for _ in range(count):
        backward = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(AdamParams(learning_rate=rate))
        backward.result()
        step.result()


def check_model(
    stack: Stack, service: tinker.ServiceClient, rank: int, rate: float, prompts: dict[str, Prompt]
) -> None:
    training = service.create_lora_training_client(base_model=stack.model_name, rank=rank).result()
    base = service.create_sampling_client(base_model=stack.model_name).result()
    fresh = trainer_logprobs(training, prompts)
    base_scores = sampler_logprobs(base, prompts)
    assert_agree(base_scores, fresh)
    old = training.save_weights_and_get_sampling_client().result()
    old_scores = sampler_logprobs(old, prompts)
    assert_agree(old_scores, fresh)

    take_steps(training, prompts, 3, rate)
    trained = trainer_logprobs(training, prompts)
    for name in prompts:
        assert max_difference(fresh[name], trained[name]) > 0.05, f"{name}: training must change the scores"
    new = training.save_weights_and_get_sampling_client().result()
    new_scores = sampler_logprobs(new, prompts)
    assert_agree(new_scores, trained)

    # Snapshots do not change with later pushes.
    assert_unmoved(sampler_logprobs(old, prompts), old_scores)
    take_steps(training, prompts, 1, rate)
    newest = training.save_weights_and_get_sampling_client().result()
    assert_agree(sampler_logprobs(newest, prompts), trainer_logprobs(training, prompts))
    assert_unmoved(sampler_logprobs(new, prompts), new_scores)
    assert_unmoved(sampler_logprobs(base, prompts), base_scores)


@pytest.mark.parametrize("rank", [4, 32])
def test_lora(stack: Stack, service: tinker.ServiceClient, prompts: dict[str, Prompt], rank: int) -> None:
    check_model(stack, service, rank, 5e-3, prompts)


def test_full_parameters(stack: Stack, service: tinker.ServiceClient, prompts: dict[str, Prompt]) -> None:
    check_model(stack, service, 0, 5e-4, prompts)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_sampled_logprobs_are_the_trainers(
    stack: Stack, service: tinker.ServiceClient, prompts: dict[str, Prompt], temperature: float
) -> None:
    """The log-probabilities that `sample` itself returns, at its own temperature."""
    training = service.create_lora_training_client(base_model=stack.model_name, rank=8).result()
    take_steps(training, prompts, 2, 5e-3)
    sampling = training.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=12, temperature=temperature, seed=7, stop=[])
    for name, prompt in prompts.items():
        sequence = sampling.sample(prompt.model_input, num_samples=1, sampling_params=params).result().sequences[0]
        drawn = Drawn(prompt.model_input, list(sequence.tokens), np.asarray(sequence.logprobs, np.float64), temperature)
        for found in score(training, [drawn]):
            assert np.abs(found.differences).max() <= TOLERANCE, name
