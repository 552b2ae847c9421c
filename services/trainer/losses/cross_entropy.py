"""Weighted negative log-likelihood."""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from collections.abc import Mapping

from torch import Tensor

from services.trainer.losses.base import Loss, LossInput, LossValue


class CrossEntropy(Loss):
    """-sum w logprob. Weights may be negative and are never normalised (tinker-contract, section 5)."""

    name = "cross_entropy"
    inputs = (LossInput("weights"),)
    many_targets = True

    def compute(self, logprobs_TK: Tensor, inputs_TK: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
        weights_TK = inputs_TK["weights"]
        return LossValue(-(weights_TK * logprobs_TK).sum(), {"weights:sum": weights_TK.sum()})
