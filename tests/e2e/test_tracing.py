"""One trace id from the SDK's call to the picture's decoder, vLLM's engine and the trainer's queue, across real
processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import tinker
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from transformers import PreTrainedTokenizerBase

from fovea.runtime.tracing import HEADER
from tests.e2e.prompts import Prompt, PromptBuilder, picture
from tests.e2e.stack import API_KEY, Stack
from tests.otlp_collector import Collector

TRACE, CALLER = "c" * 32, "d" * 16
_ARRIVAL_S = 30.0
"""The exporter sends every five seconds."""


@pytest.fixture
def traced(stack: Stack) -> Iterator[tinker.ServiceClient]:
    """A client with calls that all continue the caller's own trace."""
    headers = {HEADER: f"00-{TRACE}-{CALLER}-01"}
    with tinker.ServiceClient(base_url=stack.base_url, api_key=API_KEY, default_headers_overrides=headers) as client:
        yield client


@pytest.fixture
def prompt(tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """A prompt with a picture that no other test has rendered."""
    return PromptBuilder(tokenizer).build("Look: <|vision_start|>", (picture(224, 224, 77), 64), "<|vision_end|>")


def tree(collector: Collector, *wanted: str) -> dict[str, list[str]]:
    """Returns the names of the enclosing spans of each wanted span, innermost first. Services export spans with a
    delay.
    """
    deadline = time.monotonic() + _ARRIVAL_S
    while True:
        spans = [span for span in list(collector.spans) if span.trace_id.hex() == TRACE]
        found = {name: _ancestry(name, spans) for name in wanted}
        complete = {name: names for name, names in found.items() if names is not None}
        if len(complete) == len(wanted):
            return complete
        assert time.monotonic() < deadline, f"{found}; there are {sorted(span.name for span in spans)}"
        time.sleep(0.2)


def _ancestry(name: str, spans: Sequence[Span]) -> list[str] | None:
    """Returns None while the span, or one around it, has not arrived."""
    by_id = {span.span_id: span for span in spans}
    span = next((span for span in spans if span.name == name), None)
    names = []
    while span is not None and span.parent_span_id.hex() != CALLER:
        span = by_id.get(span.parent_span_id)
        names.append(span.name if span else "")
    return names if span is not None else None


def test_a_sample_and_a_step_are_followed_to_engine_and_trainer(
    traced: tinker.ServiceClient, stack: Stack, prompt: Prompt, collector: Collector
) -> None:
    training = traced.create_lora_training_client(base_model=stack.model_name, rank=8).result()
    training.forward_backward([prompt.datum()], "cross_entropy").result()
    sampler = training.save_weights_and_get_sampling_client().result()
    parameters = tinker.SamplingParams(max_tokens=4, temperature=0.0)
    sampler.sample(prompt.model_input, 1, parameters).result()
    render, sample = "fovea.api.v1.RendererService/Render", "fovea.api.v1.SamplerService/Sample"
    train = "fovea.api.v1.TrainerService/ForwardBackward"
    push = "fovea.api.v1.TrainerService/PushSnapshot"
    found = tree(collector, "image", "engine", "command ForwardBackward", push)
    assert found["engine"] == [sample, "sample", "future sample", "POST asample"]
    assert found["image"][:2] == [render, "render"]
    assert found["command ForwardBackward"][:2] == [train, "train"]
    assert found[push][0] == "push"
    assert {"fovea-gateway", "fovea-renderer", "fovea-sampler", "fovea-trainer"} <= collector.services
