"""Compares the scores of sampler and trainer, for the checks of sampling and of images."""

import math
from collections.abc import Sequence

import tinker
from tinker import types

from fovea_conformance.check import expect

PATIENCE_S = 60.0
# Servers may compute in bfloat16, in which engines differ by hundredths of a nat. Wrong weights, positions or
# temperatures differ by tenths or more on average.
MEAN_TOLERANCE = 0.02
MAX_TOLERANCE = 0.25
# The change by training from which on the tuned weights can be distinguished from others.
MOVED = 5 * MEAN_TOLERANCE


def draw(
    sampler: tinker.SamplingClient, prompt: types.ModelInput, count: int = 1, **params: object
) -> types.SampleResponse:
    """Samples 12 tokens without stops, unless `params` (of SamplingParams) change that."""
    given = types.SamplingParams.model_validate({"max_tokens": 12, "stop": []} | params)
    return sampler.sample(prompt, count, given).result(PATIENCE_S)


def greedy(sampler: tinker.SamplingClient, prompt: types.ModelInput, max_tokens: int = 12) -> list[int]:
    """Returns the most likely tokens, without stops."""
    return draw(sampler, prompt, temperature=0.0, max_tokens=max_tokens).sequences[0].tokens


def logprobs_of(sequence: types.SampledSequence) -> list[float]:
    """Returns a sequence's log-probabilities. Raises Failed unless there is one per token."""
    found, count = sequence.logprobs, len(sequence.tokens)
    expect(found is not None and len(found) == count, f"{len(found or [])} log-probabilities for {count} tokens")
    return list(found or [])


def prompt_scores(sampler: tinker.SamplingClient, tokens: Sequence[int] | types.ModelInput) -> list[float]:
    """Returns the result of compute_logprobs for all tokens but the first."""
    prompt = tokens if isinstance(tokens, types.ModelInput) else types.ModelInput.from_ints(list(tokens))
    return scored(sampler.compute_logprobs(prompt).result(PATIENCE_S))


def scored(found: list[float | None] | None) -> list[float]:
    """Returns prompt log-probabilities without the first. Raises Failed unless only the first is None."""
    expect(bool(found), "no prompt log-probabilities")
    first, *rest = found or []
    expect(first is None, f"the first prompt token has the log-probability {first}, expected None")
    kept = [value for value in rest if value is not None]
    expect(len(kept) == len(rest), f"{len(rest) - len(kept)} prompt tokens after the first have no log-probability")
    return kept


def forward_scores(training: tinker.TrainingClient, data: list[types.Datum]) -> list[list[float]]:
    """Returns the trainer's log-probabilities of each datum's targets."""
    return outputs_of(training.forward(data, "cross_entropy").result(PATIENCE_S))


def outputs_of(output: types.ForwardBackwardOutput) -> list[list[float]]:
    """Returns the `logprobs` of each datum."""
    return [[float(value) for value in one["logprobs"].data] for one in output.loss_fn_outputs]


def train(training: tinker.TrainingClient, data: list[types.Datum], steps: int = 2, rate: float = 1e-2) -> None:
    """Takes training steps with cross_entropy, and waits for them."""
    pending = []
    for _ in range(steps):
        pending.append(training.forward_backward(data, "cross_entropy"))
        taken = training.optim_step(types.AdamParams(learning_rate=rate))
    for one in pending:
        one.result(PATIENCE_S)
    taken.result(PATIENCE_S)


def apart(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the mean distance of two scores of the same tokens. Raises Failed if their lengths differ."""
    expect(len(first) == len(second), f"{len(first)} scores against {len(second)} of the same tokens")
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / max(len(first), 1)


def expect_agree(seen: Sequence[float], wanted: Sequence[float], what: str) -> float:
    """Raises Failed unless two scores of the same tokens agree; returns their largest distance."""
    mean = apart(seen, wanted)
    largest, position = max(
        ((abs(a - b), position) for position, (a, b) in enumerate(zip(seen, wanted, strict=True))), default=(0.0, 0)
    )
    # In this form the comparison fails for NaN.
    expect(
        mean <= MEAN_TOLERANCE and largest <= MAX_TOLERANCE,
        f"{what}: {mean:.4f} apart on average and {largest:.4f} at number {position} of {len(seen)},"
        f" with {seen[position]:.4f} instead of {wanted[position]:.4f}",
    )
    return largest


def expect_moved(first: Sequence[float], second: Sequence[float], what: str) -> float:
    """Raises Failed unless two scores of the same tokens clearly differ; returns their mean distance."""
    distance = apart(first, second)
    expect(distance >= MOVED, f"{what}: only {distance:.4f} apart on average")
    return distance


def log_sum(values: Sequence[float]) -> float:
    """Returns log(sum(exp(values)))."""
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values))
