"""What was saved comes back: training goes on as if never interrupted, and saved weights sample elsewhere."""

import pytest
import tinker
from transformers import PreTrainedTokenizerBase

from tests.e2e.prompts import Prompt, PromptBuilder, max_difference
from tests.e2e.stack import Stack
from tests.e2e.test_agreement import assert_agree, sampler_logprobs, take_steps, trainer_logprobs


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Prompt]:
    catalogue = PromptBuilder(tokenizer).catalogue()
    return {name: catalogue[name] for name in ("text", "one image")}


@pytest.mark.parametrize(("rank", "rate"), [(8, 5e-3), (0, 5e-4)])
def test_resumed_training_equals_uninterrupted_training(
    stack: Stack, prompts: dict[str, Prompt], rank: int, rate: float
) -> None:
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=rank).result()
        take_steps(training, prompts, 2, rate)
        path = training.save_state(f"half-way-{rank}").result().path
        take_steps(training, prompts, 2, rate)
        uninterrupted = trainer_logprobs(training, prompts)
    with stack.service_client() as service:
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        take_steps(resumed, prompts, 2, rate)
        scores = trainer_logprobs(resumed, prompts)
    for name in prompts:
        assert max_difference(uninterrupted[name], scores[name]) <= 1e-5, name
    with stack.service_client() as service:
        forgetful = service.create_training_client_from_state(path).result()
        take_steps(forgetful, prompts, 2, rate)
        fresh_optimizer = trainer_logprobs(forgetful, prompts)
    # A fresh optimizer has no moments, so its steps differ: the moments above were really restored.
    assert max(max_difference(uninterrupted[name], fresh_optimizer[name]) for name in prompts) > 1e-3


def test_named_weights_sample_from_another_session(stack: Stack, prompts: dict[str, Prompt]) -> None:
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=8).result()
        take_steps(training, prompts, 2, 5e-3)
        trained = trainer_logprobs(training, prompts)
        path = training.save_weights_for_sampler("kept").result().path
    assert path.startswith("tinker://")
    with stack.service_client() as service:
        sampling = service.create_sampling_client(model_path=path).result()
        assert_agree(sampler_logprobs(sampling, prompts), trained)


def test_a_name_that_is_taken_is_refused_quickly(stack: Stack) -> None:
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=4).result()
        training.save_state("taken").result()
        with pytest.raises(tinker.RequestFailedError, match="taken"):
            training.save_state("taken").result()
        training.save_state("taken", overwrite=True).result()
