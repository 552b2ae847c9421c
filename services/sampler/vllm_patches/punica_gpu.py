"""LoRA on GPU: vLLM's own kernels, told whose rows they are when prompts are scored."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU


class ScoringPunicaWrapper(PunicaWrapperGPU):  # type: ignore[misc]
    """PunicaWrapperGPU with `one_adapter_logits`; vLLM marks the parent final, yet offers no other place for it."""

    _logits_slot: int | None = None

    @contextmanager
    def one_adapter_logits(self, slot: int) -> Iterator[None]:
        """Within it, all rows given to `add_lora_logits` belong to the adapter in `slot`, or to none for -1."""
        before, self._logits_slot = self._logits_slot, slot
        try:
            yield
        finally:
            self._logits_slot = before

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *arguments: Any, **options: Any) -> None:
        """See PunicaWrapperGPU."""
        if self._logits_slot is None:
            super().add_lora_logits(y, x, *arguments, **options)
        elif self._logits_slot >= 0:
            row_count = x.view(-1, x.shape[-1]).shape[0]
            slots = torch.full((row_count,), self._logits_slot, dtype=torch.long, device=x.device)
            self.prompt_mapping_meta.prepare_tensors(slots)
            try:
                super().add_lora_logits(y, x, *arguments, **options)
            finally:
                self.prompt_mapping_meta.prepare_tensors(self.sampler_indices)
