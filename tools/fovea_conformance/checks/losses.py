"""Section E: the value and the gradient of each loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types
from tinker.proto.response_conv import deserialize_forward_backward_output

from fovea_conformance import raw_training
from fovea_conformance.check import check, expect, expect_close, may_refuse, user_error
from fovea_conformance.formulas import Config, Inputs, loss_and_gradient
from fovea_conformance.gradients import Arrays, Meter, logprobs_of, meter, surrogate, tensor
from fovea_conformance.target import Target, loss_message

LOSS_TOLERANCE = 1e-3
_CLIPS = ("clip_low_threshold", "clip_high_threshold")
_CUSTOM: dict[str, Config] = {
    "importance_sampling": {},
    "ppo": dict(zip(_CLIPS, (0.7, 1.1), strict=True)),
    "cispo": dict(zip(_CLIPS, (0.9, 1.3), strict=True)),
    "dro": {"beta": 0.3},
    "gspo": dict(zip(_CLIPS, (0.9, 1.05), strict=True)),
}
# Where the contract leaves the default open, any of these is one.
_DEFAULTS: dict[str, list[Config]] = {
    "importance_sampling": [{}],
    "ppo": [dict(zip(_CLIPS, (0.8, 1.2), strict=True))],
    "cispo": [dict(zip(_CLIPS, pair, strict=True)) for pair in ((0.0, 4.0), (0.8, 1.2))],
    "dro": [{"beta": beta} for beta in (0.05, 0.0, 0.01, 0.1, 0.5, 1.0)],
    "gspo": [dict(zip(_CLIPS, pair, strict=True)) for pair in ((0.8, 1.2), (0.0, np.inf), (1 - 3e-4, 1 + 4e-4))],
}


@dataclass(frozen=True)
class Batch:
    """Datums for policy-gradient losses, and their inputs as arrays."""

    data: list[types.Datum]
    inputs: list[Inputs]

    def without(self, name: str) -> "Batch":
        """Returns the batch without one loss input."""
        inputs = [{key: value for key, value in given.items() if key != name} for given in self.inputs]
        return batch_of(self.data, inputs)


def batch_of(data: list[types.Datum], inputs: Sequence[Inputs]) -> Batch:
    """Returns a batch with these loss inputs besides the targets."""
    made = [
        types.Datum(
            model_input=datum.model_input,
            loss_fn_inputs={"target_tokens": datum.loss_fn_inputs["target_tokens"]}
            | {key: tensor(value) for key, value in given.items()},
        )
        for datum, given in zip(data, inputs, strict=True)
    ]
    return Batch(made, list(inputs))


def policy_batch(target: Target, logprobs: Arrays, shift: float | None = None, advantage: float | None = None) -> Batch:
    """Returns a batch of 12 tokens per datum.

    q is the log-probability minus `shift`, by default between -0.7 and 0.7, for different ratios.
    """
    random = np.random.default_rng(5)
    inputs: list[Inputs] = []
    for current in logprobs:
        shifts = random.uniform(-0.7, 0.7, current.shape) if shift is None else np.full(current.shape, shift)
        advantages = random.normal(size=current.shape)
        if advantage is not None:
            advantages = np.full(current.shape, advantage)
        mask = (np.arange(current.size) % 3 != 0).astype(np.float64)
        # As the server gets them: rounded to float32.
        given = {"logprobs": current - shifts, "advantages": advantages, "sequence_ratio_mask": mask}
        inputs.append({key: value.astype(np.float32).astype(np.float64) for key, value in given.items()})
    return batch_of([target.datum(12, seed) for seed in range(len(logprobs))], inputs)


def metered(target: Target) -> Meter:
    """Returns a meter of two datums with 12 tokens."""
    return meter(target.training(), [target.datum(12, seed) for seed in range(2)])


def for_loss(batch: Batch, loss: str) -> Batch:
    """Returns the batch for a loss. Only gspo has a mask."""
    return batch if loss == "gspo" else batch.without("sequence_ratio_mask")


def prove(gauge: Meter, loss: str, batch: Batch, config: Config, given: Mapping[str, float] | None) -> str:
    """Checks that loss:sum equals the formula.

    The gradient must cancel against cross_entropy with weights +dL/dlogprob.
    """
    batch = for_loss(batch, loss)

    def send() -> types.ForwardBackwardOutput:
        return gauge.training.forward_backward(batch.data, loss, given).result(120)  # type: ignore[arg-type]

    def cancel() -> None:
        output = send()
        wanted, gradient = loss_and_gradient(loss, logprobs_of(output), batch.inputs, config)
        expect_close(output.metrics["loss:sum"], wanted, LOSS_TOLERANCE, f"{loss} {dict(config)} loss:sum")
        gauge.training.forward_backward(surrogate(batch.data, gradient), "cross_entropy").result(120)

    return gauge.expect_nothing_left(cancel, send, f"{loss} {dict(config)} against its own formula's gradient")


def default_config(gauge: Meter, loss: str, batch: Batch) -> Config:
    """Returns the documented default that fits the loss of a forward pass without configuration."""
    batch = for_loss(batch, loss)
    output = gauge.training.forward(batch.data, loss).result(120)  # type: ignore[arg-type]
    logprobs, seen = logprobs_of(output), output.metrics["loss:sum"]
    wanted = [loss_and_gradient(loss, logprobs, batch.inputs, config)[0] for config in _DEFAULTS[loss]]
    for value, config in zip(wanted, _DEFAULTS[loss], strict=True):
        if abs(seen - value) <= LOSS_TOLERANCE * max(1.0, abs(value)):
            return config
    expect(False, f"{loss} without a config: loss:sum {seen:.6g}, expected one of {[f'{v:.6g}' for v in wanted]}")
    return {}


@check("C79", "cross_entropy loss:sum equals -sum w lp; doubling weights doubles it")
def c79_cross_entropy(target: Target) -> str:
    """Uses mixed weights, and recomputes the sum in float64 from the returned log-probabilities.

    Then repeats the same weights twice.
    """
    training = target.training()
    random = np.random.default_rng(1)
    weights = [random.uniform(0, 2, 12).astype(np.float32).astype(np.float64) for _ in range(3)]
    data = [target.datum(12, seed) for seed in range(3)]
    seen = []
    for factor in (1.0, 2.0):
        scaled = [weight * factor for weight in weights]
        output = training.forward_backward(surrogate(data, scaled), "cross_entropy").result(120)
        wanted, _ = loss_and_gradient("cross_entropy", logprobs_of(output), [{"weights": w} for w in scaled], {})
        expect_close(output.metrics["loss:sum"], wanted, 1e-4, f"loss:sum with weights times {factor:g}")
        seen.append(output.metrics["loss:sum"])
    expect_close(seen[1], 2 * seen[0], 1e-4, "loss:sum with doubled weights")
    return f"loss:sum {seen[0]:.4f}, doubled {seen[1]:.4f}"


@check(
    "C80", "Every RL loss: loss:sum and gradients match a torch reference, defaults and custom config", timeout_s=300
)
def c80_formulas(target: Target) -> str:
    """Recomputes loss:sum in float64 from the returned logprobs and the formula.

    The gradient must cancel against that of cross_entropy with weights +dL/dlogprob from autograd, within 2 percent.
    """
    gauge = metered(target)
    seen = []
    for loss, custom in _CUSTOM.items():
        batch = policy_batch(target, gauge.look())
        with may_refuse():
            default = default_config(gauge, loss, batch)
        for config, given in ((default, None), (custom, custom)):
            if given is None or given:
                prove(gauge, loss, batch, config, given)
        words = ", ".join(f"{key} {value:g}" for key, value in default.items())
        seen.append(f"{loss} ({words})" if words else loss)
    return "match with defaults: " + "; ".join(seen)


@check("C81", "ppo with negative advantage and ratio above hi uses the min branch; cispo's gradient survives clipping")
def c81_clipping(target: Target) -> str:
    """Uses ratios of 7.4 and a bound of 1.2.

    ppo must not clip A = -1 (the loss is sum r), and must clip A = +1 (no gradient). The gradient of cispo with A = +1
    must be that of cross_entropy with weights 1.2.
    """
    gauge = metered(target)
    clips = dict(zip(_CLIPS, (0.8, 1.2), strict=True))
    with may_refuse():
        prove(gauge, "ppo", policy_batch(target, gauge.look(), 2.0, -1.0), clips, clips)
        clipped = for_loss(policy_batch(target, gauge.look(), 2.0, 1.0), "ppo")
        move = gauge.moved(lambda: gauge.training.forward_backward(clipped.data, "ppo", clips).result(120))
        expect(move <= 1e-4, f"ppo with A = 1 and a ratio above its bound still moves logprobs by {move:.3g}")
        left = prove(gauge, "cispo", policy_batch(target, gauge.look(), 2.0, 1.0), clips, clips)
    return f"ppo: A < 0 unclipped, A > 0 clipped to no move ({move:.1e}); cispo: {left}"


@check("C82", "gspo uses only masked positions for the ratio; per-token advantages still act")
def c82_sequence_ratio(target: Target) -> str:
    """Changes q outside the mask, which must have no effect.

    Changes q inside the mask, and advantages outside it, which must have one. The gradient must match.
    """
    gauge = metered(target)
    batch = policy_batch(target, gauge.look(), 0.05)
    wide = dict(zip(_CLIPS, (0.1, 10.0), strict=True))

    def loss_with(change: Callable[[dict[str, Any], Any], None]) -> float:
        inputs: list[Inputs] = []
        for given in batch.inputs:
            copied = {key: value.copy() for key, value in given.items()}
            change(copied, given["sequence_ratio_mask"] != 0)
            inputs.append(copied)
        data = batch_of(batch.data, inputs).data
        return float(gauge.training.forward(data, "gspo", wide).result(120).metrics["loss:sum"])

    def add(name: str, inside: bool) -> Callable[[dict[str, Any], Any], None]:
        return lambda copied, mask: copied[name].__setitem__(mask == inside, copied[name][mask == inside] + 0.5)

    with may_refuse():
        plain = loss_with(lambda copied, mask: None)
    expect_close(loss_with(add("logprobs", False)), plain, 1e-5, "loss:sum after q changed outside the mask")
    inside = abs(loss_with(add("logprobs", True)) - plain)
    expect(inside > 1e-3, f"q inside the mask does not act: loss:sum changes by {inside:.3g}")
    advantages = abs(loss_with(add("advantages", False)) - plain)
    expect(advantages > 1e-3, f"advantages outside the mask do not act: loss:sum changes by {advantages:.3g}")
    left = prove(gauge, "gspo", batch, wide, wide)
    return f"q outside the mask: no change; inside: {inside:.3f}; advantages outside: {advantages:.3f}; {left}"


@check("C83", "v2 config wins over the legacy map; text values arrive; unknown keys fail as user error")
def c83_config(target: Target) -> str:
    """Sends raw protobuf with different numbers in the two config maps, both ways.

    The error about a text as loss_id must contain it.
    """
    model_id = target.raw_model(target.session())
    plain = [target.datum(12, seed) for seed in range(2)]
    forward = raw_training.run(target, loss_message(model_id, 1, plain))
    batch = for_loss(policy_batch(target, logprobs_of(_output(forward))), "ppo")
    narrow, wide = dict(zip(_CLIPS, (0.95, 1.05), strict=True)), dict(zip(_CLIPS, (0.1, 10.0), strict=True))
    seen = []
    for seq_id, (v2, legacy) in enumerate([(narrow, wide), (wide, narrow)], 2):
        message = loss_message(model_id, seq_id, batch.data, "ppo", v2)
        message.loss_fn_config.clear()
        message.loss_fn_config.update(legacy)
        output = _output(raw_training.run(target, message))
        wanted, _ = loss_and_gradient("ppo", logprobs_of(output), batch.inputs, v2)
        expect_close(output.metrics["loss:sum"], wanted, LOSS_TOLERANCE, f"loss:sum with v2 {v2}, legacy {legacy}")
        seen.append(output.metrics["loss:sum"])
    expect(abs(seen[0] - seen[1]) > 1e-3, "both configs give the same loss: the check proves nothing")
    text = {"loss_id": "no-such-loss-7f3a"}
    _expect_user_error(raw_training.run(target, loss_message(model_id, 4, plain, "custom", text)), "7f3a")
    unknown = {"no_such_key": 1.0}
    _expect_user_error(raw_training.run(target, loss_message(model_id, 5, plain, "ppo", unknown)), "no_such_key")
    return f"loss:sum {seen[0]:.4f} and {seen[1]:.4f} follow v2; the unknown loss_id and the unknown key are named"


def _output(result: Any) -> types.ForwardBackwardOutput:
    expect(not isinstance(result, dict), f"forward_backward failed: {result}")
    return deserialize_forward_backward_output(result.SerializeToString())


def _expect_user_error(result: Any, word: str) -> None:
    expect(isinstance(result, dict) and "error" in result, f"was accepted, expected an error that names {word}")
    expect(str(result.get("category", "")).lower() == "user", f"category {result.get('category')}: {result['error']}")
    expect(word in str(result["error"]), f"the error does not name {word}: {result['error']}")


@check("C91", "forward_backward_custom (squared logprob, and DPO over pairs) matches local autograd weight updates")
def c91_custom(target: Target) -> str:
    """Compares loss:sum with the local loss. The update must cancel against cross_entropy with weights +dC/dlogprob."""
    gauge = metered(target)
    data = [target.datum(12, seed) for seed in range(2)]
    reference = [float(one.sum()) for one in gauge.look()]

    def squared(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.stack([(one**2).sum() for one in logprobs]).sum() * 0.1, {}

    def dpo(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        margin = (logprobs[0].sum() - reference[0]) - (logprobs[1].sum() - reference[1])
        return -torch.nn.functional.logsigmoid(0.5 * margin), {"margin": float(margin)}

    seen = []
    for name, loss in (("squared", squared), ("DPO", dpo)):
        seen.append(f"{name}: {_prove_custom(gauge, data, loss, name)}")
    return "; ".join(seen)


def _prove_custom(gauge: Meter, data: list[types.Datum], loss: Any, name: str) -> str:
    def send() -> types.ForwardBackwardOutput:
        return gauge.training.forward_backward_custom(data, loss).result(120)

    def cancel() -> None:
        output = send()
        leaves = [torch.tensor(one, requires_grad=True) for one in logprobs_of(output)]
        value, _ = loss(data, leaves)
        expect_close(output.metrics["loss:sum"], value.item(), LOSS_TOLERANCE, f"{name} loss:sum")
        gradients = torch.autograd.grad(value, leaves)
        opposite = surrogate(data, [gradient.numpy() for gradient in gradients])
        gauge.training.forward_backward(opposite, "cross_entropy").result(120)

    return gauge.expect_nothing_left(cancel, send, f"custom loss {name}")


def clipped_policy(logprobs: Any, old: Any, advantages: Any) -> Any:
    """A custom loss that torch.fx can trace."""
    ratio = torch.exp(logprobs - old)
    bounded = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, bounded * advantages).sum()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/clipped:sum": (ratio != bounded).float().sum()}


@check("C92", "create_custom_loss with the flag on gives the same result as the client-side run")
def c92_server_side(target: Target) -> str:
    """Switches the flag on and off in a proxy for two models with one seed.

    Loss, metrics and the change of weights must be the same.
    """
    proxies = [target.proxy({"custom_loss_server_side": on}) for on in (True, False)]
    services = [target.service(proxy) for proxy in proxies]
    plain = [target.datum(12, seed) for seed in range(2)]
    gauges = [meter(target.training(service), plain) for service in services]
    batch = policy_batch(target, gauges[1].look()).without("sequence_ratio_mask")
    data = batch_of(plain, [{"old": one["logprobs"], "advantages": one["advantages"]} for one in batch.inputs]).data
    ranks: Any = {"logprobs": 1, "old": 1, "advantages": 1}
    handles = [service.create_custom_loss(clipped_policy, ranks).result(60) for service in services]
    expect(handles[0].loss_id is not None, "create_custom_loss gave no loss_id with the flag on")
    expect(any(proxies[0].of("create_custom_loss")), "the loss was not uploaded with the flag on")
    expect(not any(proxies[1].of("create_custom_loss")), "the loss was uploaded with the flag off")
    outputs, moves = [], []
    for gauge, handle in zip(gauges, handles, strict=True):
        before = gauge.look()
        outputs.append(gauge.training.forward_backward_custom(data, handle).result(120))
        gauge.training.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-2)).result(120)
        moves.append([after - b for after, b in zip(gauge.look(), before, strict=True)])
    for key in ("loss:sum", "custom/ratio:mean", "custom/clipped:sum"):
        expect(key in outputs[0].metrics, f"the server's run has no metric {key}: {sorted(outputs[0].metrics)}")
        expect_close(outputs[0].metrics[key], outputs[1].metrics[key], LOSS_TOLERANCE, key)
    size = max(float(np.abs(one).max()) for one in moves[1])
    difference = max(float(np.abs(a - b).max()) for a, b in zip(*moves, strict=True))
    expect(size > 1e-3, f"the step moved logprobs only by {size:.3g}: the check proves nothing")
    expect(difference <= 0.02 * size, f"the moves differ by {difference:.3g} of {size:.3g}")
    return f"loss:sum {outputs[0].metrics['loss:sum']:.4f} on both sides; moves differ by {difference / size:.1e}"


@check("C98", "stable_reinforce without spans, or with a foreign sequence_id, fails as user error (or is unsupported)")
def c98_stable_reinforce(target: Target) -> str:
    """Expects a failed future of category user. Its message must be about the loss, the spans or the sequence."""
    training = target.training()
    logprobs = logprobs_of(training.forward([target.datum(12)], "cross_entropy").result(120))
    (datum,) = policy_batch(target, logprobs).without("sequence_ratio_mask").data
    sampled: types.ProvenanceSpans = [types.SampledProvenanceSpan(sequence_id="no-such-sequence", offset=0, length=12)]
    said = []
    for one in (datum, datum.with_provenance(sampled, sampled)):
        with user_error():
            try:
                training.forward_backward([one], "stable_reinforce").result(120)
            except tinker.RequestFailedError as error:
                said.append(str(error))
                raise
        words = ("stable_reinforce", "span", "provenance", "sequence")
        expect(any(word in said[-1] for word in words), f"the error names none of {words}: {said[-1]}")
    return f"refused: {said[0][:80]}; {said[1][:80]}"
