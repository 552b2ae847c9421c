"""Generic language models, packed, against transformers' own forward pass of one document at a time, in float32.

Windows are shorter than the documents, and layers alternate as in the published configurations.
"""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from fovea_trainer.batches.datum_decoding import Datum
from fovea_trainer.batches.micro_batch import BatchLayout
from fovea_trainer.model.expert_routing import expert_shape
from fovea_trainer.model.experts import ExpertAdapter
from fovea_trainer.model.lora import LoraInjector, LoraSettings, LoraWeights
from fovea_trainer.model.model_family import LoraTarget, Role
from fovea_trainer.model.packed_model import PackedModel, load_model
from fovea_trainer.settings import TrainerSettings

CPU = torch.device("cpu")
VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 1}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 3,
    "topk_group": 2,
}
CHUNKS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "attention_chunk_size": 8,
    "floor_scale": 6,
    "intermediate_size": 20,
    "intermediate_size_mlp": 40,
    "num_local_experts": 6,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2 window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3 window": Qwen3Config(**SIZES, head_dim=16, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "llama": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, head_dim=16, sliding_window=8),
    "mistral full": MistralConfig(**SIZES, head_dim=16, sliding_window=None),
    "gemma3": Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 6},
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=24,
        final_logit_softcapping=5.0,  # no published model uses it, but the code exists
    ),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen3_moe mixed": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, mlp_only_layers=[1], norm_topk_prob=False),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        **GROUPED,
        **{"q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10},
    ),
    "glm4_moe": Glm4MoeConfig(**SIZES, **GROUPED, use_qk_norm=True, attention_bias=True),
    "llama4_text": Llama4TextConfig(**SIZES | CHUNKS),
    "llama4_text mixed": Llama4TextConfig(
        **SIZES | CHUNKS, interleave_moe_layer_step=2, use_qk_norm=False, no_rope_layers=[1, 0, 1, 1]
    ),
    "mixtral": MixtralConfig(**SIZES, head_dim=16, num_local_experts=6, num_experts_per_tok=2),
    "qwen3_5": Qwen3_5TextConfig(**SIZES | {"num_hidden_layers": 2}, **DELTA_NET, tie_word_embeddings=True),
    "qwen3_next": Qwen3NextConfig(
        **SIZES | {"num_hidden_layers": 2},
        **DELTA_NET | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        **EXPERTS,
        shared_expert_intermediate_size=20,
    ),
}
LENGTHS = [5, 23, 11, 23]


@cache
def _checkpoint(name: str) -> Path:
    """Writes a checkpoint with random weights large enough that every part matters, including biases and norms."""
    directory = Path(mkdtemp(prefix="families-"))
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(directory)
    return directory


@cache
def _loaded(name: str) -> tuple[PackedModel, list[LoraTarget]]:
    directory = _checkpoint(name)
    family, _, module = load_model(TrainerSettings(model=str(directory)), directory, CPU)
    return module, list(family.lora_targets(module.hf))


def _packed(name: str) -> tuple[PackedModel, list[LoraTarget], LoraInjector]:
    """Returns one packed model for all tests, reset: no gradients, and a new injector without an adapter."""
    module, targets = _loaded(name)
    module.zero_grad()
    return module.requires_grad_(False), targets, LoraInjector(targets)


@cache
def _pristine(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(_checkpoint(name), dtype=torch.float32, attn_implementation="eager")


def _reference(name: str) -> Any:
    return deepcopy(_pristine(name))


def _datums() -> list[Datum]:
    generator = np.random.default_rng(3)
    made = []
    for index, length in enumerate(LENGTHS):
        # Token 0 is padding: transformers gives its embedding no gradient.
        tokens = generator.integers(3, VOCABULARY, length + 1)
        made.append(Datum(index, tokens[:-1], None, (), 0, tokens[1:, None], {}, True))
    return made


def _run(module: PackedModel, datums: list[Datum], unembedding: Any = None, recompute: bool = False) -> Tensor:
    """Returns log-probabilities of all targets, float32 [T]."""
    batch = BatchLayout(None, CPU).pack(datums, {}, False, None)
    logprobs: Tensor = module(batch, unembedding, None, recompute)
    return logprobs[:, 0]


def _run_reference(model: Any, datums: list[Datum]) -> Tensor:
    found = []
    for datum in datums:
        logits = model(input_ids=torch.from_numpy(datum.tokens)[None], use_cache=False).logits[0]
        found.append(logits.log_softmax(-1).gather(1, torch.from_numpy(datum.targets))[:, 0])
    return torch.cat(found)


def _direction() -> Tensor:
    return torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_one_by_one_and_transformers(name: str) -> None:
    module, _, _ = _packed(name)
    datums = _datums()
    with torch.no_grad():
        packed = _run(module, datums)
        alone = torch.cat([_run(module, [datum]) for datum in datums])
        expected = _run_reference(_reference(name), datums)
    assert (packed - alone).abs().max() <= 2e-5
    assert (packed - expected).abs().max() <= 1e-4
    assert packed.std() > 0.1


@pytest.mark.parametrize("name", ["llama4_text mixed", "qwen3_moe mixed", "deepseek_v3", "glm4_moe"])
def test_given_experts_pass_dense_layers(name: str) -> None:
    """Without a choice (-1) the routers decide as before; the same expert for all tokens changes the result."""
    module, _, _ = _packed(name)
    shape = expert_shape(module.hf)
    assert shape is not None
    found = []
    for first in (-1, 0):
        chosen = np.full((shape.layers, shape.k), -1) if first < 0 else np.tile(np.arange(shape.k), (shape.layers, 1))
        datums = [replace(one, experts=np.tile(chosen, (len(one.tokens), 1, 1)).astype(np.int16)) for one in _datums()]
        with torch.no_grad():
            found.append(_run(module, datums))
    with torch.no_grad():
        assert torch.equal(found[0], _run(module, _datums()))
    assert (found[1] - found[0]).abs().max() > 1e-3


def test_given_experts_are_refused_without_experts() -> None:
    module, _, _ = _packed("qwen2")
    datums = [replace(one, experts=np.zeros((len(one.tokens), 1, 1), np.int16)) for one in _datums()]
    with pytest.raises(ValueError, match="packed attention does not support routed_experts, which Qwen2Attention pass"):
        _run(module, datums)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_all_parameters(name: str, recompute: bool) -> None:
    module, _, _ = _packed(name)
    module.requires_grad_(True)
    torch.autograd.backward((_run(module, _datums(), None, recompute) * _direction()).sum())
    reference = _reference(name)
    torch.autograd.backward((_run_reference(reference, _datums()) * _direction()).sum())
    found = dict(module.hf.named_parameters())
    for key, parameter in reference.named_parameters():
        assert parameter.grad is not None
        is_transposed = "llama4" in name and parameter.dim() == 3
        _assert_near(found[key].grad, parameter.grad.mT if is_transposed else parameter.grad)


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_of_every_linear_module(name: str) -> None:
    """Compares with merged weights; their gradient d W gives those of A and B: s B' dW and s dW A'."""
    module, targets, injector = _packed(name)
    parts = dict(module.hf.named_modules())
    left = ("expert_gate", "kv_b_proj", "router")
    linear = {name for name, part in parts.items() if isinstance(part, nn.Linear) and not name.endswith(left)}
    assert {target.name for target in targets} == linear | {name for name in parts if name.endswith(".experts")}
    assert {target.role for target in targets} == set(Role)
    weights = LoraWeights(LoraSettings(4, 8.0, 0, True, True, True, False), targets, CPU, torch.float32)
    injector.activate(weights)
    reference = _reference(name)
    reference.lm_head.weight = nn.Parameter(reference.lm_head.weight.detach().clone())  # an adapter unties a tied one
    parts = dict(reference.named_modules())
    generator = torch.Generator().manual_seed(11)
    for key, pair in weights.pairs.items():
        with torch.no_grad():
            pair.b.copy_(torch.randn(pair.b.shape, generator=generator) * 0.1)
            parts[key].weight += pair.scale * pair.b @ pair.a
    for key, adapter in weights.experts.items():
        _merge(adapter, parts[key], generator)
    logprobs = _run(module, _datums(), weights.pairs["lm_head"])
    expected = _run_reference(reference, _datums())
    assert (logprobs - expected).abs().max() <= 1e-4
    torch.autograd.backward([(one * _direction()).sum() for one in (logprobs, expected)])
    for key, pair in weights.pairs.items():
        grad = parts[key].weight.grad
        _assert_near(pair.a_grad, pair.scale * pair.b.T @ grad)
        _assert_near(pair.b_grad, pair.scale * grad @ pair.a.T)
    for key, adapter in weights.experts.items():
        _assert_merged_gradients(adapter, parts[key])


@torch.no_grad()
def _merge(adapter: ExpertAdapter, experts: Any, generator: torch.Generator) -> None:
    """Adds s B A to the weight of each expert; a shared factor applies to each expert."""
    for name, factor in adapter.factors.items():
        if name.endswith("lora_B"):
            factor.value.copy_(torch.randn(factor.value.shape, generator=generator) * 0.1)
    for name, (weight, _) in _merged(experts).items():
        a, b = (adapter.factors[f"{name}.lora_{half}"].value for half in "AB")
        weight += adapter.scale * b @ a


def _assert_merged_gradients(adapter: ExpertAdapter, experts: Any) -> None:
    for name, (_, grad) in _merged(experts).items():
        a, b = (adapter.factors[f"{name}.lora_{half}"] for half in "AB")
        for factor, expected in ((a, b.value.mT @ grad), (b, grad @ a.value.mT)):
            shared = len(factor.value) == 1
            _assert_near(factor.grad, adapter.scale * (expected.sum(0, keepdim=True) if shared else expected))


def _merged(experts: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns weights of gate, up and down, [experts, outputs, inputs], and their gradients."""
    pairs = [(one, torch.zeros(0) if one.grad is None else one.grad) for one in experts.parameters()]
    if isinstance(experts, Llama4TextExperts):
        pairs = [(one.mT, grad.mT if grad.dim() == 3 else grad) for one, grad in pairs]
    (gate_up, gate_up_grad), (down, down_grad) = pairs
    size = gate_up.shape[1] // 2
    return {
        "w1": (gate_up[:, :size], gate_up_grad[:, :size] if gate_up_grad.dim() == 3 else gate_up_grad),
        "w3": (gate_up[:, size:], gate_up_grad[:, size:] if gate_up_grad.dim() == 3 else gate_up_grad),
        "w2": (down, down_grad),
    }


def _assert_near(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    largest = float(expected.detach().abs().max())  # tens where a delta net normalises small values
    torch.testing.assert_close(found, expected, atol=5e-4 * max(1.0, largest), rtol=5e-4)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma3", {"logit_scale": 30.0}, "logit_scale of gemma3_text is not supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention of gemma3_text"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout must be 0"),
        ("mixtral", {"sliding_window": 8}, "sliding_window of mixtral is 8, which vLLM or transformers would ignore"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave of deepseek_v3 is False"),
        (
            "llama4_text",
            {"moe_layers": [0, 2]},
            r"moe_layers of llama4_text is \[0, 2\], but vLLM computes only \[0, 1, 2",
        ),
        (
            "llama4_text",
            {"num_experts_per_tok": 2},
            "num_experts_per_tok of llama4_text is 2, but vLLM computes only 1",
        ),
        ("llama4_text", {"layer_types": 4 * ["chunked_attention"]}, "layer_types of llama4_text is"),
        (
            "llama4_text",
            {"attention_chunk_size": None},
            "attention_chunk_size of llama4_text is None, must be positive",
        ),
        ("qwen2", {"quantization_config": {"quant_method": "fp8"}}, "the weights of this qwen2 are quantised"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_variants_that_would_be_computed_wrongly(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(_checkpoint(name))
    for key, value in change.items():
        setattr(config, key, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(TrainerSettings(model=str(tmp_path)), tmp_path, CPU)
