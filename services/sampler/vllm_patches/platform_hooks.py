"""What Fovea changes in vLLM's view of the machine, in every process that loads the model."""

from typing import Any

import torch

from services.sampler.vllm_patches import rms_norm_cpu

_PACKAGE = "services.sampler.vllm_patches"


def adapt_platform() -> None:
    """To be called before a model is loaded; twice is no error."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    wrapper = f"{_PACKAGE}.punica_gpu.ScoringPunicaWrapper"
    if current_platform.is_cpu():
        wrapper = f"{_PACKAGE}.punica_cpu.RunwisePunicaWrapper"
        # Compiling with inductor costs 10 s at the first request of each kind.
        platform.simple_compile_backend = "eager"
        rms_norm_cpu.register()
        platform.get_default_ir_op_priority = classmethod(lambda _, config: rms_norm_cpu.priority(config))
    platform.get_punica_wrapper = classmethod(lambda _: wrapper)
    _adapt_every_unembedding()


def _adapt_every_unembedding() -> None:
    """Lets adapters change `lm_head` of any model.

    vLLM 0.32.0 lets a model say which of its embeddings take LoRA: Qwen3 names `lm_head`, Qwen2 and with it Qwen2.5-VL
    do not, though the layers that apply such an adapter are the same.
    """
    from vllm.lora import model_manager

    ask_model: Any = model_manager.get_supported_lora_modules
    if getattr(ask_model, "with_unembedding", False):
        return

    def supported(model: torch.nn.Module) -> list[str]:
        return sorted({*ask_model(model), "lm_head"})

    supported.with_unembedding = True  # type: ignore[attr-defined]
    model_manager.get_supported_lora_modules = supported
