"""One Fovea for all of this folder: vLLM starts once. It ends with it, for later tests want its memory."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from unittest import mock

import pytest
import tinker
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import fovea_tinyvlm
from fovea.runtime.settings import TRACE_VARIABLE
from tests.e2e.stack import Stack, running_stack
from tests.otlp_collector import Collector


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    """Where the traces of the folder's Fovea arrive: of those requests that name one to go on from."""
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="package")
def stack(collector: Collector) -> Iterator[Stack]:
    """Fovea with the tiny Qwen3-VL."""
    with ExitStack() as exit_stack:
        tracing = {TRACE_VARIABLE: collector.url, "OTEL_TRACES_SAMPLER": "parentbased_always_off"}
        with mock.patch.dict(os.environ, tracing):  # its own alone: unit tests of the same session follow
            stack = exit_stack.enter_context(running_stack(fovea_tinyvlm.ensure()))
        yield stack


@pytest.fixture(scope="package")
def tokenizer(stack: Stack) -> PreTrainedTokenizerBase:
    """The tiny model's tokenizer."""
    return AutoTokenizer.from_pretrained(stack.model)


@pytest.fixture
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    """The official SDK. Its session, and with it every model, ends with the test."""
    with stack.service_client() as client:
        yield client


@pytest.fixture(scope="package")
def base_sampler(stack: Stack) -> Iterator[tinker.SamplingClient]:
    """Samples from the base model."""
    with stack.service_client() as client:
        yield client.create_sampling_client(base_model=stack.model_name).result()
