"""Which distribution reported logprobs follow, put into a model runner that vLLM has built."""

from typing import Any

import torch


class TemperatureLogprobs(torch.nn.Module):
    """Reports logprobs after the temperature and before top-k and top-p.

    With `logprobs_mode="processed_logprobs"` vLLM reports them after top-k and top-p: then alternatives hold -inf, and
    a trainer, which knows the whole distribution only, cannot reproduce them. Here they are finite everywhere, equal to
    log-softmax(logits / T) whatever was cut off.
    """

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


def report_temperature_logprobs(runner: Any) -> None:
    """Makes a model runner's sampler report temperature-scaled logprobs."""
    runner.sampler.topk_topp_sampler = TemperatureLogprobs(runner.sampler.topk_topp_sampler)
