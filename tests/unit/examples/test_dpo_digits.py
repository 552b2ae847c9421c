"""The preference loss against its formula, and the datums of a pair."""

import numpy as np
import tinker
import torch

from examples.dpo_digits import dpo_loss


def datum(*weights: float) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1] * len(weights)),
        loss_fn_inputs={"weights": tinker.TensorData(data=list(weights), dtype="float32")},
    )


def test_the_loss_is_that_of_the_paper_and_counts_answers_alone() -> None:
    data = [datum(0.0, 1.0, 1.0), datum(0.0, 1.0), datum(1.0), datum(1.0)]
    logprobs = [torch.tensor(each) for each in ([-9.0, -1.0, -2.0], [-7.0, -4.0], [-1.0], [-0.5])]
    leaves = [each.clone().requires_grad_() for each in logprobs]
    reference = np.array([0.25, -0.5])
    loss, metrics = dpo_loss(reference, 0.1)(data, leaves)
    gained = np.array([(-3.0 + 4.0) - 0.25, (-1.0 + 0.5) + 0.5])
    np.testing.assert_allclose(loss.item(), np.log1p(np.exp(-0.1 * gained)).sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics["gained:sum"], gained.sum(), rtol=1e-6)
    loss.backward()
    pull = 0.1 / (1 + np.exp(0.1 * gained))  # beta * sigmoid(-beta * gained)
    expected = [[0.0, -pull[0], -pull[0]], [0.0, pull[0]], [-pull[1]], [pull[1]]]
    for leaf, wanted in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(leaf.grad.numpy(), wanted, rtol=1e-6)
