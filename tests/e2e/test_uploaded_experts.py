"""Uploads of typical adapters: experts in bfloat16, over two ranks; a rank is killed during the load."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from unittest import mock

import psutil
import pytest
import tinker
import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoTokenizer

from fovea_conformance.adapters import ADAPTER, download
from fovea_trainer.weights.weight_files import EXPERT_PROJECTIONS
from tests.e2e.prompts import Prompt, PromptBuilder, picture
from tests.e2e.stack import API_KEY, Stack, running_stack
from tests.e2e.test_agreement import take_steps, trainer_logprobs
from tests.e2e.test_checkpoints import upload
from tests.families import ensure_family

RANK = 4
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+_proj)\.(lora_[AB]\.weight)")
PARTS = {projection: part for part, projection in EXPERT_PROJECTIONS.items()}


@pytest.fixture(scope="module")
def experts() -> Iterator[Stack]:
    """A training-only Fovea with a vision model of experts in bfloat16."""
    in_bfloat16 = mock.patch.dict(os.environ, {"FOVEA_TRAINER_DTYPE": "bfloat16"})
    with in_bfloat16, running_stack(ensure_family("qwen3_vl_moe"), "--samplers", "0", "--ranks", "2") as stack:
        yield stack


@pytest.fixture(scope="module")
def prompts(experts: Stack) -> dict[str, Prompt]:
    builder = PromptBuilder(AutoTokenizer.from_pretrained(experts.model))
    return {
        "text": builder.build("Some words about nothing in particular, to be scored."),
        "one image": builder.build("<|vision_start|>", (picture(224, 224, 1), 64), "<|vision_end|>as it is"),
    }


def as_hosted(adapter: bytes) -> bytes:
    """Returns an exported adapter as hosted Tinker names it: experts stacked, factors that all share stored once."""
    stacks: dict[str, dict[int, Tensor]] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in load(adapter).items():
        hosted = name.replace(".language_model.", ".").replace(".lm_head.", ".model.unembed_tokens.")
        if match := EXPERT.fullmatch(hosted):
            stacks.setdefault(f"{match[1]}.{PARTS[match[3]]}.{match[4]}", {})[int(match[2])] = tensor
        else:
            found[hosted] = tensor
    for name, factors in stacks.items():
        stack = [factors[index] for index in range(len(factors))]
        is_shared = all(one.equal(stack[0]) for one in stack)
        found[name] = torch.stack(stack[:1] if is_shared else stack)
    assert {len(tensor) for tensor in found.values() if tensor.dim() == 3} > {1}, (
        "some factors are shared, some are not"
    )
    assert any("unembed_tokens" in name for name in found)
    return save({name: tensor.contiguous() for name, tensor in found.items()})


def test_an_adapter_of_hosted_tinker_is_the_same_model(experts: Stack, prompts: dict[str, Prompt]) -> None:
    with experts.service_client() as service:
        training = service.create_lora_training_client(base_model=experts.model_name, rank=RANK).result()
        take_steps(training, prompts, 3, 5e-3)
        exported = training.save_weights_external("hosted").result().path
        files = download(tinker.RestClient(base_url=experts.base_url, api_key=API_KEY), exported)
        path = upload(experts, files | {ADAPTER: as_hosted(files[ADAPTER])}, RANK)
        again = service.create_training_client_from_state(path).result()
        assert trainer_logprobs(again, prompts) == trainer_logprobs(training, prompts)


def test_an_upload_is_the_same_model_and_survives_a_kill_while_it_loads(
    experts: Stack, prompts: dict[str, Prompt]
) -> None:
    with experts.service_client() as service:
        training = service.create_lora_training_client(base_model=experts.model_name, rank=RANK).result()
        fresh = trainer_logprobs(training, prompts)
        take_steps(training, prompts, 3, 5e-3)
        wanted = trainer_logprobs(training, prompts)
        assert wanted != fresh
        exported = training.save_weights_external("experts").result().path
        files = download(tinker.RestClient(base_url=experts.base_url, api_key=API_KEY), exported)
        assert any(".experts." in name for name in load(files[ADAPTER]))
        path = upload(experts, files, RANK)
        again = service.create_training_client_from_state(path).result()
        assert trainer_logprobs(again, prompts) == wanted
        for victim in ("1", "0"):
            take_steps(again, prompts, 1, 5e-3)
            assert trainer_logprobs(again, prompts) != wanted
            held = experts.rank(1)
            assert held is not None
            held.suspend()  # so that the other rank waits for it
            try:
                loading = again.load_state(path)
                time.sleep(1.0)
                assert not loading.future().done(), "it must still be loading"
                experts.kill(victim)
            finally:
                with suppress(psutil.NoSuchProcess):
                    held.resume()
            loading.result(timeout=300)
            assert trainer_logprobs(again, prompts) == wanted, victim
            assert trainer_logprobs(training, prompts) == wanted, f"a neighbour, {victim}"
