"""The sampler keeps the residual stream in float32 for the same families as the trainer, for any vLLM class."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from fovea.runtime.hosts import interface_of
from fovea.runtime.model_files import LLAMA_LIKE
from fovea_sampler.vllm_patches import float32_residual
from fovea_trainer.model.packed_model import load_model
from fovea_trainer.settings import TrainerSettings
from tests.families import ensure_family
from tests.unit.sampler.engine_configs import engine_config

EPSILON = 1e-6


@contextmanager
def _one_worker(config: VllmConfig, folder: Path) -> Iterator[None]:
    """vLLM's parallel state for a single worker, which its layers need."""
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(config):
        patch.setenv("GLOO_SOCKET_IFNAME", interface_of("127.0.0.1") or "lo")
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/meet", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def _config(directory: Path, dtype: str) -> VllmConfig:
    config = engine_config(directory, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True)
    float32_residual.configure(config)
    return config


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "mistral", "mixtral", "qwen2_5", "qwen2_vl", "qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe"),
        *("idefics3", "gemma3_text"),
    ],
)
def test_a_model_in_bfloat16_has_the_stream_that_the_trainer_gives_it(name: str, tmp_path: Path) -> None:
    directory = ensure_family(name)
    config = _config(directory, "bfloat16")
    text = AutoConfig.from_pretrained(directory).get_text_config()
    is_wide = text.model_type in LLAMA_LIKE
    assert config.additional_config == ({"fovea_float32_layers": True} if is_wide else {})
    with _one_worker(config, tmp_path), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        model = initialize_model(config)
    if is_wide:
        float32_residual.widen(model, text.num_hidden_layers)
        language = model.get_language_model() if hasattr(model, "get_language_model") else model
        found = {name[name.index("layers.") :] for name in float32_residual.wide_modules(language)}
        assert found == _wide_in_trainer(directory)
    else:
        with pytest.raises(RuntimeError, match="norms between its"):
            float32_residual.widen(model, text.num_hidden_layers)


def _wide_in_trainer(directory: Path) -> set[str]:
    """Returns vLLM's names of the modules that the trainer widens."""
    settings = TrainerSettings(model=str(directory), dtype="bfloat16")
    hf = load_model(settings, directory, torch.device("cpu"))[2].hf
    wide = {name[name.index("layers.") :] for name, module in hf.named_modules() if hasattr(module, "is_wide")}
    assert wide
    return {name.replace("gate_proj", "gate_up_proj").replace("mlp.up_proj", "mlp.gate_up_proj") for name in wide}


def test_a_model_in_float32_keeps_vllms_code() -> None:
    assert _config(ensure_family("llama"), "float32").additional_config == {}


def test_a_norm_adds_in_float32_and_rounds_its_result_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x, embedding = torch.randn(2, 8, 64, generator=generator).bfloat16()
    stream, weight = torch.randn(8, 64, generator=generator), torch.randn(64, generator=generator).bfloat16()
    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(64, eps=EPSILON, dtype=torch.bfloat16)
    norm.weight.data.copy_(weight)
    for residual in (embedding, stream):
        found = float32_residual._norm(norm, x.clone(), residual.clone())
        assert torch.equal(found[1], x.float() + residual)
        _check(found[0], x.double() + residual, weight)
    alone = float32_residual._norm(norm, x.clone())
    assert isinstance(alone, torch.Tensor)
    _check(alone, x.double(), weight)


def _check(found: torch.Tensor, total: torch.Tensor, weight: torch.Tensor) -> None:
    exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPSILON) * weight
    assert found.dtype == torch.bfloat16
    assert (found.double() / exact - 1).abs().max() < 1.01 * 2**-8


def test_a_gated_mlp_rounds_its_float32_products_once() -> None:
    products = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 4
    with set_current_vllm_config(VllmConfig()):
        act: Any = SiluAndMul()
    act.fovea_dtype = torch.bfloat16
    found = float32_residual._silu_and_mul(act, products)
    gate, up = products.double().chunk(2, dim=-1)
    assert found.dtype == torch.bfloat16
    assert (found.double() / (torch.nn.functional.silu(gate) * up) - 1).abs().max() < 1.01 * 2**-8
