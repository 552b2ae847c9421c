"""A generic text-only family through all services: Mistral, with a window that is shorter than the prompts.

No renderer is called, and images are refused with a reason.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from transformers import AutoTokenizer, MistralConfig

import fovea_tinyvlm
from tests.checkpoints import save_random
from tests.client_environment import client_environment
from tests.e2e.prompts import PromptBuilder, picture
from tests.e2e.stack import API_KEY, Stack, running_stack
from tests.e2e.test_agreement import check_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and the tokenizer of the tiny models."""
    directory = tmp_path_factory.mktemp("models") / "tiny-mistral"
    tokenizer = AutoTokenizer.from_pretrained(fovea_tinyvlm.ensure("qwen3"))
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention supports
        max_position_embeddings=1024,
        sliding_window=16,
        eos_token_id=tokenizer.eos_token_id,
    )
    save_random(config, tokenizer, directory)
    return directory


@pytest.fixture(scope="module")
def text_stack(mistral: Path) -> Iterator[Stack]:
    """A Fovea with a model folder that has two slashes, such as /tmp/model."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for file in mistral.iterdir():
            (Path(folder) / file.name).symlink_to(file)
        with running_stack(Path(folder)) as stack:
            yield stack


@pytest.mark.parametrize(("rank", "rate"), [(8, 5e-3), (0, 5e-4)], ids=["adapter", "full"])
def test_sampler_and_trainer_agree(text_stack: Stack, rank: int, rate: float) -> None:
    builder = PromptBuilder(AutoTokenizer.from_pretrained(text_stack.model))
    words = "Some words about nothing in particular, which the sampler and the trainer have to score alike. "
    prompts = {"short": builder.build("Hello there."), "long": builder.build(words * 4)}
    with text_stack.service_client() as service:
        check_model(text_stack, service, rank, rate, prompts)


def test_the_sdk_finds_the_tokenizer_of_a_folder_of_two_slashes(text_stack: Stack) -> None:
    """SDK 0.38 would cut /tmp/model to /tmp."""
    assert text_stack.model_name == f"{text_stack.model}/"
    with text_stack.service_client() as service:
        tokenizer = service.create_sampling_client(base_model=text_stack.model_name).result().get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("red")) == "red"


def test_a_first_model_may_be_text_only(text_stack: Stack) -> None:
    """Its weights are random, so any ten answers lower the loss."""
    command = [sys.executable, "-m", "examples.first_model", "--base-url", text_stack.base_url, "--steps", "3"]
    environment = client_environment(TINKER_API_KEY=API_KEY)
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text_only, *_, judged = ended.stdout.splitlines()
    assert text_only.startswith("text only, because the chat template accepts no pictures: ")
    assert judged.startswith("GOOD: it learns, it sees its texts, and sampler and trainer agree")


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
