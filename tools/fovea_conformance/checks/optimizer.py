"""Section E: the effect of a step on the weights, and which weights there are."""

from collections.abc import Sequence

import numpy as np
import tinker
import torch
from numpy.typing import NDArray
from tinker import types

from fovea_conformance.adapters import READ_OUT, Matrices, export_matrices, flat, gradient_behind
from fovea_conformance.check import check, expect, expect_close, user_error
from fovea_conformance.gradients import largest_difference, logprobs_of, surrogate, warmed_up
from fovea_conformance.target import Target

_ADAM = types.AdamParams(learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=2.0)
_STEPS = 3
_SAME = 1e-5


def gradient(training: tinker.TrainingClient, data: Sequence[types.Datum], factors: Sequence[float] = (1.0,)) -> None:
    """Adds cross_entropy gradients of the datums, with all weights equal to each factor in turn."""
    for factor in factors:
        weighted = surrogate(data, [np.full(one.model_input.length, factor) for one in data])
        training.forward_backward(weighted, "cross_entropy")


@check("C93", "optim_step matches torch AdamW for lr, betas, eps, decay over 3 steps", timeout_s=300)
def c93_adamw(target: Target) -> str:
    """Compares the exported adapter after each of 3 steps with torch.optim.AdamW in float64.

    The gradient of step t comes from a twin (same seed, same earlier steps), by a step of Adam without memory, which
    can be inverted.
    """
    service = target.service()
    data = [target.datum(12, seed) for seed in range(2)]
    gradients, states = [], []
    settings = _ADAM
    for steps in range(_STEPS + 1):
        twin = target.training(service)
        for _ in range(steps):
            gradient(twin, data)
            twin.optim_step(settings)
        states.append(flat(export_matrices(target.rest(), twin)))
        if steps < _STEPS:
            gradient(twin, data)
            twin.optim_step(READ_OUT)
            gradients.append(gradient_behind(states[-1], flat(export_matrices(target.rest(), twin))))
        if steps == 0:
            # Of the gradient's own size, so that eps counts, and noise around zero does not.
            settings = _ADAM.model_copy(update={"eps": float(np.sqrt(np.mean(gradients[0] ** 2)))})
    worst = 0.0
    wanted = _torch_adamw(states[0], gradients, settings)
    for step, (before, after, reference) in enumerate(zip(states, states[1:], wanted, strict=False), 1):
        off = float(np.linalg.norm(after - reference) / np.linalg.norm(reference - before))
        expect(off <= 0.01, f"step {step} is off torch's AdamW by {off:.2%} of its length ({settings})")
        worst = max(worst, off)
    return f"{states[0].size} weights, 3 steps with eps {settings.eps:.2g}: off by at most {worst:.1e} of a step"


def _torch_adamw(
    start: NDArray[np.float64], gradients: Sequence[NDArray[np.float64]], adam: types.AdamParams
) -> list[NDArray[np.float64]]:
    """Returns the weights after each step. Each step starts from the reference's own weights before it."""
    weights = torch.nn.Parameter(torch.tensor(start))
    optimizer = torch.optim.AdamW([weights], adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay)
    seen = []
    for one in gradients:
        weights.grad = torch.tensor(one)
        optimizer.step()
        seen.append(weights.detach().numpy().copy())
    return seen


@check("C94", "grad_clip_norm 0 leaves the gradient alone; 1.0 caps the global norm of the accumulated gradient")
def c94_clipping(target: Target) -> str:
    """Reads the global norm of the gradient of one step from the exported adapters of four twins."""
    service = target.service()
    data = [target.datum(12, seed) for seed in range(2)]
    start = flat(export_matrices(target.rest(), warmed_up(target.training(service), data)))

    def stepped(clip: float, *factors: float) -> NDArray[np.float64]:
        twin = warmed_up(target.training(service), data)
        gradient(twin, data, factors)
        twin.optim_step(READ_OUT.model_copy(update={"grad_clip_norm": clip}))
        return gradient_behind(start, flat(export_matrices(target.rest(), twin)))

    plain = stepped(0.0, 1.0)
    norm = float(np.linalg.norm(plain))
    expect(norm > 0, "the gradient is zero")
    unit = 1.0 / norm  # weights that make a gradient of norm 1
    for clip, factors, scale in (
        (0.0, (20.0, -15.0), 5.0),
        (1.0, (5.0 * unit,), unit),
        (1.0, (10.0 * unit, -9.5 * unit), 0.5 * unit),
    ):
        seen = stepped(clip, *factors)
        off = float(np.linalg.norm(seen - scale * plain)) / (scale * norm)
        what = f"grad_clip_norm {clip:g}, weights {'and '.join(f'{one:.3g} ' for one in factors)}"
        expect(off <= 0.02, f"{what}: norm {np.linalg.norm(seen):.4g}, expected {scale * norm:.4g} (off by {off:.1%})")
    return f"norm {norm:.3g}; unclipped 5 times that; clipped to 1; 10 - 9.5 accumulated stays 0.5"


@check("C95", "Adam parameters sent to a dimuon model (or the reverse) fail as user error")
def c95_family(target: Target) -> str:
    """Sends dimuon parameters to an AdamW model, and Adam parameters to a dimuon model if the server creates one."""
    training = target.training()
    data = [target.datum(12)]
    with user_error("dimuon"):
        training.optim_step(types.DimuonParams(learning_rate=1e-3)).result(60)
    before = logprobs_of(training.forward(data, "cross_entropy").result(120))
    expect(bool(np.isfinite(before[0]).all()), "the model does not go on after the refusal")
    try:
        other = target.training(optimizer=types.DimuonOptimizerConfig())
    except tinker.RequestFailedError as error:
        user = error.category == tinker.types.RequestErrorCategory.User
        expect(user and "dimuon" in str(error).lower(), f"a dimuon model is refused without naming it: {error}")
        return "dimuon parameters are refused on an AdamW model; dimuon models are refused with an error about them"
    gradient(other, data)
    with user_error("dimuon"):
        other.optim_step(types.AdamParams()).result(60)
    return "both mismatches are refused"


@check("C96", "LoRA seed gives reproducible init; train_* flags restrict the adapted layers; fresh equals the base")
def c96_lora(target: Target) -> str:
    """Compares seeds by logprobs after one step.

    Compares a new adapter by the base model's sampler, and layers by exported names.
    """
    service = target.service()
    data = [target.datum(12)]
    same, again, other = (target.training(service, seed=seed) for seed in (11, 11, 12))
    fresh = [logprobs_of(one.forward(data, "cross_entropy").result(120)) for one in (same, other)]
    expect(largest_difference(*fresh) <= _SAME, "fresh adapters of two seeds give different logprobs")
    tokens = target.tokens(13)
    scored = target.sampler(service).compute_logprobs(target.prompt(tokens)).result(120)
    base = float(np.mean(np.abs(np.asarray(scored[1:], np.float64) - fresh[0][0])))
    expect(base <= 0.05, f"a fresh adapter is off the base model's sampler by {base:.3g} on average")
    trained = [
        logprobs_of(warmed_up(one, data, 1e-3).forward(data, "cross_entropy").result(120))
        for one in (same, again, other)
    ]
    repeat, differ = largest_difference(trained[0], trained[1]), largest_difference(trained[0], trained[2])
    expect(repeat <= _SAME, f"one seed twice: logprobs after a step differ by {repeat:.3g}")
    expect(differ > 10 * max(repeat, 1e-7), f"two seeds give the same logprobs after a step, within {differ:.3g}")
    return f"seed repeats within {repeat:.1e}, another differs by {differ:.1e}, base within {base:.1e}; " + _parts(
        target, service
    )


def _parts(target: Target, service: tinker.ServiceClient) -> str:
    names = ("train_attn", "train_mlp", "train_unembed")

    def adapted(*on: str) -> Matrices:
        flags = {name: name in on for name in names}
        return export_matrices(target.rest(), target.training(service, rank=4, **flags))

    parts = {name: set(adapted(name)) for name in names}
    for name, matrices in parts.items():
        expect(bool(matrices), f"{name} alone adapts nothing")
        others = set().union(*(parts[one] for one in names if one != name))
        expect(not matrices & others, f"{name} adapts what others adapt too: {sorted(matrices & others)[:3]}")
    whole = set(adapted(*names))
    expect(whole == set().union(*parts.values()), "all three flags adapt other layers than each of them alone")
    expect_close(len(whole), sum(map(len, parts.values())), 0, "the number of adapted matrices")
    return "matrices " + ", ".join(f"{name.removeprefix('train_')} {len(one)}" for name, one in parts.items())
