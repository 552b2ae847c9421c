"""Logprobs of sampled tokens after the temperature and before top-k and top-p.

Replaces: `vllm.v1.sample.sampler.Sampler.topk_topp_sampler`, an instance of
    `vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler`.
Why: with `logprobs_mode="processed_logprobs"` vLLM reports them after top-k and top-p. Alternatives hold -inf then,
    and a trainer, which knows the whole distribution only, cannot reproduce them; "raw_logprobs" leave the temperature
    out.
Upstream: none filed with vLLM; vllm-project/vime issue 64 describes the same gap.
Delete when: vLLM has a mode that reports them after the temperature alone.
"""

from typing import Any

import torch


class TemperatureLogprobs(torch.nn.Module):
    """Reports log-softmax(logits / T), finite everywhere, whatever top-k and top-p cut off."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Samples from logits [requests, vocabulary], already divided by the temperature."""
        if k is None and p is None:
            return self.inner(logits, generators, k, p)  # type: ignore[no-any-return]
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        sampled, _ = self.inner(logits, generators, k, p)
        return sampled, logprobs


def apply(runner: Any) -> None:
    """Makes a model runner's sampler report temperature-scaled logprobs."""
    runner.sampler.topk_topp_sampler = TemperatureLogprobs(runner.sampler.topk_topp_sampler)
