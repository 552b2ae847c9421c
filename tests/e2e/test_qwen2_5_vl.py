"""Another family through the same services: Qwen2.5-VL, with window attention and patches of 14 pixels.

Its checkpoint is as transformers 5 saves one today: weights in shards, embeddings tied, one file for the processor.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import tinyvlm
from tests.e2e.prompts import PromptBuilder, picture
from tests.e2e.stack import Stack, running_stack
from tests.e2e.test_agreement import assert_agree, sampler_logprobs, take_steps, trainer_logprobs

START, END = "<|im_start|>user\n<|vision_start|>", "<|vision_end|>What is this?<|im_end|>\n"


@pytest.fixture(scope="module")
def saved_again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, loaded and saved."""
    directory = tmp_path_factory.mktemp("models") / "qwen2_5_vl"
    built = tinyvlm.ensure("qwen2_5_vl")
    model = AutoModelForImageTextToText.from_pretrained(built)
    assert model.config.tie_word_embeddings
    model.save_pretrained(directory, max_shard_size="1MB")
    AutoProcessor.from_pretrained(built).save_pretrained(directory)
    names = {path.name for path in directory.iterdir()}
    assert {"processor_config.json", "chat_template.jinja", "generation_config.json"} < names
    assert "preprocessor_config.json" not in names
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    return directory


@pytest.fixture(scope="module")
def other_stack(saved_again: Path) -> Iterator[Stack]:
    with running_stack(saved_again, "--ranks", "1") as stack:
        yield stack


def test_sampler_and_trainer_agree(other_stack: Stack) -> None:
    builder = PromptBuilder(AutoTokenizer.from_pretrained(other_stack.model))
    # Patches of 14 pixels, merged 2 x 2: an image token covers 28 x 28 pixels.
    square, wide = (picture(224, 224, 1), 64), (picture(280, 140, 2), 50)
    prompts = {
        "text": builder.build("Some words about nothing in particular, to be scored."),
        "one image": builder.build(START, square, END),
        "two images": builder.build(START, square, "<|vision_end|><|vision_start|>", wide, END),
    }
    with other_stack.service_client() as service:
        training = service.create_lora_training_client(base_model=other_stack.model_name, rank=8).result()
        base = service.create_sampling_client(base_model=other_stack.model_name).result()
        assert_agree(sampler_logprobs(base, prompts), trainer_logprobs(training, prompts))
        take_steps(training, prompts, 3, 5e-3)
        tuned = training.save_weights_and_get_sampling_client().result()
        assert_agree(sampler_logprobs(tuned, prompts), trainer_logprobs(training, prompts))
