"""A Fovea whose sampler is two workers: what a trainer pushes reaches both, and the numbers are the trainer's."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest
from transformers import AutoTokenizer

from tests.e2e.prompts import Prompt, PromptBuilder
from tests.e2e.stack import Stack, running_stack
from tests.e2e.test_agreement import check_model
from tinyvlm.families import ensure_family

_SPLITS = {"qwen3_vl": "", "qwen3_vl_moe": "true"}
"""Families, and whether whole experts are what is spread."""


@pytest.fixture(scope="module", params=_SPLITS)
def split(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Fovea with one trainer rank and a sampler of two workers."""
    variables = {
        "FOVEA_SAMPLER_TENSOR_PARALLEL": "2",
        "FOVEA_SAMPLER_EXPERT_PARALLEL": _SPLITS[request.param] or "false",
    }
    with mock.patch.dict(os.environ, variables), running_stack(ensure_family(request.param), "--ranks", "1") as stack:
        yield stack


@pytest.fixture(scope="module")
def pictured(split: Stack) -> dict[str, Prompt]:
    """Prompts of text and images."""
    return PromptBuilder(AutoTokenizer.from_pretrained(split.model)).catalogue()


@pytest.mark.parametrize(("rank", "rate"), [(8, 5e-3), (0, 5e-4)], ids=["adapter", "full"])
def test_both_workers_have_what_was_trained(split: Stack, pictured: dict[str, Prompt], rank: int, rate: float) -> None:
    with split.service_client() as service:
        check_model(split, service, rank, rate, pictured)
