"""One Fovea for the whole session: vLLM starts once."""

from collections.abc import Iterator

import pytest
import tinker
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import tinyvlm
from tests.e2e.stack import Stack, running_stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Fovea with the tiny Qwen3-VL."""
    with running_stack(tinyvlm.ensure()) as stack:
        yield stack


@pytest.fixture(scope="session")
def tokenizer(stack: Stack) -> PreTrainedTokenizerBase:
    """The tiny model's tokenizer."""
    return AutoTokenizer.from_pretrained(stack.model)


@pytest.fixture
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    """The official SDK. Its session, and with it every model, ends with the test."""
    with stack.service_client() as client:
        yield client


@pytest.fixture(scope="session")
def base_sampler(stack: Stack) -> Iterator[tinker.SamplingClient]:
    """Samples from the base model."""
    with stack.service_client() as client:
        yield client.create_sampling_client(base_model=stack.model_name).result()
