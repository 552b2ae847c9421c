"""The trainer's log-probabilities, losses and gradients equal those of plain transformers."""

import numpy as np
import pytest
import torch
from peft import PeftModel

from fovea.api.v1 import trainer_pb2
from fovea.client import ForwardBackwardResult
from fovea.wire import tensors
from fovea_trainer.model.packed_model import file_names
from tests.e2e.trainer import reference
from tests.e2e.trainer.conftest import Bench, adam
from tests.e2e.trainer.examples import chunk_lists, datum, datums_of, header, logprobs_of, text

KINDS = ["text", "image", "mixed"]


@pytest.mark.parametrize("kind", KINDS)
async def test_forward_equals_transformers(vlm: Bench, kind: str) -> None:
    """Includes a frozen tower with cached outputs: the second call reads them from the cache."""
    datums = datums_of(vlm.images, kind)
    trained, frozen = await vlm.adapter(vision=True), await vlm.adapter()
    for model_id in (trained, frozen, frozen):
        result = await vlm.client.forward_backward(header(model_id, len(datums), backward=False), datums)
        _assert_equals_transformers(vlm, kind, datums, result)


def _assert_equals_transformers(
    vlm: Bench, kind: str, datums: list[trainer_pb2.Datum], result: ForwardBackwardResult
) -> None:
    loss = 0.0
    for chunks, one, output in zip(chunk_lists(kind), datums, result.outputs, strict=True):
        with torch.no_grad():
            expected = reference.logprobs(vlm.reference, vlm.images, chunks, one).numpy()
        np.testing.assert_allclose(logprobs_of(output), expected, atol=1e-4)
        loss -= float(tensors.decode(one.loss_inputs["weights"]) @ expected)
    assert result.metrics["loss:sum"] == pytest.approx(loss, abs=1e-2, rel=1e-4)


async def test_text_family_equals_transformers(qwen3: Bench) -> None:
    model_id = await qwen3.adapter()
    datums = datums_of(qwen3.images, "text")
    result = await qwen3.client.forward_backward(header(model_id, len(datums), backward=False), datums)
    for chunks, one, output in zip(chunk_lists("text"), datums, result.outputs, strict=True):
        with torch.no_grad():
            expected = reference.logprobs(qwen3.reference, qwen3.images, chunks, one).numpy()
        np.testing.assert_allclose(logprobs_of(output), expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
async def test_packed_equals_unpacked(vlm: Bench, kind: str) -> None:
    datums = datums_of(vlm.images, kind)
    packed, alone = await vlm.adapter(vision=True), await vlm.adapter(vision=True)
    for model_id in (packed, alone):
        await _disturb(vlm, model_id)
    together = await vlm.client.forward_backward(header(packed, len(datums)), datums)
    one_by_one = [await vlm.client.forward_backward(header(alone, 1), [one]) for one in datums]
    for output, single in zip(together.outputs, one_by_one, strict=True):
        np.testing.assert_allclose(logprobs_of(output), logprobs_of(single.outputs[0]), atol=2e-5)
    loss = sum(single.metrics["loss:sum"] for single in one_by_one)
    scale = sum(abs(single.metrics["loss:sum"]) for single in one_by_one)
    assert abs(together.metrics["loss:sum"] - loss) <= 1e-5 * scale
    first, second = await vlm.descend(packed), await vlm.descend(alone)
    assert set(first) == set(second)
    assert _relative_difference(first, second) < 1e-5


async def test_adapter_gradients_equal_peft(vlm: Bench) -> None:
    """Attention, MLP, unembedding, vision tower and mergers; PEFT loads the folder of a snapshot."""
    model_id = await vlm.adapter(vision=True)
    datums = datums_of(vlm.images, "mixed")
    await _disturb(vlm, model_id)
    folder = vlm.scratch / "for-peft"
    await vlm.client.take_snapshot(model_id, f"{model_id}@1", str(folder))
    model = PeftModel.from_pretrained(_fresh(vlm), folder, is_trainable=True)
    result = await vlm.client.forward_backward(header(model_id, len(datums)), datums)
    for chunks, one, output in zip(chunk_lists("mixed"), datums, result.outputs, strict=True):
        with torch.no_grad():
            expected = reference.logprobs(model, vlm.images, chunks, one).numpy()
        np.testing.assert_allclose(logprobs_of(output), expected, atol=1e-4)
    reference.cross_entropy(model, vlm.images, chunk_lists("mixed"), datums).backward()
    expected_gradients = {
        name.replace(".default.", "."): -parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    descent = await vlm.descend(model_id)
    assert set(descent) == set(expected_gradients)
    assert _relative_difference(descent, expected_gradients) < 1e-4


async def test_full_gradients_equal_transformers(vlm: Bench) -> None:
    await _assert_full_gradients_equal_transformers(vlm)


async def test_full_gradients_of_one_rank_equal_transformers(one_rank: Bench) -> None:
    await _assert_full_gradients_equal_transformers(one_rank)


async def _assert_full_gradients_equal_transformers(bench: Bench) -> None:
    """Accumulates gradients over two calls."""
    model_id = await bench.create(None)
    datums = datums_of(bench.images, "mixed")
    for _ in range(2):
        await bench.client.forward_backward(header(model_id, len(datums)), datums)
    model = _fresh(bench)
    reference.cross_entropy(model, bench.images, chunk_lists("mixed"), datums).backward()
    names = file_names(model)
    parameters = {names[name]: parameter for name, parameter in model.named_parameters()}
    expected = {name: -2 * parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    descent = await bench.descend(model_id)
    assert _relative_difference({name: descent[name] for name in expected}, expected) < 1e-4
    assert all(not descent[name].any() for name in set(descent) - set(expected))


async def test_full_training_reduces_the_loss_and_leaves_the_base_alone(vlm: Bench) -> None:
    datums = datums_of(vlm.images, "mixed")
    for one in datums:
        count = len(one.input.tokens) // 4
        one.loss_inputs["weights"].CopyFrom(tensors.encode(np.ones(count, np.float32)))
    adapter = await vlm.adapter()
    base = await vlm.client.forward_backward(header(adapter, len(datums), backward=False), datums)
    await vlm.clean()
    model_id = await vlm.create(None)
    losses = []
    for _ in range(4):
        result = await vlm.client.forward_backward(header(model_id, len(datums)), datums)
        losses.append(result.metrics["loss:sum"])
        await vlm.client.optim_step(model_id, adam(learning_rate=1e-3))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    await vlm.clean()
    again = await vlm.client.forward_backward(header(await vlm.adapter(), len(datums), backward=False), datums)
    for output, before in zip(again.outputs, base.outputs, strict=True):
        np.testing.assert_array_equal(logprobs_of(output), logprobs_of(before))


async def test_several_targets_a_position(qwen3: Bench) -> None:
    """[N, K] targets beside [N] ones in one micro-batch: the same shapes and values as one target at a time."""
    model_id = await qwen3.adapter()
    rendered = qwen3.images.render([text(9, 1)])
    targets = np.random.default_rng(0).integers(0, 1200, (9, 3)).astype(np.int64)
    weights = np.random.default_rng(1).normal(size=(9, 3)).astype(np.float32)
    many = datum(rendered, 0, target_tokens=targets, weights=weights)
    single = [datum(rendered, 0, target_tokens=targets[:, k], weights=weights[:, k]) for k in range(3)]
    mixed = await qwen3.client.forward_backward(header(model_id, 2, backward=False), [many, single[1]])
    alone = await qwen3.client.forward_backward(header(model_id, 3, backward=False), single)
    columns = [logprobs_of(output) for output in alone.outputs]
    np.testing.assert_allclose(logprobs_of(mixed.outputs[0]), np.stack(columns, axis=1), atol=1e-5)
    np.testing.assert_allclose(logprobs_of(mixed.outputs[1]), columns[1], atol=1e-5)
    expected = alone.metrics["loss:sum"] + float(-(weights[:, 1] @ columns[1]))
    assert mixed.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


async def test_importance_sampling(qwen3: Bench) -> None:
    model_id = await qwen3.adapter()
    rendered = qwen3.images.render([text(12, 3)])
    plain = datum(rendered, 5)
    scored = await qwen3.client.forward_backward(header(model_id, 1, backward=False), [plain])
    current = logprobs_of(scored.outputs[0])
    generator = np.random.default_rng(8)
    sampled = (current + generator.normal(scale=0.3, size=12)).astype(np.float32)
    advantages = generator.normal(size=12).astype(np.float32)
    one = datum(rendered, 5, logprobs=sampled, advantages=advantages)
    del one.loss_inputs["weights"]
    result = await qwen3.client.forward_backward(header(model_id, 1, "importance_sampling"), [one])
    expected = -float(np.exp(current.astype(np.float64) - sampled) @ advantages)
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    assert all(name.count(":") == 1 for name in result.metrics)


async def _disturb(bench: Bench, model_id: str) -> None:
    """Takes some steps, so that B is not zero and every part of the adapter matters; then resets the optimizer."""
    datums = datums_of(bench.images, "mixed")
    for _ in range(2):
        await bench.client.forward_backward(header(model_id, len(datums)), datums)
        await bench.client.optim_step(model_id, adam(learning_rate=1e-2))
    folder = str(bench.scratch / f"{model_id}-disturbed")
    await bench.client.save_state(model_id, folder)
    await bench.client.load_state(model_id, folder, optimizer=False)


def _fresh(bench: Bench) -> torch.nn.Module:
    return type(bench.reference).from_pretrained(bench.model_dir, dtype=torch.float32)  # type: ignore[no-any-return]


def _relative_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Returns the norm of the difference over all tensors relative to the norm of the second."""
    assert set(first) == set(second)
    difference = torch.stack([(first[name].double() - second[name].double()).norm() for name in second]).norm()
    return float(difference / torch.stack([tensor.double().norm() for tensor in second.values()]).norm())
