"""Patches of vLLM 0.32 and 0.33. Start here when you upgrade vLLM.

The docstring of each module in `PATCHES` states what the module replaces, what vLLM does and why that is wrong for
Fovea, the related upstream issues, and the condition under which the patch can be deleted.
`tests/unit/sampler/test_vllm_patches.py` has a test for each patch. The test fails once vLLM no longer needs the patch,
or once vLLM has changed the code that the patch was written for. `python -m tests.unit.sampler.patched_names FOLDER`
compares another version with the installed one.

All patches are for vLLM's V1 model runner. `vllm_launch.prepare_environment` selects it on a GPU; a CPU engine always
uses V1, because V2 requires Triton. V2 stores requests, the sampler and prompt scores in other places, so
`prompt_scorer` and `draws` would find nothing to replace. Both must be rewritten for V2 before
`VLLM_USE_V2_MODEL_RUNNER` can be removed, and `routed_experts` can be deleted then. `docs/lab/notes.md` lists the
places in V2.

Other workarounds are settings of vLLM. They are documented where they are set, in `engine/vllm_launch.py`.
"""

from types import ModuleType
from typing import Any

import vllm
from vllm.platforms import current_platform

_CPU, _BOTH = ("0.32",), ("0.32", "0.33")


def refusal(version: str, is_cpu: bool) -> str:
    """Returns the reason why Fovea does not run on a version of vLLM, or an empty string.

    A patch of code that has changed might raise no error, and give one tenant the adapter of another.
    """
    known = _CPU if is_cpu else _BOTH
    if ".".join(version.split(".")[:2]) in known:
        return ""
    device = "CPUs" if is_cpu else "GPUs"
    return f"vLLM {version} is installed, but Fovea runs on {' and '.join(known)} on {device}: install one of them"


if _problem := refusal(vllm.__version__, current_platform.is_cpu()):
    raise ValueError(_problem)  # before the imports below, which may fail with another version

from fovea_sampler.vllm_patches import (  # noqa: E402
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

PATCHES: dict[ModuleType, tuple[str, ...]] = {
    model_classes: _BOTH,  # before_model
    image_attention_cpu: _CPU,  # before_model, on CPU; also vllm_launch and after_model
    punica: _BOTH,  # before_model
    experts_cpu: _CPU,  # before_model, on CPU
    kernels_cpu: _CPU,  # before_model, on CPU; also ArrivalWeightTransferEngine, after it has loaded full weights
    float32_residual: _BOTH,  # before_model; also vllm_launch
    fresh_blocks: _BOTH,  # before_model; vllm_launch sets its scheduler
    grammar_budget: _BOTH,  # before_model; also the schedulers of fresh_blocks
    routed_experts: _BOTH,  # before_model; vllm_launch sets its scheduler
    draws: _BOTH,  # before_model and after_model; also the schedulers of fresh_blocks
    prompt_scorer: _BOTH,  # after_model
    lora_memory: _BOTH,  # before_model; also vllm_launch
    lora_slots: _BOTH,  # AdapterBank
}
"""All patches, each with the versions of vLLM that it applies to, and the code that applies it.

There is no build of 0.33 for CPUs.
"""


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
