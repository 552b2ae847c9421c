"""Keeps the residual stream of language models with Llama's layers in float32, as the trainer does.

Replaces: the results of `vllm.model_executor.layers.layernorm.RMSNorm` between the layers of a model; on a GPU also
    those of `o_proj`, `gate_up_proj`, `down_proj` and their `SiluAndMul`; wraps
    `vllm.v1.worker.gpu_worker.Worker.load_model`.
Why: vLLM rounds the sum of all layers so far to the model's dtype after each half of a layer. In bfloat16 this causes
    more of the difference to the trainer than any other rounding (`python -m benchmarks.roundings`). With the patch, a
    norm adds in float32, returns the sum in float32 for the next norm, and rounds only its own result.
    The products that are added to the stream, and those of a gated MLP up to silu(gate) * up, stay in float32 too.
    Models of other families and models in float32 keep vLLM's code.
Upstream: none filed; vllm-project/vllm issue 52104 is about another rounding of the same sum.
Delete when: vLLM has an option for a float32 residual stream of all models in `LLAMA_LIKE`.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm import ir
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.v1.worker.gpu_worker import Worker

from fovea.runtime.model_files import LLAMA_LIKE

_KEY = "fovea_float32_layers"
"""The entry of vLLM's `additional_config` that is true for a model with a float32 stream.

vLLM includes the entry in the key of compiled code, so it never loads code that was compiled without the patch.
"""
_TO_STREAM = ("o_proj", "down_proj")
"""Modules that add to the stream."""
_NORMS = ("input_layernorm", "post_attention_layernorm", "norm")


def configure(config: Any) -> None:
    """Gives the model a float32 stream if its family has one and its own dtype is narrower.

    Args:
        config: vLLM's configuration.
    """
    model = config.model_config
    if model.hf_text_config.model_type in LLAMA_LIKE and model.dtype.itemsize < torch.float32.itemsize:
        config.additional_config[_KEY] = True


def apply() -> None:
    """Makes workers of this process widen the stream of configured models. It may be called twice."""
    load: Any = Worker.load_model
    if load.__module__ == __name__:
        return

    def load_model(worker: Any, **how: Any) -> None:
        load(worker, **how)
        if worker.vllm_config.additional_config.get(_KEY):
            widen(worker.model_runner.get_model(), worker.vllm_config.model_config.hf_text_config.num_hidden_layers)

    Worker.load_model = load_model


def widen(model: Any, layer_count: int) -> None:
    """Keeps the stream of a loaded model in float32. Call it before the model is compiled.

    Raises RuntimeError if the model has other norms than two for each layer and one at the end.
    """
    language = model.get_language_model() if hasattr(model, "get_language_model") else model
    norms = [
        module
        for name, module in language.named_modules()
        if isinstance(module, RMSNorm) and name.rpartition(".")[2] in _NORMS
    ]
    if len(norms) != 2 * layer_count + 1:
        raise RuntimeError(f"{type(model).__name__} has {len(norms)} norms between its {layer_count} layers")
    for norm in norms:
        norm._forward_method = MethodType(_norm, norm)
    for name, module in wide_modules(language).items():
        if module.weight.is_cuda:
            _widen_product(module)
            if name.endswith("gate_up_proj"):
                act = language.get_submodule(name.removesuffix("gate_up_proj") + "act_fn")
                act.fovea_dtype = module.weight.dtype
                act._forward_method = MethodType(_silu_and_mul, act)


def wide_modules(language: Any) -> dict[str, Any]:
    """Returns the modules that return float32 on a GPU, by their names without `base_layer`, which has the weight.

    They are those that `fuse_language` of the trainer widens.
    """
    found = {}
    for name, module in language.named_modules():
        if name.rpartition(".")[2] in _TO_STREAM:
            found[name] = module
        if hasattr(module, "gate_up_proj") and isinstance(getattr(module, "act_fn", None), SiluAndMul):
            found[f"{name}.gate_up_proj"] = module.gate_up_proj
    bases = {name: getattr(module, "base_layer", module) for name, module in found.items()}
    return {name: one for name, one in bases.items() if isinstance(one.quant_method, UnquantizedLinearMethod)}


def _widen_product(module: Any) -> None:
    if not hasattr(module.quant_method, "_gemm_impl"):
        raise RuntimeError("vLLM's UnquantizedLinearMethod has no _gemm_impl, which Fovea replaces")
    module.quant_method._gemm_impl = _wide_product


def _silu_and_mul(act: Any, products: Tensor) -> Tensor:
    """Replaces the forward pass of SiluAndMul: rounds only the result of the float32 products."""
    gate, up = products.chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(act.fovea_dtype)


def _norm(norm: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Replaces RMSNorm.forward: adds and normalises in float32. Returns the norm in the weight's dtype, and the sum."""
    weight, stream = norm.weight.data, x.float()
    if residual is not None:
        stream = stream + residual
    normed = ir.ops.rms_norm(stream, weight.float(), norm.variance_epsilon).to(weight.dtype)
    return normed if residual is None else (normed, stream)


def _wide_product(_: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replaces vLLM's product of a module: the output stays in float32."""
    flat = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
    output = flat.view(*x.shape[:-1], -1)
    return output if bias is None else output + bias
