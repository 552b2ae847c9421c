"""The cross-entropy loss: weighted negative log-likelihood, for supervised training."""

from collections.abc import Mapping

from torch import Tensor

from fovea_services.trainer.losses.loss import Loss, LossInput, LossValue


class CrossEntropy(Loss):
    """-sum w logprob. Weights default to ones, may be negative and are never normalised."""

    name = "cross_entropy"
    inputs = (LossInput("weights", required=False),)
    target_ranks = (1, 2)

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        weights = inputs["weights"]
        return LossValue(-(weights * logprobs).sum(), {"weights:sum": weights.sum()})
