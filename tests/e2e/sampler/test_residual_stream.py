"""In bfloat16, a float32 residual stream brings a real engine and the trainer closer together."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig

import fovea_tinyvlm
from benchmarks.agreement import kl
from fovea.client.inference import SamplerClient
from fovea_trainer.batches.micro_batch import Documents
from fovea_trainer.model import fused_layers
from fovea_trainer.model.lora import LoraInjector
from fovea_trainer.model.model_family import family_of
from fovea_trainer.model.packed_model import PackedModel
from fovea_trainer.model.weight_reading import read_weights
from tests.checkpoints import save_random
from tests.e2e.sampler.asking import ask, rendered, request_for
from tests.e2e.sampler.process import SamplerProcess, running_sampler

LENGTH = 256


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 24 small layers."""
    directory = tmp_path_factory.mktemp("models") / "deep-llama"
    tokenizer = AutoTokenizer.from_pretrained(fovea_tinyvlm.ensure("qwen3"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
    )
    save_random(config, tokenizer, directory)
    return directory


@pytest.fixture(scope="module")
def sampler(deep: Path) -> Iterator[SamplerProcess]:
    """A sampler in bfloat16."""
    with running_sampler(deep, "--dtype", "bfloat16", is_copy=True) as sampler:
        yield sampler


def _trained(directory: Path, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Returns the trainer's log-probabilities of all tokens except the first."""
    config = AutoConfig.from_pretrained(directory)
    family = family_of(config.model_type)
    hf = family.build(config, torch.bfloat16)
    read_weights(hf, directory, torch.device("cpu"))
    module = PackedModel(family, None, hf, None, LENGTH, torch.float32).requires_grad_(False)
    LoraInjector(list(family.lora_targets(hf)))
    tokens, documents = torch.from_numpy(ids).long(), Documents(torch.tensor([0, LENGTH], dtype=torch.int32), LENGTH)
    with torch.no_grad():
        embeddings = family.embed(hf, tokens)
        hidden = module.run_language(embeddings, torch.arange(LENGTH)[None], documents, None, None)
        found = module.logprobs(hidden[:-1], None, tokens[1:, None], 1.0)
    return found[:, 0].double().numpy()


async def test_sampler_and_trainer_agree_better_than_with_a_rounded_stream(
    deep: Path, sampler: SamplerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.random.default_rng(3).integers(100, 1000, LENGTH, dtype=np.int32)
    async with SamplerClient(sampler.address) as client:
        answer = await ask(client, request_for(rendered([ids.tolist()]), prompt_logprobs=True, max_tokens=1))
    assert answer.prompt_logprobs is not None
    sampled = answer.prompt_logprobs[1:].astype(np.float64)
    both = kl(_trained(deep, ids) - sampled)
    monkeypatch.setattr(fused_layers, "stream_dtype", lambda _, dtype: dtype)
    one = kl(_trained(deep, ids) - sampled)
    assert both < 0.75 * one
