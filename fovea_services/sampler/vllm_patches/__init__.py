"""What Fovea replaces inside vLLM 0.32.0. Whoever upgrades vLLM begins here.

The docstring of each module of `PATCHES` says what it replaces, why, where vLLM hears of it, and when it can be
deleted; `tests/unit/sampler/test_vllm_patches.py` has a test for each that fails once vLLM no longer needs it, or has
changed what the patch was written against.

All of it is for vLLM's V1 model runner, which `vllm_launch.prepare_environment` asks for on GPU (V2 runs nowhere
without Triton, so a CPU engine is V1 by itself). V2 keeps its requests, its sampler and its prompt scores elsewhere:
`prompt_scorer` and `draws` find nothing to replace there. They must be written
again for it before `VLLM_USE_V2_MODEL_RUNNER` can go, and `routed_experts` goes then; `docs/lab/notes.md` says where
each of them is in V2.

Other workarounds are settings of vLLM's own and lie where they are set, in `engine/vllm_launch.py`.
"""

from typing import Any

from vllm.platforms import current_platform

from fovea_services.sampler.vllm_patches import (
    adapted_modules,
    draws,
    experts_cpu,
    fresh_blocks,
    grammar_budget,
    image_attention_cpu,
    kernels_cpu,
    lora_slots,
    parameter_names,
    prompt_scorer,
    punica,
    routed_experts,
)

PATCHES = (
    adapted_modules,  # before_model
    parameter_names,  # before_model
    image_attention_cpu,  # before_model, on CPU; by vllm_launch and after_model too
    punica,  # before_model
    experts_cpu,  # before_model, on CPU
    kernels_cpu,  # before_model, on CPU; by ArrivalWeightTransferEngine whenever full weights have been loaded
    fresh_blocks,  # before_model; its scheduler by vllm_launch
    grammar_budget,  # before_model; by the schedulers of fresh_blocks too
    routed_experts,  # before_model; its scheduler by vllm_launch
    draws,  # after_model
    prompt_scorer,  # after_model
    lora_slots,  # by AdapterBank, from which vLLM gets its adapters then
)


def before_model() -> None:
    """To be called in every process that loads a model, before it does; twice is no error."""
    adapted_modules.apply()
    parameter_names.apply()
    routed_experts.apply()
    fresh_blocks.apply()
    punica.apply()
    grammar_budget.apply()
    if current_platform.is_cpu():
        experts_cpu.apply()
        kernels_cpu.apply()
        image_attention_cpu.apply()


def after_model(runner: Any) -> None:
    """To be called once in every worker, with vLLM's model runner, when its model is loaded."""
    if runner.device.type == "cpu":
        image_attention_cpu.check(runner)
    draws.apply(runner)
    prompt_scorer.apply(runner)
