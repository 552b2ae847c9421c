"""Every loss through the real trainer: two ranks, several micro-batches, packing, accumulation and failures."""

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from peft import PeftModel

from fovea.api.v1 import trainer_pb2, weights_pb2
from fovea.client import ForwardBackwardResult
from fovea.wire import tensors
from fovea.wire.errors import Internal, InvalidInput
from tests.e2e.trainer import reference
from tests.e2e.trainer.conftest import Bench, adam
from tests.e2e.trainer.copied_trainer import CopiedTrainer
from tests.e2e.trainer.examples import chunk_lists, datum, header, logprobs_of
from tests.unit.trainer.losses import loss_references
from tests.unit.trainer.losses.traced import graph, node, ref, square_loss, traced

POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
CONFIGS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "gspo": {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01},
    "dro": {"beta": 0.3},
}
RANKS = {"logprobs": 1, "sampled": 1, "advantages": 1}


async def _policy_datums(bench: Bench, model_id: str) -> list[trainer_pb2.Datum]:
    """Returns datums with the model's log-probabilities plus some noise as the sampler's."""
    rendered = [bench.images.render(chunks) for chunks in chunk_lists("text")]
    plain = [datum(one, seed) for seed, one in enumerate(rendered)]
    scored = await bench.client.forward_backward(header(model_id, len(plain), backward=False), plain)
    datums = []
    for seed, (one, output) in enumerate(zip(rendered, scored.outputs, strict=True)):
        random = np.random.default_rng(100 + seed)
        current = logprobs_of(output)
        count = len(current)
        made = datum(
            one,
            seed,
            logprobs=(current + random.normal(scale=0.3, size=count)).astype(np.float32),
            advantages=random.normal(size=count).astype(np.float32),
            sequence_ratio_mask=(np.arange(count) >= count // 3).astype(np.float32),
        )
        datums.append(made)
    return datums


def _for(name: str, datums: list[trainer_pb2.Datum]) -> list[trainer_pb2.Datum]:
    """Returns the datums with only the inputs that the loss accepts."""
    keys = {"target_tokens", "logprobs", "advantages", *(["sequence_ratio_mask"] if name == "gspo" else ["weights"])}
    return [
        trainer_pb2.Datum(input=one.input, loss_inputs={key: one.loss_inputs[key] for key in keys}) for one in datums
    ]


def _reference(name: str, datums: list[trainer_pb2.Datum], result: ForwardBackwardResult) -> float:
    total = 0.0
    for one, output in zip(datums, result.outputs, strict=True):
        lp = logprobs_of(output).astype(np.float64)
        given = {key: tensors.decode(value).astype(np.float64) for key, value in one.loss_inputs.items()}
        total += loss_references.REFERENCES[name](lp, given, CONFIGS.get(name, {}), lp)
    return total


@pytest.mark.parametrize("name", POLICY_LOSSES)
async def test_packed_equals_unpacked_and_the_reference(qwen3: Bench, name: str) -> None:
    """One call equals one call per datum in losses, log-probabilities and accumulated gradients (C88, C89)."""
    packed, alone = await qwen3.adapter(), await qwen3.adapter()
    datums = _for(name, await _policy_datums(qwen3, packed))
    config = CONFIGS.get(name, {})
    together = await qwen3.client.forward_backward(header(packed, len(datums), name, **config), datums)
    assert together.metrics["loss:sum"] == pytest.approx(_reference(name, datums, together), rel=1e-4)
    one_by_one = [await qwen3.client.forward_backward(header(alone, 1, name, **config), [one]) for one in datums]
    for output, single in zip(together.outputs, one_by_one, strict=True):
        np.testing.assert_allclose(logprobs_of(output), logprobs_of(single.outputs[0]), atol=2e-5)
    for key, value in together.metrics.items():
        parts = [single.metrics[key] for single in one_by_one]
        joined = {"sum": sum(parts), "mean": sum(parts) / len(parts), "max": max(parts)}[key.partition(":")[2]]
        assert value == pytest.approx(joined, rel=1e-4, abs=1e-4), key
    first, second = await qwen3.descend(packed), await qwen3.descend(alone)
    for key, tensor in first.items():
        torch.testing.assert_close(second[key], tensor, rtol=1e-3, atol=2e-4)
    assert max(tensor.abs().max() for tensor in first.values()) > 1e-2


async def test_thresholds_of_positions_override_those_of_the_call(qwen3: Bench) -> None:
    model_id = await qwen3.adapter()
    datums = _for("ppo", await _policy_datums(qwen3, model_id))
    narrow = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
    by_config = await qwen3.client.forward_backward(header(model_id, 5, "ppo", backward=False, **narrow), datums)
    for one in datums[:3]:
        count = len(one.input.tokens) // 4
        for key, bound in narrow.items():
            one.loss_inputs[key].CopyFrom(tensors.encode(np.full(count, bound, np.float32)))
    mixed = await qwen3.client.forward_backward(header(model_id, 5, "ppo", backward=False, **narrow), datums)
    overridden = await qwen3.client.forward_backward(header(model_id, 3, "ppo", backward=False), datums[:3])
    rest = await qwen3.client.forward_backward(header(model_id, 2, "ppo", backward=False, **narrow), datums[3:])
    assert mixed.metrics["loss:sum"] == pytest.approx(by_config.metrics["loss:sum"], rel=1e-5)
    both = overridden.metrics["loss:sum"] + rest.metrics["loss:sum"]
    assert both == pytest.approx(by_config.metrics["loss:sum"], rel=1e-4)


def policy(logprobs: Any, sampled: Any, advantages: Any) -> Any:
    """A loss that is not a sum over positions, so it needs whole datums."""
    ratio = torch.exp((logprobs - sampled).mean())
    loss = -ratio * (advantages * logprobs).sum() + logprobs.std(unbiased=False)
    return loss, {"custom/ratio:mean": ratio, "custom/length:sum": torch.ones_like(logprobs).sum()}


async def test_a_traced_loss_equals_its_function(qwen3: Bench) -> None:
    """The gradient of the custom loss equals that of cross_entropy weighted by minus its derivative (C92)."""
    custom, surrogate = await qwen3.adapter(), await qwen3.adapter()
    datums = await _policy_datums(qwen3, custom)
    for one in datums:
        one.loss_inputs["sampled"].CopyFrom(one.loss_inputs["logprobs"])
    handle, message = traced(policy, RANKS)
    asked = header(custom, len(datums), "custom")
    asked.custom_loss.CopyFrom(message)
    result = await qwen3.client.forward_backward(asked, datums)
    loss, ratios = 0.0, []
    for one, output in zip(datums, result.outputs, strict=True):
        leaf = torch.tensor(logprobs_of(output), requires_grad=True)
        inputs = [torch.tensor(tensors.decode(one.loss_inputs[key])) for key in ("sampled", "advantages")]
        value, metrics = handle.graph(leaf, *inputs)
        value.backward()
        loss += value.item()
        ratios.append(metrics["custom/ratio:mean"].item())
        assert leaf.grad is not None
        one.loss_inputs["weights"].CopyFrom(tensors.encode(-leaf.grad.numpy()))
        for key in set(one.loss_inputs) - {"target_tokens", "weights"}:
            del one.loss_inputs[key]
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert result.metrics["custom/ratio:mean"] == pytest.approx(float(np.mean(ratios)), rel=1e-5)
    assert result.metrics["custom/length:sum"] == sum(len(one.input.tokens) // 4 for one in datums)
    await qwen3.client.forward_backward(header(surrogate, len(datums)), datums)
    first, second = await qwen3.descend(custom), await qwen3.descend(surrogate)
    for key, tensor in first.items():
        torch.testing.assert_close(second[key], tensor, rtol=1e-4, atol=1e-5)
    assert max(tensor.abs().max() for tensor in first.values()) > 1e-2


@pytest.mark.parametrize("place", range(5))
async def test_a_traced_loss_that_fails_on_one_datum(qwen3: Bench, place: int) -> None:
    """For any rank and micro-batch of that datum: one error, the gradients are dropped, and the trainer continues."""
    model_id = await qwen3.adapter()
    datums = await _policy_datums(qwen3, model_id)
    for index, one in enumerate(datums):
        pick = 10**6 if index == place else 0
        one.loss_inputs["pick"].CopyFrom(tensors.encode(np.array([pick])))
    message = graph(
        node("call_function", "picked", "operator.getitem", ref("logprobs"), ref("pick")),
        node("call_method", "total", "sum", ref("picked")),
        ranks={"logprobs": 1, "pick": 1},
    )
    for backward in (False, True):
        asked = header(model_id, len(datums), "custom", backward=backward)
        asked.custom_loss.CopyFrom(message)
        with pytest.raises(InvalidInput, match=rf"datum\[{place}\] custom loss 'by_hand': node 'picked' .* out of"):
            await qwen3.client.forward_backward(asked, datums)
    step = await qwen3.client.optim_step(model_id, adam())
    assert step.metrics.values["grad_norm:mean"] == 0
    datums[place].loss_inputs["pick"].CopyFrom(tensors.encode(np.array([0])))
    good = await qwen3.client.forward_backward(asked, datums)
    assert good.metrics["loss:sum"] == pytest.approx(sum(float(logprobs_of(o)[0]) for o in good.outputs), rel=1e-5)


X = ref("logprobs")
BOMBS: dict[str, tuple[trainer_pb2.CustomLoss, str]] = {
    "pieces": (graph(node("call_function", "p", "torch.tensor_split", X, 10**9)), r"'p' .*into 1000000000 parts"),
    "list": (graph(node("call_function", "m", "operator.mul", [X], 4 * 10**9)), "'m' .*numbers, not list"),
    "objects": (
        graph(
            node("call_method", "z", "new_zeros", X, 65536),
            *(node("call_method", f"u{i}", "unbind", ref("z")) for i in range(508)),
        ),
        r"'u1' \(unbind\) .*more than 134217728 elements",
    ),
    "time": (
        graph(
            node("call_method", "one", "new_ones", X, 1),
            node("call_method", "z", "expand", ref("one"), 2**22),  # a view, so all of the time is spent below
            *(node("call_method", f"m{i}", "lgamma", ref("z")) for i in range(12)),
            node("call_method", "total", "sum", X),
        ),
        r"('m\d+' \(lgamma\)|its gradient) was stopped: the losses of a call may take 5 s in total",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
async def test_a_traced_loss_that_takes_too_much_costs_its_own_call(qwen3: Bench, name: str) -> None:
    """On either rank and in any micro-batch: a neighbour trains meanwhile, and both models survive."""
    message, words = BOMBS[name]
    bomber, neighbour = await qwen3.adapter(), await qwen3.adapter()
    datums = await _policy_datums(qwen3, neighbour)
    asked = header(bomber, 12 * len(datums), "custom")
    asked.custom_loss.CopyFrom(message)

    async def bomb() -> None:
        with pytest.raises(InvalidInput, match=rf"datum\[\d+\] custom loss 'by_hand': (node )?{words}"):
            await qwen3.client.forward_backward(asked, datums * 12)

    async def train() -> list[float]:
        losses = []
        for _ in range(3):
            result = await qwen3.client.forward_backward(header(neighbour, 5), _plain(datums))
            losses.append(result.metrics["loss:sum"])
            await qwen3.client.optim_step(neighbour, adam(learning_rate=1e-2))
        return losses

    _, losses = await asyncio.gather(bomb(), train())
    assert losses[-1] < losses[0]
    assert (await qwen3.client.optim_step(bomber, adam())).metrics.values["grad_norm:mean"] == 0
    asked.custom_loss.CopyFrom(square_loss())
    good = await qwen3.client.forward_backward(asked, datums * 12)
    expected = sum(float((logprobs_of(output).astype(np.float64) ** 2).sum()) for output in good.outputs)
    assert good.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


async def test_no_call_waits_for_the_first_traced_loss(qwen3: Bench) -> None:
    """The trainer's first traced loss imports torch. Other calls do not wait while rank 1 is not ready, or if that
    fails.
    """
    datums = await _policy_datums(qwen3, await qwen3.adapter())
    process = CopiedTrainer(qwen3.model_dir, qwen3.scratch / "first-traced.log")
    try:
        client = await process.ready()
        for model_id in ("traced", "neighbour"):
            await client.create_model(model_id, weights_pb2.LoraConfig(rank=4, train_mlp=True))
        asked = header("traced", len(datums), "custom")
        asked.custom_loss.CopyFrom(square_loss())

        first = asyncio.create_task(client.forward_backward(asked, datums))
        (await _sandbox_of(process, 1)).kill()
        with pytest.raises(Internal, match="evaluates custom losses did not start"):
            await first
        second = asyncio.create_task(client.forward_backward(asked, datums))
        slow = await _sandbox_of(process, 1)
        slow.suspend()
        await client.forward_backward(header("neighbour", 5), _plain(datums))
        await _child_of((await _sandbox_of(process, 0)).pid)  # rank 0 is ready
        await client.forward_backward(header("neighbour", 5), _plain(datums))
        await client.optim_step("neighbour", adam())
        assert not second.done()
        slow.resume()
        good = await second
        expected = sum(float((logprobs_of(output).astype(np.float64) ** 2).sum()) for output in good.outputs)
        assert good.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
        await client.close()
    finally:
        process.stop()


async def _sandbox_of(process: CopiedTrainer, rank: int) -> psutil.Process:
    """Returns the sandbox process of a rank's traced losses, once it has started."""
    return await _child_of(process.rank_pids()[rank])


async def _child_of(pid: int) -> psutil.Process:
    """Returns the sandbox process that another process has started."""
    while True:
        for child in psutil.Process(pid).children():
            with suppress(psutil.Error):
                if "fovea_trainer.losses.loss_worker" in child.cmdline():
                    return child
        await asyncio.sleep(0.01)


def _plain(datums: list[trainer_pb2.Datum]) -> list[trainer_pb2.Datum]:
    keys = ("target_tokens", "weights")
    return [
        trainer_pb2.Datum(input=one.input, loss_inputs={key: one.loss_inputs[key] for key in keys}) for one in datums
    ]


async def test_a_loss_that_is_not_finite_is_refused(qwen3: Bench) -> None:
    model_id = await qwen3.adapter()
    datums = _for("importance_sampling", await _policy_datums(qwen3, model_id))
    broken = np.full(len(datums[2].input.tokens) // 4, -1e4, np.float32)
    datums[2].loss_inputs["logprobs"].CopyFrom(tensors.encode(broken))
    with pytest.raises(InvalidInput, match=r"datum\[2\]: its importance_sampling loss is (-?inf|nan)") as caught:
        await qwen3.client.forward_backward(header(model_id, 5, "importance_sampling"), datums)
    assert caught.value.field == "datum[2]"
    clipped = await qwen3.client.forward_backward(header(model_id, 5, "cispo"), datums)
    assert np.isfinite(clipped.metrics["loss:sum"])


async def test_several_targets_and_a_traced_loss(qwen3: Bench) -> None:
    """[N, K] log-probabilities reach the graph with that shape."""
    model_id = await qwen3.adapter()
    rendered = qwen3.images.render(chunk_lists("text")[0])
    targets = np.random.default_rng(0).integers(0, 1200, (17, 3)).astype(np.int64)
    one = datum(rendered, 0, target_tokens=targets, scale=np.array(2.0, np.float32))

    def loss(logprobs: Any, scale: Any) -> Any:
        return (logprobs.amax(dim=1) * scale).sum(), {}

    asked = header(model_id, 1, "custom")
    asked.custom_loss.CopyFrom(traced(loss, {"logprobs": 2, "scale": 0})[1])
    result = await qwen3.client.forward_backward(asked, [one])
    found = logprobs_of(result.outputs[0])
    assert found.shape == (17, 3)
    assert result.metrics["loss:sum"] == pytest.approx(2 * float(found.max(1).sum()), rel=1e-5)
    flat = datum(rendered, 0, scale=np.array(2.0, np.float32))
    with pytest.raises(InvalidInput, match=r"target_tokens has shape \[17\], but custom accepts \[N, K\]"):
        await qwen3.client.forward_backward(asked, [flat])


def squared(logprobs: Any) -> Any:
    """A loss of one datum."""
    return (logprobs**2).mean() * 5, {}


def preference(scores: list[torch.Tensor]) -> torch.Tensor:
    """Direct preference optimization over pairs (Rafailov et al., 2023), with a reference of zero."""
    sums = [one.sum() for one in scores]
    margins = [sums[i] / len(scores[i]) - sums[i + 1] / len(scores[i + 1]) for i in range(0, len(sums) - 1, 2)]
    return -torch.nn.functional.logsigmoid(torch.stack(margins) * 2).sum()


@pytest.mark.parametrize("name", ["squared", "preference"])
async def test_custom_losses_equal_autograd_through_the_whole_model(qwen3: Bench, name: str) -> None:
    """C91: as the SDK does it for pairs (a forward, then weighted cross_entropy), and traced for one datum."""
    model_id = await qwen3.adapter()
    chunks = chunk_lists("text")[:4]
    datums = [datum(qwen3.images.render(one), seed) for seed, one in enumerate(chunks)]
    for _ in range(2):
        await qwen3.client.forward_backward(header(model_id, 4), datums)
        await qwen3.client.optim_step(model_id, adam(learning_rate=1e-2))
    folder = qwen3.scratch / f"peft-{model_id}"
    await qwen3.client.take_snapshot(model_id, f"{model_id}@peft", str(folder))
    # A fresh optimizer, so that a step with a huge eps is plain gradient descent.
    state = str(qwen3.scratch / f"state-{model_id}")
    await qwen3.client.save_state(model_id, state)
    await qwen3.client.load_state(model_id, state, optimizer=False)
    base = type(qwen3.reference).from_pretrained(qwen3.model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder, is_trainable=True)
    scores = [reference.logprobs(model, qwen3.images, one, made) for one, made in zip(chunks, datums, strict=True)]
    expected = torch.stack([squared(one)[0] for one in scores]).sum() if name == "squared" else preference(scores)
    torch.autograd.backward([expected])
    if name == "squared":
        asked = header(model_id, 4, "custom")
        asked.custom_loss.CopyFrom(traced(squared, {"logprobs": 1})[1])
        result = await qwen3.client.forward_backward(asked, datums)
        assert result.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4)
    else:
        forward = await qwen3.client.forward_backward(header(model_id, 4, backward=False), datums)
        leaves = [torch.tensor(logprobs_of(output), requires_grad=True) for output in forward.outputs]
        loss = preference(leaves)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        for made, gradient in zip(datums, torch.autograd.grad(loss, leaves), strict=True):
            made.loss_inputs["weights"].CopyFrom(tensors.encode(-gradient.numpy()))
        await qwen3.client.forward_backward(header(model_id, 4), datums)
    descent = await qwen3.descend(model_id)
    gradients = {
        key.replace(".default.", "."): -parameter.grad
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert set(gradients) == set(descent)
    size = torch.stack([tensor.double().norm() for tensor in gradients.values()]).norm()
    difference = torch.stack([(descent[key] - tensor).double().norm() for key, tensor in gradients.items()]).norm()
    assert size > 1e-2
    assert difference / size < 1e-3
