"""Other families through the same services: Qwen2.5-VL agrees, a text-only model refuses images by name."""

from collections.abc import Iterator

import pytest
import tinker
from transformers import AutoTokenizer

import tinyvlm
from tests.e2e.prompts import Prompt, PromptBuilder, picture
from tests.e2e.stack import Stack, running_stack
from tests.e2e.test_agreement import assert_agree, sampler_logprobs, take_steps, trainer_logprobs

START, END = "<|im_start|>user\n<|vision_start|>", "<|vision_end|>What is this?<|im_end|>\n"


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3"])
def family_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with running_stack(tinyvlm.ensure(request.param)) as stack:
        yield stack


def prompts_for(stack: Stack) -> dict[str, Prompt]:
    builder = PromptBuilder(AutoTokenizer.from_pretrained(stack.model))
    prompts = {"text": builder.build("Some words about nothing in particular, to be scored.")}
    if not stack.model.name.startswith("qwen3-"):
        # Patches of 14 pixels, merged 2 x 2: 224 is 8 of them, 154 is 5.5, rounded to the even size.
        prompts["one image"] = builder.build(START, (picture(224, 224, 1), 64), END)
        prompts["two images"] = builder.build(START, (picture(224, 224, 1), 64), START, (picture(280, 140, 2), 50), END)
    return prompts


def test_sampler_and_trainer_agree(family_stack: Stack) -> None:
    prompts = prompts_for(family_stack)
    with family_stack.service_client() as service:
        training = service.create_lora_training_client(base_model=family_stack.model_name, rank=8).result()
        base = service.create_sampling_client(base_model=family_stack.model_name).result()
        assert_agree(sampler_logprobs(base, prompts), trainer_logprobs(training, prompts))
        take_steps(training, prompts, 3, 5e-3)
        tuned = training.save_weights_and_get_sampling_client().result()
        assert_agree(sampler_logprobs(tuned, prompts), trainer_logprobs(training, prompts))


def test_a_text_only_model_refuses_images(family_stack: Stack) -> None:
    if "one image" in prompts_for(family_stack):
        pytest.skip("this family takes images")
    builder = PromptBuilder(AutoTokenizer.from_pretrained(family_stack.model))
    image = builder.build("Look: ", (picture(224, 224), 64), " what?")
    text = builder.build("Look: what?")
    params = tinker.SamplingParams(max_tokens=2)
    with family_stack.service_client() as service:
        sampling = service.create_sampling_client(base_model=family_stack.model_name).result()
        with pytest.raises(tinker.RequestFailedError, match=r"(?i)image"):
            sampling.sample(image.model_input, num_samples=1, sampling_params=params).result()
        assert sampling.sample(text.model_input, num_samples=1, sampling_params=params).result().sequences
        training = service.create_lora_training_client(base_model=family_stack.model_name, rank=4).result()
        with pytest.raises(tinker.RequestFailedError, match=r"(?i)image"):
            training.forward([image.datum()], "cross_entropy").result()
        assert training.forward([text.datum()], "cross_entropy").result().metrics["loss:sum"] > 0
