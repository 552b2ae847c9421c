"""Section J: samples with record_stability_info, their provenance, and the loss stable_reinforce that reads both.

The formula of the hosted loss is not public, so the checks compare no values.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tinker
from tinker import types

from fovea_conformance.check import check, expect, expect_close, may_refuse, user_error
from fovea_conformance.gradients import logprobs_of, tensor
from fovea_conformance.target import Target

_LOSS: Any = "stable_reinforce"
_COUNT = 12
_Span = types.PromptProvenanceSpan | types.SampledProvenanceSpan


@dataclass(frozen=True)
class Recorder:
    """A session with a model and a client that records its samples."""

    target: Target
    training: tinker.TrainingClient
    sampler: tinker.SamplingClient

    def datum(self, seed: int = 0) -> types.Datum:
        """Samples, and returns a datum with the provenance of every position."""
        prompt = self.target.tokens(8, seed)
        params = types.SamplingParams(max_tokens=_COUNT, stop=[], seed=seed)
        (sequence,) = self.sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result(60).sequences
        return attributed(prompt, sequence.tokens, sequence.sequence_id)

    def loss(self, datum: types.Datum, config: dict[str, float | str] | None = None) -> types.ForwardBackwardOutput:
        """Returns the result of a forward pass. Raises Refused if the server says that it has no such loss."""
        with may_refuse():
            return self.training.forward([datum], _LOSS, config).result(120)


def recorder(target: Target) -> Recorder:
    """Opens a session. Its first sample raises Refused if the server says that it records nothing."""
    training = target.training()
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True).result(60)
    made = Recorder(target, training, sampler)
    with may_refuse():
        made.datum(99)
    return made


def attributed(prompt: list[int], tokens: list[int], sequence_id: str) -> types.Datum:
    """Returns the datum that cookbook 0.6.1 makes of a sample, with advantages of 1."""
    before = len(prompt) - 1
    targets = [0] * before + tokens
    sampled = np.array([0.0] * before + [1.0] * len(tokens))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(prompt + tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(targets, np.int64)),
            "logprobs": tensor(-3.0 * sampled),
            "advantages": tensor(sampled),
        },
    )
    return datum.with_provenance(
        [
            types.PromptProvenanceSpan(sequence_id=sequence_id, length=before + 1),
            types.SampledProvenanceSpan(sequence_id=sequence_id, length=len(tokens) - 1),
        ],
        [
            types.PromptProvenanceSpan(sequence_id=sequence_id, offset=1, length=before),
            types.SampledProvenanceSpan(sequence_id=sequence_id, length=len(tokens)),
        ],
    )


def _respan(datum: types.Datum, **changes: Any) -> types.Datum:
    """Returns the datum with other spans of sampled tokens."""
    lists: list[list[_Span]] = []
    for spans in (datum.model_input_spans, datum.loss_fn_input_spans):
        assert spans is not None
        lists.append([spans[0], replace(spans[1], **changes)])
    return replace(datum, model_input_spans=lists[0], loss_fn_input_spans=lists[1])


@check("C124", "Provenance: spans that do not tile, or name other tokens than were sampled, fail as user error")
def c124_provenance(target: Target) -> str:
    """Changes one thing at a time in a datum that is accepted: the length, the offset, and a token of the datum."""
    made = recorder(target)
    datum = made.datum()
    made.loss(datum)
    tokens = [int(token) for token in datum.model_input.to_ints()]
    tokens[-1] = tokens[-1] ^ 1
    changed = replace(datum, model_input=types.ModelInput.from_ints(tokens))
    wrong = {
        "too short": _respan(datum, length=_COUNT - 3),
        "beyond the end": _respan(datum, offset=3),
        "another token": changed,
    }
    for name, each in wrong.items():
        try:
            with user_error("span"):
                made.training.forward([each], _LOSS).result(120)
        except AssertionError as error:
            expect(False, f"{name}: {error}")
    made.loss(datum)
    return f"accepts {len(tokens)} positions of a prompt and its sample; refuses {', '.join(wrong)}"


@check("C125", "record_stability_info: stable_reinforce reads what the sampler recorded, not the client's logprobs")
def c125_recorded(target: Target) -> str:
    """Sends the same datum with two claims about `logprobs`: the losses must be equal, and there must be a gradient.

    A sequence that was sampled without record_stability_info must be refused.
    """
    made = recorder(target)
    datum = made.datum()
    losses = []
    for claim in (-0.1, -9.0):
        given = {**datum.loss_fn_inputs, "logprobs": tensor(np.full(datum.model_input.length, claim))}
        output = made.loss(replace(datum, loss_fn_inputs=given))
        expect(bool(np.isfinite(logprobs_of(output)[0]).all()), "a log-probability is not finite")
        losses.append(output.metrics["loss:sum"])
    expect_close(losses[1], losses[0], 1e-5, "loss:sum with another claim of the client")
    made.training.forward_backward([datum], _LOSS).result(120)
    before = logprobs_of(made.loss(datum))[0]
    made.training.optim_step(types.AdamParams(learning_rate=1e-3)).result(120)
    moved = float(np.abs(logprobs_of(made.loss(datum))[0] - before).max())
    expect(moved > 1e-4, f"a step with advantages of 1 moved the log-probabilities only by {moved:.3g}")
    plain = made.training.save_weights_and_get_sampling_client().result(60)
    unrecorded = replace(made, sampler=plain).datum(3)
    with user_error("sequence"):
        made.training.forward([unrecorded], _LOSS).result(120)
    return f"loss:sum {losses[0]:.4f} whatever the client claims; a step moves by {moved:.2g}"


@check("C126", "Expiry: each use keeps a recorded sequence, for a second model of its session too")
def c126_lasts(target: Target) -> str:
    """Uses one sequence three times, with two models. The day after the last use is too long for a check."""
    made = recorder(target)
    datum = made.datum()
    losses = [made.loss(datum).metrics["loss:sum"] for _ in range(2)]
    expect_close(losses[1], losses[0], 1e-5, "loss:sum at the second use")
    service = target.service()
    first, second = target.training(service), target.training(service)
    sampler = first.save_weights_and_get_sampling_client(record_stability_info=True).result(60)
    shared = Recorder(target, second, sampler).datum(1)
    for training in (first, second, first):
        replace(made, training=training).loss(shared)
    return "used twice by one model and thrice by two"


@check("C127", "Foreign sequences: another session's, unknown ones and missing provenance fail as user error")
def c127_foreign(target: Target) -> str:
    """Also expects that the next good call works."""
    made = recorder(target)
    mine, theirs = made.datum(), recorder(target).datum()
    bare = replace(mine, model_input_spans=None, loss_fn_input_spans=None)
    for word, each in (
        ("sequence", theirs),
        ("sequence", _respan(mine, sequence_id="no-such-sequence")),
        ("provenance", bare),
    ):
        with user_error(word):
            made.training.forward([each], _LOSS).result(120)
    made.loss(mine)
    return "refuses another session's sequence, an unknown one, and a datum without provenance"


@check("C128", "loss_fn_config_v2: kl_coeff counts off the sampling policy; text and unknown keys fail as user error")
def c128_config(target: Target) -> str:
    """Moves the model away from the sampling policy; then a penalty must change the loss."""
    made = recorder(target)
    datum = made.datum()
    with may_refuse():
        made.training.forward_backward([datum], _LOSS, {"kl_coeff": 0.1}).result(120)
    made.training.optim_step(types.AdamParams(learning_rate=1e-3)).result(120)
    losses = [made.loss(datum, {"kl_coeff": value}).metrics["loss:sum"] for value in (0.0, 1.0)]
    expect(abs(losses[1] - losses[0]) > 1e-5, f"loss:sum is {losses[0]:.6g} with kl_coeff 0 and with kl_coeff 1")
    for config in ({"kl_coeff": "high"}, {"no_such_setting": 1.0}):
        with user_error(next(iter(config))):
            made.training.forward([datum], _LOSS, config).result(120)  # type: ignore[arg-type]
    return f"loss:sum {losses[0]:.4f} with kl_coeff 0, {losses[1]:.4f} with 1"
