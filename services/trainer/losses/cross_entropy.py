"""Weighted negative log-likelihood."""

from collections.abc import Mapping

from torch import Tensor

from services.trainer.losses.base import Loss, LossInput, LossValue


class CrossEntropy(Loss):
    """-sum w logprob. Weights may be negative and are never normalised (tinker-contract, section 5)."""

    name = "cross_entropy"
    inputs = (LossInput("weights"),)
    target_ranks = (1, 2)

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        weights = inputs["weights"]
        return LossValue(-(weights * logprobs).sum(), {"weights:sum": weights.sum()})
