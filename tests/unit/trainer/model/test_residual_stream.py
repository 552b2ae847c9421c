"""Layers like Llama's keep a float32 residual stream in bfloat16 models; results come closer to float32."""

# ruff: noqa: N806 -- the suffix of a tensor's name is its shape

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from fovea.runtime.model_files import LLAMA_LIKE
from fovea_trainer.batches.micro_batch import Documents
from fovea_trainer.model import fused_layers
from fovea_trainer.model.fused_layers import residual_norm, stream_dtype
from fovea_trainer.model.lora import LoraInjector
from fovea_trainer.model.model_family import family_of
from fovea_trainer.model.packed_model import PackedModel, load_model
from fovea_trainer.model.weight_reading import read_weights
from fovea_trainer.settings import TrainerSettings
from tests.families import ensure_family

COUNT, LAYERS = 96, 16
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 256, "initializer_range": 0.1,
}  # fmt: skip
KINDS: dict[str, tuple[Callable[..., Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def _model(kind: str, folder: Path, dtype: torch.dtype, device: str = "cpu") -> PackedModel:
    """Returns a deep model with random weights, the same in every dtype: bfloat16 represents them exactly."""
    config, model = KINDS[kind]
    if not folder.exists():
        torch.manual_seed(0)
        made = model(config(**SIZES))
        made.get_input_embeddings().weight.data *= 32  # a large residual stream compared with each layer's output
        made.bfloat16().save_pretrained(folder)
    family = family_of(kind)
    hf = family.build(config.from_pretrained(folder), dtype)  # type: ignore[attr-defined]
    read_weights(hf, folder, torch.device(device))
    module = PackedModel(family, None, hf, None, 128, torch.float32).requires_grad_(False)
    LoraInjector(list(family.lora_targets(hf)))
    return module


def _pass(module: PackedModel, recompute: float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of random targets [T, 1], and the gradient of the input embeddings [T, D]."""
    device = module.hf.device
    tokens_T, targets_T = torch.randint(0, 256, (2, COUNT), generator=torch.Generator().manual_seed(1)).to(device)
    embeddings_TD = module.family.embed(module.hf, tokens_T).requires_grad_()
    documents = Documents(torch.tensor([0, COUNT], dtype=torch.int32, device=device), COUNT)
    module.set_recompute(recompute)
    hidden_TD = module.run_language(embeddings_TD, torch.arange(COUNT, device=device)[None], documents, None, None)
    assert hidden_TD.dtype == embeddings_TD.dtype
    logprobs_T1 = module.logprobs(hidden_TD, None, targets_T[:, None], 1.0)
    logprobs_T1.sum().backward()
    assert embeddings_TD.grad is not None
    return logprobs_T1.detach(), embeddings_TD.grad


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_closer_to_those_in_float32(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = _pass(_model(kind, tmp_path / "model", torch.float32, device))
    wide = _pass(_model(kind, tmp_path / "model", torch.bfloat16, device))
    monkeypatch.setattr(fused_layers, "stream_dtype", lambda _, dtype: dtype)
    plain = _pass(_model(kind, tmp_path / "model", torch.bfloat16, device))
    for name, *values in zip(("logprobs", "gradient"), wide, plain, exact, strict=True):
        of_wide, of_plain = _error(values[0], values[2]), _error(values[1], values[2])
        assert of_wide < 0.6 * of_plain, (name, of_wide, of_plain)


@pytest.mark.parametrize("device", DEVICES)
def test_recomputed_layers_have_the_same_gradients(device: str, tmp_path: Path) -> None:
    module = _model("llama", tmp_path / "model", torch.bfloat16, device)
    for kept, recomputed in zip(_pass(module), _pass(module, 1.0), strict=True):
        assert torch.equal(kept, recomputed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2_vl", "qwen3_moe", "gemma3_text"])
def test_layers_of_llamas_kind_pass_the_stream_in_float32(name: str, dtype: torch.dtype) -> None:
    """Other families, and float32 models, behave as in transformers."""
    directory = ensure_family(name)
    settings = TrainerSettings(model=str(directory), dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    family, _, module = load_model(settings, directory, torch.device("cpu"))
    LoraInjector(list(family.lora_targets(module.requires_grad_(False).hf)))
    decoder, model_type = module.hf.get_decoder(), module.hf.config.get_text_config().model_type
    found: list[torch.dtype] = []
    for layer in decoder.layers[1:]:
        layer.register_forward_pre_hook(lambda _, given: found.append(given[0].dtype))
    tokens_T = torch.arange(8)
    embeddings_TD = module.family.embed(module.hf, tokens_T)
    positions = torch.arange(8).expand(3 if name == "qwen2_vl" else 1, -1)
    documents = Documents(torch.tensor([0, 8], dtype=torch.int32), 8)
    hidden_TD = module.run_language(embeddings_TD, positions, documents, None, None, tokens_T)
    expected = torch.float32 if model_type in LLAMA_LIKE else dtype
    assert set(found) == {expected} == {stream_dtype(model_type, dtype)}
    assert hidden_TD.dtype == dtype
    assert ("forward" in vars(decoder.norm)) == (expected != dtype)


def test_the_norm_of_the_stream_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    stream_TD = torch.randn(8, 64, generator=generator)
    weight_D = torch.randn(64, generator=generator).bfloat16()
    exact = stream_TD.double() * torch.rsqrt(stream_TD.double().square().mean(-1, keepdim=True) + 1e-6) * weight_D
    found = residual_norm(stream_TD, weight_D, 1e-6)
    assert found.dtype == torch.bfloat16
    assert ((found.double() / exact - 1).abs().max()) < 1.01 * 2**-8


def test_a_gated_mlp_rounds_its_float32_products_once() -> None:
    generator = torch.Generator().manual_seed(0)
    gate_TI, up_TI, direction_TI = (torch.randn(64, 32, generator=generator) * 4 for _ in range(3))
    exact = [gate_TI.double().requires_grad_(), up_TI.double().requires_grad_()]
    product = torch.nn.functional.silu(exact[0]) * exact[1]
    product.backward(direction_TI.bfloat16().double())
    leaves = [gate_TI.requires_grad_(), up_TI.requires_grad_()]
    found: Tensor = fused_layers._RoundedSwiglu.apply(*leaves, torch.bfloat16)  # type: ignore[no-untyped-call]
    assert found.dtype == torch.bfloat16
    assert ((found.double() / product - 1).abs().max()) < 1.01 * 2**-8
    found.backward(direction_TI.bfloat16())
    # The backward pass reads gate and up in bfloat16, with an error of up to 2**-9 each.
    for leaf, of in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        assert of.grad is not None
        assert leaf.grad.dtype == torch.float32
        assert _error(leaf.grad, of.grad) < 2**-8
