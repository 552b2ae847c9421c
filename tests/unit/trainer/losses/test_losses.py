"""Losses against independent float64 formulas and numerical gradients through the logits; golden values; edge cases."""

import json
import math
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fovea.api.v1 import trainer_pb2
from fovea.wire.errors import InvalidInput
from fovea_trainer.losses import LOSSES, Loss, LossValue, loss_of
from fovea_trainer.model.target_logprobs import target_logprobs
from tests.unit.trainer.losses import loss_references
from tests.unit.trainer.losses.loss_references import REFERENCES

GOLDEN = pathlib.Path(__file__).parent / "golden" / "losses.json"
N, V, K = 16, 11, 3
POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")
CLIPPED = ("ppo", "cispo", "gspo", "stable_reinforce")
CONFIGS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.6, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "gspo": {"clip_low_threshold": 0.999, "clip_high_threshold": 1.001},
    "dro": {"beta": 0.7},
    "stable_reinforce": {"clip_low_threshold": 0.6, "max_weight": 1.1, "kl_coeff": 0.3},
}
Arrays = dict[str, npt.NDArray[np.float64]]


def make_case(name: str, seed: int, weights: bool = True, thresholds: bool = False) -> tuple[Any, Any, Arrays]:
    """Returns logits [N, V], targets [N], and inputs with some zero or negative advantages and weights."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(N, V)) * 1.5
    targets = random.integers(0, V, N)
    if name == "cross_entropy":
        return logits, targets, {"weights": random.normal(size=N)}
    given: Arrays = {
        "logprobs": loss_references.logprobs(logits, targets) + random.normal(scale=0.4, size=N),
        "advantages": random.normal(size=N) * (random.random(N) > 0.2),
    }
    if weights:
        given["weights"] = random.normal(size=N) * (random.random(N) > 0.2)
    if name == "gspo":
        given["sequence_ratio_mask"] = np.resize([0, 0, 1, 1, 0.5, 0, 2], N)
    if name == "stable_reinforce":
        given["sampled"] = np.resize([0, 1, 1, 1], N)
    if thresholds and name in CLIPPED:
        given["clip_low_threshold"] = random.uniform(0.5, 1, N)
        given["clip_high_threshold"] = random.uniform(1, 1.5, N)
    return logits, targets, given


def make_loss(name: str, **config: float) -> Loss:
    return loss_of(trainer_pb2.ForwardBackwardHeader(loss_function=name, loss_config=config))


def compute(loss: Loss, logprobs: torch.Tensor, given: Arrays) -> LossValue:
    """Computes a loss with defaults for missing inputs, as decoding does."""
    inputs = {
        wanted.name: torch.as_tensor(given[wanted.name], dtype=torch.float32)
        if wanted.name in given
        else torch.full_like(logprobs, wanted.default, requires_grad=False)
        for wanted in loss.inputs
    }
    return loss.compute(logprobs, inputs)


def clipped_and_counted(value: LossValue) -> tuple[float, float]:
    """Returns the numbers of clipped tokens and of all tokens that could be clipped."""
    return value.metrics["clipped_tokens:sum"].item(), value.metrics["policy_tokens:sum"].item()


def through_the_head(logits: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the trainer's log-probabilities and the logits as a leaf: hidden states times a unit matrix."""
    leaf = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    columns = torch.as_tensor(targets).reshape(len(targets), -1)
    found = target_logprobs(leaf, torch.eye(V), None, columns, 3)
    return leaf, found.reshape(targets.shape)


def test_every_loss_has_a_reference() -> None:
    assert set(REFERENCES) == set(LOSSES)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("thresholds", [False, True])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_value_and_gradient(name: str, thresholds: bool, configured: bool, seed: int) -> None:
    logits, targets, given = make_case(name, seed, weights=seed != 1, thresholds=thresholds)
    config = CONFIGS.get(name, {}) if configured else {}
    leaf, logprobs = through_the_head(logits, targets)
    value = compute(make_loss(name, **config), logprobs, given)
    expected = loss_references.value(name, logits, targets, given, config)
    assert value.loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    torch.autograd.backward([value.loss])
    assert leaf.grad is not None
    numerical = loss_references.numerical_gradient(name, logits, targets, given, config)
    np.testing.assert_allclose(leaf.grad.numpy(), numerical, rtol=1e-3, atol=2e-5)
    assert np.abs(numerical).max() > 1e-2
    assert all(metric.count(":") == 1 and tensor.ndim == 0 for metric, tensor in value.metrics.items())


def test_several_targets_a_position() -> None:
    random = np.random.default_rng(4)
    logits, targets = random.normal(size=(N, V)), random.integers(0, V, (N, K))
    given = {"weights": random.normal(size=(N, K))}
    leaf, logprobs = through_the_head(logits, targets)
    value = compute(make_loss("cross_entropy"), logprobs, given)
    assert value.loss.item() == pytest.approx(
        loss_references.value("cross_entropy", logits, targets, given, {}), rel=1e-5
    )
    torch.autograd.backward([value.loss])
    assert leaf.grad is not None
    numerical = loss_references.numerical_gradient("cross_entropy", logits, targets, given, {})
    np.testing.assert_allclose(leaf.grad.numpy(), numerical, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_golden_values(name: str) -> None:
    """Stored numbers, which detect a change of a formula or a default."""
    golden = json.loads(GOLDEN.read_text())[name]
    for case in golden:
        given = {key: np.array(values) for key, values in case["inputs"].items()}
        leaf = torch.tensor(case["logprobs"], requires_grad=True)
        value = compute(make_loss(name, **case["config"]), leaf, given)
        torch.autograd.backward([value.loss])
        assert leaf.grad is not None
        assert value.loss.item() == pytest.approx(case["loss"], rel=1e-5)
        np.testing.assert_allclose(leaf.grad.numpy(), case["gradient"], rtol=1e-4, atol=1e-6)
        assert {key: metric.item() for key, metric in value.metrics.items()} == pytest.approx(case["metrics"], rel=1e-4)


def test_ppo_with_a_negative_advantage_and_a_high_ratio_is_not_clipped() -> None:
    """min(r A, 1.2 A) is r A: the ratio still has a gradient, which lowers it (C81)."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    given = {"logprobs": np.array([-1.0 - math.log(3)]), "advantages": np.array([-2.0])}
    value = compute(make_loss("ppo"), logprobs, given)
    torch.autograd.backward([value.loss])
    assert value.loss.item() == pytest.approx(6.0)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(6.0)
    assert clipped_and_counted(value) == (0, 1)


@pytest.mark.parametrize(("ratio", "advantage", "bound"), [(3.0, 2.0, 1.2), (0.1, -2.0, 0.8)])
def test_ppo_beyond_its_bound_has_no_gradient(ratio: float, advantage: float, bound: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    given = {"logprobs": np.array([-1.0 - math.log(ratio)]), "advantages": np.array([advantage])}
    value = compute(make_loss("ppo"), logprobs, given)
    torch.autograd.backward([value.loss])
    assert value.loss.item() == pytest.approx(-bound * advantage)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0
    assert clipped_and_counted(value) == (1, 1)


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_tokens_are_counted_the_same_however_a_batch_is_split(name: str) -> None:
    """Averaging each datum's share over datums would give tokens of short datums more weight."""
    found = []
    for ratios, weights in (([9.0], [1.0]), ([1.0, 1.0, 1.0, 9.0, 9.0], [0.0, 1.0, 1.0, 1.0, 1.0])):
        given = {
            "logprobs": -1.0 - np.log(ratios),
            "advantages": np.ones(len(ratios)),
            "weights": np.array(weights),
            "sequence_ratio_mask": np.ones(len(ratios)),
            "sampled": np.ones(len(ratios)),
        }
        found.append(clipped_and_counted(compute(make_loss(name), torch.full((len(ratios),), -1.0), given)))
    clipped, counted = (sum(values) for values in zip(*found, strict=True))
    assert (clipped, counted) == ((5, 5) if name == "gspo" else (3, 5))


def test_cispo_keeps_the_gradient_of_a_clipped_position() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    given = {"logprobs": np.array([-9.0]), "advantages": np.array([0.5])}
    value = compute(make_loss("cispo"), logprobs, given)
    torch.autograd.backward([value.loss])
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-4.0 * 0.5)
    assert clipped_and_counted(value) == (1, 1)


@pytest.mark.parametrize(("ratio", "counted"), [(0.49, 0), (0.51, 0.51), (1.5, 1.5), (4.9, 2.0), (5.1, 0)])
def test_stable_reinforce_truncates_weights_and_drops_those_out_of_bounds(ratio: float, counted: float) -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    given = {
        "logprobs": np.array([-1.0 - math.log(ratio), -9.0]),
        "advantages": np.array([2.0, 0.0]),
        "sampled": np.array([1.0, 0.0]),
    }
    value = compute(make_loss("stable_reinforce", kl_coeff=0.0), logprobs, given)
    torch.autograd.backward([value.loss])
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), [-2 * counted, 0], rtol=1e-4)
    assert clipped_and_counted(value) == (counted == 0, 1)


def test_the_penalty_of_stable_reinforce_pulls_towards_the_sampling_policy() -> None:
    """Descending d(loss)/d(lp) = kl r log r lowers a log-probability above the sampler's, and raises one below."""
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    given = {"logprobs": np.array([-1.3, -0.7]), "advantages": np.zeros(2), "sampled": np.ones(2)}
    torch.autograd.backward([compute(make_loss("stable_reinforce", kl_coeff=0.5), logprobs, given).loss])
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), [0.15 * math.exp(0.3), -0.15 * math.exp(-0.3)], rtol=1e-4)


def test_gspo_takes_its_ratio_from_masked_positions_only() -> None:
    """Every position uses its own advantage, masked or not (C82)."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    given = {
        "logprobs": np.array([-50.0, -2.1, -3.05]),
        "advantages": np.array([1.0, -1.0, 0.5]),
        "sequence_ratio_mask": np.array([0.0, 1.0, 1.0]),
    }
    value = compute(make_loss("gspo"), logprobs, given)
    torch.autograd.backward([value.loss])
    ratio = math.exp((0.1 + 0.05) / 2)
    assert value.loss.item() == pytest.approx(-ratio * (1.0 - 1.0 + 0.5), rel=1e-5)
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), [-ratio, ratio, -0.5 * ratio], rtol=1e-5)
    assert value.metrics["sequence_ratio:max"].item() == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_positions_that_count_for_nothing_cannot_overflow(name: str) -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    given = {
        "logprobs": np.array([-1.0, -1e4, -1e4]),
        "advantages": np.array([2.0, 0.0, 3.0]),
        "weights": np.array([1.0, 0.0, 0.0]),
        "sequence_ratio_mask": np.array([1.0, 0.0, 0.0]),
        "sampled": np.array([1.0, 1.0, 0.0]),
    }
    value = compute(make_loss(name), logprobs, given)
    torch.autograd.backward([value.loss])
    assert math.isfinite(value.loss.item())
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[1:].tolist() == [0, 0]
    assert all(math.isfinite(metric.item()) for metric in value.metrics.values())


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_clipped_ratio_that_overflows_has_no_part(name: str) -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    given = {
        "logprobs": np.array([-1e4, -1e4]),
        "advantages": np.array([2.0, 1.0]),
        "sequence_ratio_mask": np.array([1.0, 1.0]),
    }
    value = compute(make_loss(name), logprobs, given)
    torch.autograd.backward([value.loss])
    assert value.loss.item() == pytest.approx(-1.2 * 3)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0, 0]


def test_gspo_needs_a_position_to_take_the_ratio_from() -> None:
    zero, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    bounds = {"clip_low_threshold": ones, "clip_high_threshold": ones}
    loss = make_loss("gspo")
    loss.check({"sequence_ratio_mask": zero, "advantages": zero, "weights": ones, **bounds})
    with pytest.raises(InvalidInput, match="zero everywhere") as caught:
        loss.check({"sequence_ratio_mask": zero, "advantages": ones, "weights": ones, **bounds})
    assert caught.value.field == "sequence_ratio_mask"


@pytest.mark.parametrize("name", CLIPPED)
def test_crossed_thresholds_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"clip_low_threshold is 9\.0, which is above clip_high_threshold"):
        make_loss(name, clip_low_threshold=9.0)
    with pytest.raises(InvalidInput, match="finite"):
        make_loss(name, clip_high_threshold=math.nan)
    low = {"clip_low_threshold": np.array([0.5, 3.0]), "clip_high_threshold": np.array([1.5, 2.5])}
    given = {"advantages": np.ones(2), "weights": np.ones(2), "sequence_ratio_mask": np.ones(2)}
    with pytest.raises(InvalidInput, match=r"is 3 at \[1\], which is above clip_high_threshold 2.5"):
        make_loss(name).check({**low, **given})


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidInput, match=f"known: {', '.join(LOSSES)}, custom"):
        make_loss("unknown")
    with pytest.raises(InvalidInput, match=r"loss_config\.beta is unknown for cross_entropy; known: temperature"):
        make_loss("cross_entropy", beta=1.0)
    with pytest.raises(InvalidInput, match=r"loss_config\.beta .*known: clip_low_threshold, clip_high_threshold"):
        make_loss("ppo", beta=1.0)
    with pytest.raises(InvalidInput, match=r"loss_config\.beta is -1"):
        make_loss("dro", beta=-1.0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("temperature", [0.0, -1.0, 2.5, math.nan])
def test_temperatures_that_no_sampler_takes_are_refused(name: str, temperature: float) -> None:
    with pytest.raises(InvalidInput, match=r"loss_config\.temperature is .*, but must be in 0\.01 \.\. 2"):
        make_loss(name, temperature=temperature)
    assert make_loss(name, temperature=0.7).temperature == 0.7
    assert make_loss(name).temperature == 1


def _golden() -> dict[str, Any]:
    """Returns golden values from the references: losses in float64, gradients by differences. Metrics are our own."""
    written: dict[str, Any] = {}
    for name in sorted(REFERENCES):
        written[name] = []
        for config in ({}, CONFIGS.get(name, {})):
            logits, targets, given = make_case(name, 17)
            logprobs = loss_references.logprobs(logits, targets).astype(np.float32).astype(np.float64)
            given = {key: values.astype(np.float32).astype(np.float64) for key, values in given.items()}
            gradient = []
            for t in range(N):
                sides = []
                for sign in (1, -1):
                    moved = logprobs.copy()
                    moved[t] += sign * 1e-6
                    sides.append(REFERENCES[name](moved, given, config, logprobs))
                gradient.append((sides[0] - sides[1]) / 2e-6)
            value = compute(make_loss(name, **config), torch.tensor(logprobs, dtype=torch.float32), given)
            written[name].append(
                {
                    "config": config,
                    "logprobs": logprobs.tolist(),
                    "inputs": {key: values.tolist() for key, values in given.items()},
                    "loss": REFERENCES[name](logprobs, given, config, logprobs),
                    "gradient": gradient,
                    "metrics": {key: metric.item() for key, metric in value.metrics.items()},
                }
            )
    return written


if __name__ == "__main__":  # python -m tests.unit.trainer.losses.test_losses writes the golden file anew
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(_golden(), indent=1) + "\n")
