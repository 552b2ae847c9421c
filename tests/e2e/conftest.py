"""One Fovea for the whole folder, because vLLM starts slowly. It stops after the folder to free its memory."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from unittest import mock

import pytest
import tinker
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import fovea_tinyvlm
from fovea.runtime.settings import TRACE_VARIABLE
from tests.certificates import one_certificate
from tests.e2e.stack import Stack, running_stack
from tests.otlp_collector import Collector

_DOWNLOADS = ("tests.e2e.clients.", "tests.e2e.fovea_data.test_evaluation_harness", "tests.e2e.test_cookbook")
"""Modules with programs that may download from a package index."""


@pytest.fixture(scope="module", autouse=True)
def _certificates(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes clients of this process and of programs that it starts parse a single certificate."""
    downloads = request.module.__name__.startswith(_DOWNLOADS)
    with nullcontext() if downloads else one_certificate(tmp_path_factory.mktemp("certificates")):
        yield


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    """Collects the spans of this Fovea for requests that carry a trace."""
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="package")
def stack(collector: Collector) -> Iterator[Stack]:
    """Fovea with the tiny Qwen3-VL."""
    with ExitStack() as exit_stack:
        tracing = {TRACE_VARIABLE: collector.url, "OTEL_TRACES_SAMPLER": "parentbased_always_off"}
        with mock.patch.dict(os.environ, tracing):  # clear only its own; unit tests of the same session follow
            stack = exit_stack.enter_context(running_stack(fovea_tinyvlm.ensure()))
        yield stack


@pytest.fixture(scope="package")
def tokenizer(stack: Stack) -> PreTrainedTokenizerBase:
    """The tiny model's tokenizer."""
    return AutoTokenizer.from_pretrained(stack.model)


@pytest.fixture
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    """The official SDK. Its session ends with the test, which frees every model."""
    with stack.service_client() as client:
        yield client


@pytest.fixture(scope="package")
def base_sampler(stack: Stack) -> Iterator[tinker.SamplingClient]:
    """Samples from the base model."""
    with stack.service_client() as client:
        yield client.create_sampling_client(base_model=stack.model_name).result()
