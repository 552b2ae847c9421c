"""The importance sampling loss: policy gradient with importance weights."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fovea_services.trainer.losses.loss import Loss, LossValue
from fovea_services.trainer.losses.policy_gradient import POLICY_INPUTS, counts, greatest_ratio


class ImportanceSampling(Loss):
    """-sum w r A; notation in policy_gradient.py."""

    name = "importance_sampling"
    inputs = POLICY_INPUTS

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        matter = counts(inputs)
        log_ratio = torch.where(matter, logprobs - inputs["logprobs"], 0.0)
        loss = -(torch.exp(log_ratio) * inputs["weights"] * inputs["advantages"]).sum()
        return LossValue(loss, {"ratio:max": greatest_ratio(log_ratio, matter)})
