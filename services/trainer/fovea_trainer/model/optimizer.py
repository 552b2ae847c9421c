"""AdamW as in torch, with all hyperparameters given at each step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fovea.api.v1 import trainer_pb2
from fovea.wire.errors import InvalidInput

MOMENTS = ("exp_avg", "exp_avg_sq")

LARGEST_WEIGHT = 65504.0
"""The largest float16. A larger weight is infinite in a float16 sampler or export. Also, the product of a few such
weights, as in an adapter's gate, up and down projections, exceeds the largest float32, 3.4e38, in any dtype. Weights of
trained models are below 1,000.
"""
_FAR = 1e38
"""Just below the largest float32: a value bounded by this does not overflow, in whatever order it is summed."""
_FAR_NORM = 1e18
"""A gradient norm below which the square is far below the largest float32."""
_SMALLEST_EPS = 1e-16
"""The smallest eps for which the bound on an update holds. It is far above the square root of the smallest float32,
1e-19, so a second moment that is rounded to 0 does not matter beside it.
"""
_TRIAL_ELEMENTS = 2**22
"""Elements of a block for which temporary tensors are made: a step needs little memory on a full device."""


@dataclass(frozen=True)
class Adam:
    """The hyperparameters of one step, as `AdamParams` on the wire, with the same defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    @classmethod
    def of(cls, given: trainer_pb2.AdamParams) -> "Adam":
        """Reads the hyperparameters from a message. Unset fields get defaults. Raises InvalidInput as `check` does."""
        adam = cls(**{field.name: value for field, value in given.ListFields()})
        adam.check()
        return adam

    def check(self) -> None:
        """Raises InvalidInput for values outside the domain of AdamW."""
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not 0 <= value <= _FAR:
                raise InvalidInput(f"adam.{name} {value} must be in [0, {_FAR:g}]", field=f"adam.{name}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise InvalidInput(f"adam.{name} {value} must be in [0, 1)", field=f"adam.{name}")

    def metrics(self, norm: float) -> dict[str, float]:
        """Returns the metrics of a step from the norm of its gradients."""
        return {
            "grad_norm:mean": norm,
            "grad_norm_clipped:mean": norm * clip_factor(norm, self.grad_clip_norm),
            "learning_rate:mean": self.learning_rate,
        }


class AdamW:
    """torch.optim.AdamW over this rank's tensors. Moments and step count start at zero.

    Args:
        parameters: Float tensors, updated in place. Their `grad` must be set before a step.
        largest: The largest parameter magnitude that `stays_in_bounds` accepts.
    """

    def __init__(self, parameters: Sequence[Tensor], largest: float = LARGEST_WEIGHT) -> None:
        self._parameters = list(parameters)
        # A rank's shard of a tensor with fewer rows than ranks may be empty. An empty tensor has no largest element.
        self._filled = [parameter for parameter in self._parameters if parameter.numel()]
        self.largest = largest
        self._ratio: Tensor | None = None
        """The bound of `_next_ratio`; None until measured."""
        # The fused kernel needs no temporary copies of the weights. On a CPU it would change the last bit of sums.
        on_gpu = self._parameters[0].is_cuda
        self._torch = torch.optim.AdamW(self._parameters, lr=0.0, fused=on_gpu or None)
        self.load([{name: torch.zeros_like(p) for name in MOMENTS} for p in self._parameters], 0)

    def step(self, adam: Adam) -> None:
        """Takes one step: Loshchilov and Hutter (2019), algorithm 2, with decay scaled by the learning rate."""
        for group in self._torch.param_groups:
            group.update(
                lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
            )
        self._torch.step()
        if self._ratio is not None:
            self._ratio = self._next_ratio(adam, self._ratio)

    def is_surely_in_bounds(self, adam: Adam, norm: float) -> Tensor:
        """Returns True if norms alone prove that a step leaves all parameters in bounds.

        The update of a parameter is at most the learning rate times a bound on |m| / (sqrt(v) + eps). The result is
        False if a value is already not finite.

        Args:
            adam: The hyperparameters.
            norm: Global norm of the gradients.

        Returns:
            A bool scalar on the device.
        """
        if adam.eps < _SMALLEST_EPS or norm > _FAR_NORM:
            return torch.tensor(False, device=self._parameters[0].device)
        weight = torch.stack(torch._foreach_norm(self._filled, math.inf)).amax()
        kept = max(1.0, abs(1.0 - adam.learning_rate * adam.weight_decay))
        # The bias correction of the first moment divides by 1 - beta1 or more; the second only shrinks the update.
        rate = adam.learning_rate / (1.0 - adam.beta1)
        if self._ratio is None:
            self._ratio = self._measured_ratio()
        return weight * kept + self._next_ratio(adam, self._ratio) * rate <= self.largest

    @staticmethod
    def _next_ratio(adam: Adam, ratio: Tensor) -> Tensor:
        """Returns a bound on |m| / (sqrt(v) + eps) after a step, given the bound before it. float32 scalar.

        The new m and the new v each have a term of the old moment and a term of the gradient. The ratio of the first
        terms is at most the old ratio times beta1 / sqrt(beta2). The ratio of the second terms is
        (1 - beta1) / sqrt(1 - beta2). The bound is the sum of both. The factor 1.01 covers rounding.
        """
        grown = adam.beta1 / math.sqrt(adam.beta2) if adam.beta2 else math.inf if adam.beta1 else 0.0
        return 1.01 * (ratio * grown + (1.0 - adam.beta1) / math.sqrt(1.0 - adam.beta2))

    def _measured_ratio(self) -> Tensor:
        """Returns the largest |m| / (sqrt(v) + eps) of the current moments, with the smallest eps. float32 scalar."""
        largest = torch.zeros((), device=self._parameters[0].device)
        for parameter in self._filled:
            flat: list[Any] = [self._torch.state[parameter][name].flatten() for name in MOMENTS]
            for first, second in zip(*(one.split(_TRIAL_ELEMENTS) for one in flat), strict=True):
                largest = torch.maximum(largest, (first.abs() / (second.sqrt() + _SMALLEST_EPS)).amax())
        return largest

    def stays_in_bounds(self, adam: Adam) -> Tensor:
        """Returns True, a bool scalar on the device, if a step leaves parameters in bounds and moments finite.

        The step is tried on copies of one block of elements at a time, to limit memory.
        """
        finite = torch.tensor(True, device=self._parameters[0].device)
        self._ratio = None  # the bound was too loose: measure it again before the next step
        for parameter in self._filled:
            state = self._torch.state[parameter]
            rate = adam.learning_rate / (1.0 - adam.beta1 ** (int(state["step"]) + 1))
            if (
                max(rate, adam.learning_rate * adam.weight_decay) > _FAR
            ):  # torch raises for values above float32's range
                return ~finite
            assert parameter.grad is not None
            whole = (parameter.detach(), parameter.grad, *(state[name] for name in MOMENTS))
            for weight, grad, *moments in zip(*(t.flatten().split(_TRIAL_ELEMENTS) for t in whole), strict=True):
                copy = weight.clone()
                copy.grad = grad
                trial = AdamW([copy])
                trial.load([{name: m.clone() for name, m in zip(MOMENTS, moments, strict=True)}], int(state["step"]))
                trial.step(adam)
                finite &= copy.abs().amax() <= self.largest
                for values in trial.moments():
                    finite &= torch.stack([values[name].isfinite().all() for name in MOMENTS]).all()
        return finite

    def rehearse(self) -> None:
        """Raises torch's out-of-memory error if a step would run out of memory.

        On a GPU the fused kernel needs no memory, so this does nothing.
        """
        largest = max(self._parameters, key=Tensor.numel)
        if not largest.is_cuda:
            torch.empty_like(largest, memory_format=torch.contiguous_format).new_empty(3 * largest.numel())

    def moments(self) -> list[dict[str, Tensor]]:
        """Returns both moments of each parameter, in order. They are not copies."""
        return [{name: self._torch.state[p][name] for name in MOMENTS} for p in self._parameters]

    def load(self, moments: Sequence[dict[str, Tensor]], step: int) -> None:
        """Replaces the moments and the step count. The tensors are not copied."""
        for parameter, values in zip(self._parameters, moments, strict=True):
            count = torch.tensor(float(step), device=parameter.device)
            self._torch.state[parameter] = {"step": count, **values}
        self._ratio = None


def clip_factor(norm: float, bound: float) -> float:
    """Returns the factor that clips gradients with a global norm, as in torch.nn.utils.clip_grad_norm_.

    A bound of 0 disables clipping.
    """
    return min(1.0, bound / (norm + 1e-6)) if bound > 0 else 1.0
