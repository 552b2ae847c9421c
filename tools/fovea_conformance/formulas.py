"""The losses of the contract's section 5 in float64, with gradients by torch's autograd."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea_conformance.gradients import Arrays

Inputs = Mapping[str, NDArray[np.float64]]
Config = Mapping[str, float]
Formula = Callable[[Tensor, Mapping[str, Tensor], Config], Tensor]


def _ratio(logprobs: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(logprobs - given["logprobs"])


def _clamp(ratio: Tensor, config: Config) -> Tensor:
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


def _cross_entropy(logprobs: Tensor, given: Mapping[str, Tensor], config: Config) -> Tensor:
    return -(given["weights"] * logprobs).sum()


def _importance_sampling(logprobs: Tensor, given: Mapping[str, Tensor], config: Config) -> Tensor:
    return -(_ratio(logprobs, given) * given["advantages"]).sum()


def _ppo(logprobs: Tensor, given: Mapping[str, Tensor], config: Config) -> Tensor:
    ratio = _ratio(logprobs, given)
    return -torch.minimum(ratio * given["advantages"], _clamp(ratio, config) * given["advantages"]).sum()


def _cispo(logprobs: Tensor, given: Mapping[str, Tensor], config: Config) -> Tensor:
    return -(_clamp(_ratio(logprobs, given), config).detach() * logprobs * given["advantages"]).sum()


def _dro(logprobs: Tensor, given: Mapping[str, Tensor], config: Config) -> Tensor:
    distance = logprobs - given["logprobs"]
    return -(logprobs * given["advantages"] - config["beta"] / 2 * distance**2).sum()


def _gspo(logprobs: Tensor, given: Mapping[str, Tensor], config: Config) -> Tensor:
    counted = given["sequence_ratio_mask"] != 0
    sequence = torch.exp((logprobs.detach() - given["logprobs"])[counted].mean())
    ratio = sequence * torch.exp(logprobs - logprobs.detach())
    return -torch.minimum(ratio * given["advantages"], _clamp(ratio, config) * given["advantages"]).sum()


FORMULAS: dict[str, Formula] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}


def loss_and_gradient(name: str, logprobs: Arrays, inputs: Sequence[Inputs], config: Config) -> tuple[float, Arrays]:
    """Returns the sum of the losses, and dL/dlogprob of each datum."""
    total, gradients = 0.0, []
    for logprobs_of_one, given in zip(logprobs, inputs, strict=True):
        leaf = torch.tensor(logprobs_of_one, dtype=torch.float64, requires_grad=True)
        loss = FORMULAS[name](leaf, {key: torch.tensor(value) for key, value in given.items()}, config)
        (gradient,) = torch.autograd.grad(loss, leaf)
        total += loss.item()
        gradients.append(gradient.numpy())
    return total, gradients
