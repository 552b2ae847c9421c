"""Gradients of every loss in bfloat16 against float64, for target probabilities from 1e-6 to 1 - 1e-6.

Hidden states and weights are small multiples of powers of two, so that every logit is exact in bfloat16 and the
remaining error is the trainer's. Errors are relative to a tensor's norm, and to each position's for hidden states; a
bfloat16 number is off by up to 2^-9, and several roundings follow each other.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape: T positions, K targets, D, V, R rank

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from fovea_trainer.losses import LOSSES
from fovea_trainer.model.lora_linear import LoraPair
from fovea_trainer.model.target_logprobs import target_logprobs
from tests.unit.trainer.losses import loss_references
from tests.unit.trainer.losses.test_losses import Arrays, compute, make_loss

T, V, R, NOISE = 24, 40, 4, 8
TARGETS = 8
"""The first tokens of the vocabulary; the hidden states have a separate dimension for each."""
SCALE = 0.5
BANDS = {
    "rare": (-10.0, -4.0),
    "even": (-4.0, 8.0),
    "likely": (8.0, 12.0),
    "confident": (12.0, 16.0),
    "certain": (16.0, 19.0),
}
"""Amount added to the logit of the target."""
BOUND = 0.008
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
"""A GPU has its own fused kernels, and products with float32 results."""


@dataclass(frozen=True)
class Head:
    """A head, its adapter, and positions to score; all numbers and logits are exact in bfloat16."""

    hidden_TD: Tensor
    weight_VD: Tensor
    a_RD: Tensor
    b_VR: Tensor
    targets_TK: Tensor

    @classmethod
    def drawn(cls, seed: int, band: str, target_count: int = 1) -> "Head":
        """Draws a head in float64."""
        random = np.random.default_rng(seed)
        targets = random.integers(0, TARGETS, (T, target_count))
        hidden = np.concatenate([np.zeros((T, TARGETS)), random.choice([-1.0, -0.5, 0.5, 1.0], (T, NOISE))], axis=1)
        low, high = BANDS[band]
        hidden[np.arange(T), targets[:, 0]] = np.round(random.uniform(low, high, T) * 4) / 4
        weight = np.concatenate([np.eye(V, TARGETS), random.integers(-2, 3, (V, NOISE)) / 4], axis=1)
        a = np.concatenate([np.zeros((R, TARGETS)), random.integers(-1, 2, (R, NOISE))], axis=1)
        b = random.integers(-1, 2, (V, R)) / 2
        head = cls(*(torch.from_numpy(values) for values in (hidden, weight, a, b, targets)))
        logits_TV = head.logits(with_adapter=True)
        assert torch.equal(logits_TV.bfloat16().double(), logits_TV), "the logits must be exact"
        return head

    def logits(self, with_adapter: bool) -> Tensor:
        """Returns the logits, float64 [T, V]."""
        logits_TV = self.hidden_TD @ self.weight_VD.T
        return logits_TV + SCALE * self.hidden_TD @ self.a_RD.T @ self.b_VR.T if with_adapter else logits_TV

    def exact_gradients(self, grad_TK: Tensor, with_adapter: bool) -> dict[str, Tensor]:
        """Returns gradients by the chain rule in float64, directly from d logits = grad (onehot - p)."""
        p_TV = torch.softmax(self.logits(with_adapter), dim=-1)
        d_logits_TV = torch.zeros_like(p_TV).scatter_add_(1, self.targets_TK, grad_TK)
        d_logits_TV -= grad_TK.sum(dim=1, keepdim=True) * p_TV
        found = {"hidden": d_logits_TV @ self.weight_VD, "weight": d_logits_TV.T @ self.hidden_TD}
        if with_adapter:
            d_low_TR = SCALE * d_logits_TV @ self.b_VR
            found["hidden"] += d_low_TR @ self.a_RD
            found["a"] = d_low_TR.T @ self.hidden_TD
            found["b"] = SCALE * d_logits_TV.T @ (self.hidden_TD @ self.a_RD.T)
        return found


@dataclass(frozen=True)
class Trainers:
    """The same head in the trainer's form: bfloat16, with a float32 master of the weight or an adapter."""

    hidden: Tensor
    weight: Tensor
    master: Tensor
    pair: LoraPair

    @classmethod
    def of(cls, head: Head, device: str = "cpu") -> "Trainers":
        hidden, weight, a, b = (
            values.to(device, dtype).requires_grad_()
            for values, dtype in (
                (head.hidden_TD, torch.bfloat16),
                (head.weight_VD, torch.bfloat16),
                (head.a_RD, torch.float32),
                (head.b_VR, torch.float32),
            )
        )
        pair = LoraPair(
            a, b, a.detach().bfloat16(), b.detach().bfloat16(), torch.zeros_like(a), torch.zeros_like(b), SCALE
        )
        return cls(hidden, weight, weight.detach().float(), pair)

    def gradients(self, with_adapter: bool) -> dict[str, Tensor]:
        """Returns the gradients after a backward pass; the weight's is its master's."""
        assert self.hidden.grad is not None
        found = {"hidden": self.hidden.grad}
        if with_adapter:
            return found | {"a": self.pair.a_grad, "b": self.pair.b_grad}
        assert self.master.grad is not None
        return found | {"weight": self.master.grad}


def worst_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Returns the largest error relative to the norm, of each tensor and of each hidden-state row with a gradient."""
    errors = {}
    for name, values in found.items():
        dims = (1,) if name == "hidden" else (0, 1)
        norms = exact[name].norm(dim=dims)
        differences = (values.cpu().double() - exact[name]).norm(dim=dims)
        errors[name] = float((differences / norms)[norms > 0].max())
    return errors


def given_for(name: str, logits: Tensor, targets: Tensor, seed: int) -> Arrays:
    """Returns inputs of a loss in which every position counts and none is clipped, so that all have a gradient."""
    random = np.random.default_rng(seed + 100)
    if name == "cross_entropy":
        return {"weights": random.uniform(0.5, 2.0, T)}
    logprobs = loss_references.logprobs(logits.numpy(), targets.numpy())
    return {
        "logprobs": logprobs + random.uniform(-0.1, 0.1, T),
        "advantages": random.choice([-1.0, 1.0], T) * random.uniform(0.5, 2.0, T),
        "weights": random.uniform(0.5, 2.0, T),
        "sequence_ratio_mask": np.ones(T),
    } | ({"sampled": np.ones(T)} if name == "stable_reinforce" else {})


def loss_gradient(name: str, logits: Tensor, targets: Tensor, given: Arrays) -> Tensor:
    """Returns d loss / d logprobs of the float64 formula by central differences, [T, 1]."""
    logprobs = loss_references.logprobs(logits.numpy(), targets.numpy())
    gradient, step = np.zeros((T, 1)), 1e-5
    for t in range(T):
        sides = []
        for sign in (1, -1):
            moved = logprobs.copy()
            moved[t] += sign * step
            sides.append(loss_references.REFERENCES[name](moved, given, {}, logprobs))
        gradient[t] = (sides[0] - sides[1]) / (2 * step)
    return torch.from_numpy(gradient)


@cache
def expected(name: str, with_adapter: bool, seed: int, band: str) -> tuple[Head, Arrays, dict[str, Tensor]]:
    """Returns the random inputs and the exact gradients, for any device and head type."""
    head = Head.drawn(seed, band)
    logits, targets = head.logits(with_adapter), head.targets_TK[:, 0]
    given = given_for(name, logits, targets, seed)
    return head, given, head.exact_gradients(loss_gradient(name, logits, targets, given), with_adapter)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("head_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradients_of_every_loss_at_every_probability(
    name: str, head_dtype: torch.dtype, with_adapter: bool, seed: int, band: str, device: str
) -> None:
    head, given, exact = expected(name, with_adapter, seed, band)
    own = Trainers.of(head, device)
    trained = own.pair if with_adapter else own.master
    logprobs = target_logprobs(own.hidden, own.weight, trained, head.targets_TK.to(device), 16, head_dtype)
    torch.autograd.backward([compute(make_loss(name), logprobs[:, 0].cpu(), given).loss])
    for tensor, error in worst_error(own.gradients(with_adapter), exact).items():
        assert error < BOUND, tensor


def test_the_bands_reach_from_a_millionth_to_all_but_a_millionth() -> None:
    found = []
    for band in BANDS:
        head = Head.drawn(0, band)
        p_TV = torch.softmax(head.logits(with_adapter=False), dim=-1)
        found.append(p_TV.gather(1, head.targets_TK))
    whole = torch.cat(found)
    assert whole.min() < 2e-6
    assert 1 - whole.max() < 2e-6


@pytest.mark.parametrize("band", BANDS)
def test_a_weight_without_master(band: str) -> None:
    """FSDP reduces such a gradient; it is rounded once more if it has the weight's own type."""
    head = Head.drawn(1, band)
    own = Trainers.of(head)
    grad_TK = torch.rand(T, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.5
    found = target_logprobs(own.hidden, own.weight, None, head.targets_TK, 16)
    found.backward(grad_TK.float())
    assert own.weight.grad is not None
    error = worst_error({"weight": own.weight.grad}, head.exact_gradients(grad_TK.float().double(), False))
    assert error["weight"] < BOUND


@pytest.mark.parametrize("band", ["even", "certain"])
@pytest.mark.parametrize("kind", ["signed", "soft", "repeated", "padded"])
def test_several_targets_a_position(kind: str, band: str) -> None:
    """Equal targets add up; a teacher's distribution; slots of other datums' targets, which have no gradient."""
    K = 5
    head = Head.drawn(3, band, K)
    targets_TK = head.targets_TK
    generator = torch.Generator().manual_seed(4)
    grad_TK = torch.randn(T, K, generator=generator, dtype=torch.float64)
    if kind == "soft":
        grad_TK = grad_TK.abs() * torch.tensor([1.0, 1e-2, 1e-3, 1e-4, 1e-5], dtype=torch.float64)
    elif kind == "repeated":
        targets_TK[:] = targets_TK[:, :1]
        grad_TK = grad_TK.abs()
    elif kind == "padded":
        targets_TK[:, 1:] = 0
        grad_TK[:, 1:] = 0
    grad_TK = grad_TK.float().double()
    own = Trainers.of(head)
    found = target_logprobs(own.hidden, own.weight, own.master, targets_TK, 16)
    found.backward(grad_TK.float())
    for tensor, error in worst_error(own.gradients(False), head.exact_gradients(grad_TK, False)).items():
        assert error < BOUND, tensor


@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "adapter"])
def test_a_head_in_float32_rounds_no_logits(with_adapter: bool) -> None:
    """With arbitrary numbers: rounded logits of this size would shift log-probabilities by hundredths."""
    generator = torch.Generator().manual_seed(6)
    shapes = ((T, 64), (V, 64), (R, 64), (V, R))
    head = Head(
        *(torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes),
        torch.randint(0, V, (T, 1), generator=generator),
    )
    own = Trainers.of(head)
    trained = own.pair if with_adapter else own.master
    low_TR = own.pair.project(own.hidden).double()
    logits_TV = head.hidden_TD @ head.weight_VD.T + (SCALE * low_TR @ head.b_VR.T if with_adapter else 0.0)
    exact = logits_TV.log_softmax(-1).gather(1, head.targets_TK)
    errors = [
        (target_logprobs(own.hidden, own.weight, trained, head.targets_TK, 16, dtype).double() - exact).abs().max()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert errors[0] < 1e-4
    assert errors[1] > 1e-2


def test_logprobs_of_certain_targets_are_exact() -> None:
    head = Head.drawn(5, "certain")
    own = Trainers.of(head)
    found = target_logprobs(own.hidden, own.weight, None, head.targets_TK, 16)
    exact = head.logits(with_adapter=False).log_softmax(-1).gather(1, head.targets_TK)
    torch.testing.assert_close(found.detach().double(), exact, rtol=1e-5, atol=0)
