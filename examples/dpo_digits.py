"""Direct preference optimisation with pictures: a model learns which of two answers to a scan is right.

The loss is equation 7 of Rafailov et al. 2023 (arXiv:2305.18290), computed by the client (`forward_backward_custom`). A
pair is a scan, its question and two answers. The data says which answer is preferred, but not the digit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tinker
import torch
from torch.nn.functional import logsigmoid

from examples.experiment import read_arguments
from fovea_data.connection import Connection, Server
from fovea_data.conversation import Conversation
from fovea_data.encoder import Encoder
from fovea_demo.digits import QUESTION, Scan, load_scans
from fovea_rollout import Message, Picture
from fovea_rollout.stopping import exiting_with_a_line

Floats = npt.NDArray[np.float64]
Loss = Callable[[Sequence[tinker.Datum], Sequence[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]
BETA = 0.1
_FORWARD_PAIRS = 64


@dataclass(frozen=True)
class Pair:
    """Two answers to the same question, as datums with weight 1 on the answer."""

    preferred: tinker.Datum
    other: tinker.Datum


def pairs_of(scans: Sequence[Scan], encoder: Encoder, rng: np.random.Generator) -> list[Pair]:
    """Returns one pair per scan: its digit, and a random other digit."""
    found = []
    for scan in scans:
        wrong = (scan.digit + int(rng.integers(1, 10))) % 10
        found.append(Pair(*(_datum(scan, str(digit), encoder) for digit in (scan.digit, wrong))))
    return found


def _datum(scan: Scan, answer: str, encoder: Encoder) -> tinker.Datum:
    question = Message("user", (Picture.of_bytes(scan.png), QUESTION))
    (datum,) = encoder.datums(Conversation((question, Message("assistant", (answer,))), (False, True), "scan"))
    return datum


def margins(training: tinker.TrainingClient, pairs: Sequence[Pair]) -> Floats:
    """Returns log p(preferred) - log p(other) with the current weights, in nats, float64 [N]."""
    found: list[float] = []
    for begin in range(0, len(pairs), _FORWARD_PAIRS):
        data = _data(pairs[begin : begin + _FORWARD_PAIRS])
        outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
        logprobs = [torch.as_tensor(output["logprobs"].to_numpy()) for output in outputs]
        found += _margins(data, logprobs).tolist()
    return np.array(found)


def dpo_loss(reference: Floats, beta: float) -> Loss:
    """Returns the loss: the sum over pairs of -log sigmoid(beta * (margin - margin of the reference)).

    Args:
        reference: Margins of the model at the beginning of training, float64 [N].
        beta: Strength of the attraction to that model.
    """

    def loss(data: Sequence[tinker.Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        gained = _margins(data, logprobs) - torch.as_tensor(reference)
        return -logsigmoid(beta * gained).sum(), {"gained:sum": float(gained.detach().sum())}

    return loss


def _data(pairs: Sequence[Pair]) -> list[tinker.Datum]:
    return [datum for pair in pairs for datum in (pair.preferred, pair.other)]


def _margins(data: Sequence[tinker.Datum], logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
    answers = [
        (torch.as_tensor(datum.loss_fn_inputs["weights"].to_numpy()) * each).sum()
        for datum, each in zip(data, logprobs, strict=True)
    ]
    preferred, other = torch.stack(answers[::2]), torch.stack(answers[1::2])
    return preferred - other


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the example; returns its results."""
    with exiting_with_a_line():
        server = Server(arguments.base_url, arguments.api_key)
    connection = Connection.open(
        server, server.model(arguments.model), "", rank=32, seed=arguments.seed, train_unembed=True
    )
    training, rng = connection.training, np.random.default_rng(arguments.seed)
    train, held_out = load_scans()
    pairs = pairs_of(train, connection.encoder, rng)
    measured = pairs_of(held_out[: arguments.held_out], connection.encoder, rng)
    before = float((margins(training, measured) > 0).mean())
    print(f"before: {before:.3f} of {len(measured)} held-out pairs have the right preference", flush=True)
    reference = margins(training, pairs[: arguments.groups * arguments.steps])
    for step in range(arguments.steps):
        # In order, and again from the beginning; the scans are already shuffled.
        rows = np.arange(step * arguments.groups, (step + 1) * arguments.groups) % len(reference)
        backward = training.forward_backward_custom(
            _data([pairs[row] for row in rows]), dpo_loss(reference[rows], BETA)
        )
        rate = connection.learning_rate * (1 - step / arguments.steps)
        training.optim_step(tinker.AdamParams(learning_rate=rate, grad_clip_norm=1.0)).result()
        gained = backward.result().metrics["gained:sum"] / len(rows)
        print(f"step {step}: margins have gained {gained:.3f} nats", flush=True)
    after = float((margins(training, measured) > 0).mean())
    print(f"after: {after:.3f}", flush=True)
    server.service.close("success")
    result = {
        "example": "dpo_digits",
        "seed": arguments.seed,
        "steps": arguments.steps,
        "before": before,
        "after": after,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"dpo_digits-{arguments.seed}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main(read_arguments(__doc__, steps=60, groups=32, warm_up=0))
