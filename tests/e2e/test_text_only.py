"""A text-only model through the same services: no renderer call, no new path, and images are refused by name."""

from collections.abc import Iterator

import pytest
import tinker
from transformers import AutoTokenizer

import tinyvlm
from tests.e2e.prompts import PromptBuilder, picture
from tests.e2e.stack import Stack, running_stack
from tests.e2e.test_agreement import assert_agree, sampler_logprobs, take_steps, trainer_logprobs


@pytest.fixture(scope="module")
def text_stack() -> Iterator[Stack]:
    with running_stack(tinyvlm.ensure("qwen3")) as stack:
        yield stack


def test_sampler_and_trainer_agree(text_stack: Stack) -> None:
    builder = PromptBuilder(AutoTokenizer.from_pretrained(text_stack.model))
    prompts = {"text": builder.build("Some words about nothing in particular, to be scored.")}
    with text_stack.service_client() as service:
        training = service.create_lora_training_client(base_model=text_stack.model_name, rank=8).result()
        take_steps(training, prompts, 3, 5e-3)
        tuned = training.save_weights_and_get_sampling_client().result()
        assert_agree(sampler_logprobs(tuned, prompts), trainer_logprobs(training, prompts))


def test_images_are_refused_by_name(text_stack: Stack) -> None:
    builder = PromptBuilder(AutoTokenizer.from_pretrained(text_stack.model))
    image = builder.build("Look: ", (picture(224, 224), 64), " what?")
    text = builder.build("Look: what?")
    params = tinker.SamplingParams(max_tokens=2)
    with text_stack.service_client() as service:
        sampling = service.create_sampling_client(base_model=text_stack.model_name).result()
        with pytest.raises(tinker.RequestFailedError, match=r"chunks\[1\].*text-only model"):
            sampling.sample(image.model_input, num_samples=1, sampling_params=params).result()
        assert sampling.sample(text.model_input, num_samples=1, sampling_params=params).result().sequences
        training = service.create_lora_training_client(base_model=text_stack.model_name, rank=4).result()
        with pytest.raises(tinker.RequestFailedError, match=r"chunks\[1\].*text-only model"):
            training.forward([image.datum()], "cross_entropy").result()
        assert training.forward([text.datum()], "cross_entropy").result().metrics["loss:sum"] > 0
