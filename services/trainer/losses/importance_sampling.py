"""Policy gradient with importance weights."""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from collections.abc import Mapping

import torch
from torch import Tensor

from services.trainer.losses.base import Loss, LossInput, LossValue


class ImportanceSampling(Loss):
    """-sum w exp(logprob - q) A, with q the sampler's log-probabilities (tinker-contract, section 5)."""

    name = "importance_sampling"
    inputs = (LossInput("logprobs"), LossInput("advantages"), LossInput("weights", required=False))

    def compute(self, logprobs_TK: Tensor, inputs_TK: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
        factors_TK = inputs_TK["weights"] * inputs_TK["advantages"]
        # A position that counts for nothing must not turn into inf * 0.
        log_ratio_TK = torch.where(factors_TK == 0, 0.0, logprobs_TK - inputs_TK["logprobs"])
        ratio_TK = torch.exp(log_ratio_TK)
        return LossValue(-(ratio_TK * factors_TK).sum(), {"ratio:max": ratio_TK.detach().max()})
