"""Patches of vLLM 0.32.0. Start here when you upgrade vLLM.

The docstring of each module in `PATCHES` states what the module replaces, what vLLM does and why that is wrong for
Fovea, the related upstream issues, and the condition under which the patch can be deleted.
`tests/unit/sampler/test_vllm_patches.py` has a test for each patch. The test fails once vLLM no longer needs the patch,
or once vLLM has changed the code that the patch was written for.

All patches are for vLLM's V1 model runner. `vllm_launch.prepare_environment` selects it on a GPU; a CPU engine always
uses V1, because V2 requires Triton. V2 stores requests, the sampler and prompt scores in other places, so
`prompt_scorer` and `draws` would find nothing to replace. Both must be rewritten for V2 before
`VLLM_USE_V2_MODEL_RUNNER` can be removed, and `routed_experts` can be deleted then. `docs/lab/notes.md` lists the
places in V2.

Other workarounds are settings of vLLM. They are documented where they are set, in `engine/vllm_launch.py`.
"""

from typing import Any

from vllm.platforms import current_platform

from fovea_sampler.vllm_patches import (
    draws,
    experts_cpu,
    float32_residual,
    fresh_blocks,
    grammar_budget,
    image_attention_cpu,
    kernels_cpu,
    lora_memory,
    lora_slots,
    model_classes,
    prompt_scorer,
    punica,
    routed_experts,
)

PATCHES = (
    model_classes,  # before_model
    image_attention_cpu,  # before_model, on CPU; also vllm_launch and after_model
    punica,  # before_model
    experts_cpu,  # before_model, on CPU
    kernels_cpu,  # before_model, on CPU; also ArrivalWeightTransferEngine, after it has loaded full weights
    float32_residual,  # before_model; also vllm_launch
    fresh_blocks,  # before_model; vllm_launch sets its scheduler
    grammar_budget,  # before_model; also the schedulers of fresh_blocks
    routed_experts,  # before_model; vllm_launch sets its scheduler
    draws,  # before_model and after_model; also the schedulers of fresh_blocks
    prompt_scorer,  # after_model
    lora_memory,  # before_model; also vllm_launch
    lora_slots,  # AdapterBank
)
"""All patches, each with the code that applies it."""


def before_model() -> None:
    """Applies the patches that must precede loading a model. Call it in every such process; it may be called twice."""
    model_classes.apply()
    routed_experts.apply()
    float32_residual.apply()
    fresh_blocks.apply()
    punica.apply()
    lora_memory.apply()
    grammar_budget.apply()
    draws.state_versions()
    if current_platform.is_cpu():
        experts_cpu.apply()
        kernels_cpu.apply()
        image_attention_cpu.apply()


def after_model(runner: Any) -> None:
    """Applies the patches of a model runner. Call it once in every worker, after the runner has loaded its model."""
    if runner.device.type == "cpu":
        image_attention_cpu.check(runner)
    draws.apply(runner)
    prompt_scorer.apply(runner)
