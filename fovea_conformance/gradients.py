"""Gradients seen from outside: what a step does to log-probabilities, and sums of gradients that must cancel.

Cross-entropy with weights w has dL/dlogprob = -w, so for any loss the call `cross_entropy` with weights +dL/dlogprob
adds exactly the negative of its gradient. Sent after the loss and before the step, it must leave nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types

from fovea_conformance.check import expect

Arrays = list[NDArray[np.float64]]
Output = types.ForwardBackwardOutput
TOLERANCE = 0.02
"""Of the move that the gradient makes alone, what may be left of it after its negative was added."""
_CLEAR = 0.03
_GROWTH, _TRIES = 4.0, 9


def logprobs_of(output: Output) -> Arrays:
    """The `logprobs` of each datum, in its targets' shape."""
    return [np.asarray(one["logprobs"].to_numpy(), np.float64) for one in output.loss_fn_outputs]


def surrogate(data: Sequence[types.Datum], weights: Sequence[NDArray[np.float64]]) -> list[types.Datum]:
    """The same inputs and targets for cross_entropy with these weights."""
    return [
        types.Datum(
            model_input=datum.model_input,
            loss_fn_inputs={"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": tensor(weight)},
        )
        for datum, weight in zip(data, weights, strict=True)
    ]


def tensor(values: NDArray[np.float64]) -> types.TensorData:
    """As float32."""
    return types.TensorData.from_numpy(values.astype(np.float32))


def largest_difference(ours: Arrays, theirs: Arrays) -> float:
    """Over all positions of all data. NaN counts as infinite."""
    worst = max(float(np.max(np.abs(a - b), initial=0.0)) for a, b in zip(ours, theirs, strict=True))
    return worst if np.isfinite(worst) else np.inf


class Meter:
    """A LoRA model whose steps are proportional to its gradient: Adam without memory, and with eps 1 in place of 0.

    Made by `warmed_up`: an adapter that was just created has B = 0 and no gradient in A.

    Args:
        training: The model.
        watched: Data whose log-probabilities show what a step did.
    """

    def __init__(self, training: tinker.TrainingClient, watched: Sequence[types.Datum]) -> None:
        self.training = training
        self._watched = list(watched)
        self._rate = 0.05

    def look(self) -> Arrays:
        """Log-probabilities of the watched data now."""
        return logprobs_of(self.training.forward(self._watched, "cross_entropy").result(120))

    def step(self) -> None:
        """One step: -rate g / (|g| + 1) for each weight with gradient g."""
        proportional = types.AdamParams(learning_rate=self._rate, beta1=0.0, beta2=0.0, eps=1.0)
        self.training.optim_step(proportional).result(120)

    def moved(self, send: Callable[[], object]) -> float:
        """By how much one step on what `send` sends moves the watched log-probabilities."""
        before = self.look()
        send()
        self.step()
        return largest_difference(before, self.look())

    def effect(self, send: Callable[[], object], what: str) -> float:
        """As `moved`, but with a learning rate that makes the move clear; found from below, so that it is never wild.

        Raises Failed if no rate shows any.
        """
        self._rate /= _GROWTH**2
        for _ in range(_TRIES):
            move = self.moved(send)
            if move >= _CLEAR:
                break
            self._rate *= _GROWTH
        expect(_CLEAR <= move < np.inf, f"{what} does not move the weights: a step changes logprobs by {move:.2g}")
        return move

    def expect_nothing_left(self, send: Callable[[], object], alone: Callable[[], object], what: str) -> str:
        """One step on `send`, whose gradients should cancel, must move almost nothing, measured by `alone`."""
        move = self.effect(alone, what)
        rest = self.moved(send)
        expect(rest <= TOLERANCE * move, f"{what}: a step that should change nothing moved {rest:.3g} of {move:.3g}")
        return f"{rest / move:.1e} of the move left"


def warmed_up(
    training: tinker.TrainingClient, data: Sequence[types.Datum], rate: float = 0.01
) -> tinker.TrainingClient:
    """The client after one plain Adam step on the data, so that no matrix of the adapter is zero."""
    training.forward_backward(list(data), "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=rate)).result(120)
    return training


def meter(training: tinker.TrainingClient, data: Sequence[types.Datum]) -> Meter:
    """A warmed-up model under a meter that watches the data."""
    return Meter(warmed_up(training, data), data)
