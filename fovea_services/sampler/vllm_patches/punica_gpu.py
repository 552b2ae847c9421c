"""LoRA on GPU: vLLM's own kernels, told whose rows they are when prompts are scored.

Replaces: `vllm.platforms.cuda.CudaPlatformBase.get_punica_wrapper`, which names
    `vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU`.
Why: `add_lora_logits` takes rows of logits for the batch's requests, one row each. The rows of a prompt all belong to
    one request: an adapter of `lm_head` is dropped from prompt scores, or another tenant's is taken.
Upstream: vllm-project/vllm issues 51594 and 16668, open; pull requests 51597 (V1 runner) and 53842 (V2), open.
Delete when: prompt scores with an adapter of `lm_head` are right without it, and `prompt_scorer` with it.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.platforms import current_platform

from fovea_services.sampler.vllm_patches.prompt_scorer import OneAdapterLogits


def apply() -> None:
    """Has vLLM take ScoringPunicaWrapper; twice is no error."""
    platform: Any = type(current_platform)
    platform.get_punica_wrapper = classmethod(lambda _: f"{__name__}.{ScoringPunicaWrapper.__name__}")


class ScoringPunicaWrapper(OneAdapterLogits, PunicaWrapperGPU):  # type: ignore[misc]
    """PunicaWrapperGPU with `one_adapter_logits`; vLLM marks the parent final, yet offers no other place for it."""

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *arguments: Any, **options: Any) -> None:
        if self.logits_slot is None:
            super().add_lora_logits(y, x, *arguments, **options)
        elif self.logits_slot >= 0:
            row_count = x.view(-1, x.shape[-1]).shape[0]
            slots = torch.full((row_count,), self.logits_slot, dtype=torch.long, device=x.device)
            self.prompt_mapping_meta.prepare_tensors(slots)
            try:
                super().add_lora_logits(y, x, *arguments, **options)
            finally:
                self.prompt_mapping_meta.prepare_tensors(self.sampler_indices)
