"""Several models, gradients, steps, and the rules for models that may exist together."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
import torch

from fovea.api.v1 import weights_pb2
from fovea.wire.errors import AlreadyExists, FailedPrecondition, InvalidInput, NotFound
from tests.e2e.trainer.conftest import Bench, adam
from tests.e2e.trainer.examples import chunk_lists, datum, datums_of, header, logprobs_of, text
from tests.e2e.trainer.image_service import picture


async def test_info(qwen3_vl: Bench) -> None:
    model_id = await qwen3_vl.adapter()
    info = await qwen3_vl.client.info()
    assert (info.family, info.world_size, info.dtype) == ("qwen3_vl", 2, "float32")
    assert list(info.model_ids) == [model_id]
    assert set(info.loss_functions) >= {"cross_entropy", "importance_sampling"}
    assert info.supports_vision_lora
    assert info.max_lora_rank == 64


async def test_fresh_adapter_is_the_base_whatever_its_shape(qwen3_vl: Bench) -> None:
    datums = datums_of(qwen3_vl.images, "mixed")
    answers = []
    for changes in ({"rank": 1}, {"rank": 64, "vision": True, "alpha": 3.0}, {"train_mlp": False, "seed": 1}):
        model_id = await qwen3_vl.adapter(**changes)
        result = await qwen3_vl.client.forward_backward(header(model_id, len(datums), backward=False), datums)
        answers.append(np.concatenate([logprobs_of(output) for output in result.outputs]))
    np.testing.assert_allclose(answers[0], answers[1], atol=1e-5)
    np.testing.assert_array_equal(answers[0], answers[2])


async def test_settings_choose_the_modules(qwen3_vl: Bench) -> None:
    async def modules(**changes: bool) -> set[str]:
        off = {"train_attention": False, "train_mlp": False, "train_unembedding": False}
        weights = await qwen3_vl.weights(await qwen3_vl.adapter(**{**off, **changes}))
        return {name.removesuffix(".weight").rsplit(".", 2)[1] for name in weights}

    assert await modules(train_attention=True) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert await modules(train_mlp=True) == {"gate_proj", "up_proj", "down_proj"}
    assert await modules(train_unembedding=True) == {"lm_head"}
    with_vision = await modules(train_attention=True, vision=True)
    assert with_vision == {"q_proj", "k_proj", "v_proj", "o_proj", "qkv", "proj"}


async def test_seed_fixes_the_start(qwen3: Bench) -> None:
    same = [await qwen3.weights(await qwen3.adapter(seed=11)) for _ in range(2)]
    other = await qwen3.weights(await qwen3.adapter(seed=12))
    alone = await qwen3.weights(await qwen3.adapter(seed=11, train_attention=False, train_unembedding=False))
    for name, tensor in same[0].items():
        assert torch.equal(tensor, same[1][name])
        assert torch.equal(tensor, other[name]) == name.endswith("lora_B.weight")
    for name, tensor in alone.items():
        assert torch.equal(tensor, same[0][name])
        bound = 1 / np.sqrt(tensor.shape[1])
        assert not name.endswith("lora_A.weight") or 0.9 * bound < tensor.abs().max() <= bound


async def test_adapters_do_not_touch_each_other(qwen3_vl: Bench) -> None:
    """Interleaved training of two adapters of different shapes equals training each alone."""
    datums = datums_of(qwen3_vl.images, "mixed")

    async def train(model_id: str) -> None:
        await qwen3_vl.client.forward_backward(header(model_id, len(datums)), datums)
        await qwen3_vl.client.optim_step(model_id, adam())

    shapes = [{"rank": 4, "vision": True}, {"rank": 16, "train_mlp": False}]
    alone = []
    for shape in shapes:
        model_id = await qwen3_vl.adapter(**shape)
        for _ in range(2):
            await train(model_id)
        alone.append(await qwen3_vl.weights(model_id))
    together = [await qwen3_vl.adapter(**shape) for shape in shapes]
    first, second = together
    for model_id in (first, second, second, first):
        await train(model_id)
    for model_id, expected in zip(together, alone, strict=True):
        found = await qwen3_vl.weights(model_id)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


async def test_gradients_add_up_until_the_step(qwen3: Bench) -> None:
    datums = datums_of(qwen3.images, "text")
    once, twice = await qwen3.adapter(), await qwen3.adapter()
    await qwen3.client.forward_backward(header(once, len(datums)), datums)
    for part in (datums[:2], datums[2:]):
        await qwen3.client.forward_backward(header(twice, len(part)), part)
        await qwen3.client.forward_backward(header(twice, len(part), backward=False), part)
    first, second = await qwen3.descend(once), await qwen3.descend(twice)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-4, atol=1e-4)
    assert max(tensor.abs().max() for tensor in first.values()) > 0.1


async def test_forward_changes_nothing_and_gradients_can_be_dropped(qwen3: Bench) -> None:
    datums = datums_of(qwen3.images, "text")
    model_id = await qwen3.adapter()
    await qwen3.client.forward_backward(header(model_id, len(datums), backward=False), datums)
    await qwen3.client.forward_backward(header(model_id, len(datums)), datums)
    await qwen3.client.clear_gradients(model_id)
    response = await qwen3.client.optim_step(model_id, adam())
    assert response.metrics.values["grad_norm:mean"] == 0
    assert response.step == 1
    weights, fresh = await qwen3.weights(model_id), await qwen3.weights(await qwen3.adapter())
    for name, tensor in fresh.items():
        assert torch.equal(weights[name], tensor), name


async def test_step_without_gradient_decays_and_keeps_momentum(qwen3: Bench) -> None:
    model_id = await qwen3.adapter()
    before = await qwen3.weights(model_id)
    await qwen3.client.optim_step(model_id, adam(learning_rate=0.1, weight_decay=0.5))
    after = await qwen3.weights(model_id)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor * (1 - 0.1 * 0.5), rtol=1e-6, atol=1e-8)


async def test_clipping_bounds_the_accumulated_gradient(qwen3: Bench) -> None:
    datums = datums_of(qwen3.images, "text")
    model_id = await qwen3.adapter()
    for _ in range(2):
        await qwen3.client.forward_backward(header(model_id, len(datums)), datums)
    response = await qwen3.client.optim_step(model_id, adam(learning_rate=1e10, eps=1e10, grad_clip_norm=0.25))
    weights, fresh = await qwen3.weights(model_id), await qwen3.weights(await qwen3.adapter())
    moved = torch.stack([(weights[name] - fresh[name]).norm() for name in fresh]).norm()
    assert response.metrics.values["grad_norm:mean"] > 1
    assert moved == pytest.approx(0.25, rel=1e-3)


async def test_infinite_gradients_are_dropped_not_applied(qwen3: Bench) -> None:
    model_id = await qwen3.adapter()
    rendered = qwen3.images.render([text(4, 1)])
    huge = datum(rendered, 0, weights=np.array([1e37, -1e37, 1e37, -1e37], np.float32))
    await qwen3.client.forward_backward(header(model_id, 1), [huge])
    with pytest.raises(FailedPrecondition, match=r"step 1 of model .* failed.* norm inf.*Its gradients were dropped"):
        await qwen3.client.optim_step(model_id, adam())
    await qwen3.client.forward_backward(header(model_id, 1), [datum(rendered, 0)])
    assert (await qwen3.client.optim_step(model_id, adam())).step == 1


_HUGE = {"learning_rate": 1e25, "weight_decay": 1e15}
_LARGE = {"learning_rate": 1e25}


@pytest.mark.parametrize(
    ("full", "number", "bad"),
    [(False, 1, {"eps": 0.0}), (False, 2, _HUGE), (True, 2, _HUGE), (False, 2, _LARGE), (True, 1, _LARGE)],
)
async def test_a_step_whose_weights_would_be_out_of_bounds_is_not_taken(
    qwen3: Bench, full: bool, number: int, bad: dict[str, float]
) -> None:
    """An adapter's A has no gradient at first: without eps that is 0 / 0. Weights, moments and step count stay."""
    datums = datums_of(qwen3.images, "text")

    async def train(refused: int) -> tuple[int, dict[str, torch.Tensor]]:
        model_id = await qwen3.create(None) if full else await qwen3.adapter()
        for step in (1, 2):
            await qwen3.client.forward_backward(header(model_id, len(datums)), datums)
            if step == refused:
                refusal = f"step {step} of model '{model_id}' failed.*gradient has norm .*learning_rate="
                with pytest.raises(FailedPrecondition, match=refusal):
                    await qwen3.client.optim_step(model_id, adam(**bad))
                await qwen3.client.forward_backward(header(model_id, len(datums)), datums)
            response = await qwen3.client.optim_step(model_id, adam())
        weights = await qwen3.weights(model_id)
        await qwen3.clean()
        return response.step, weights

    (expected_count, expected), (count, weights) = await train(0), await train(number)
    assert count == expected_count
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


async def test_full_parameters_want_the_trainer_alone(qwen3: Bench) -> None:
    adapter = await qwen3.adapter()
    with pytest.raises(FailedPrecondition, match="needs a trainer without other models"):
        await qwen3.create(None)
    await qwen3.client.delete_model(adapter)
    full = await qwen3.create(None)
    with pytest.raises(FailedPrecondition, match="occupies this trainer"):
        await qwen3.adapter()
    await qwen3.client.delete_model(full)
    await qwen3.client.delete_model(full)
    await qwen3.adapter()


async def test_creation_is_repeatable_but_not_with_other_settings(qwen3: Bench) -> None:
    lora = weights_pb2.LoraConfig(rank=2, train_mlp=True)
    model_id = await qwen3.create(lora)
    again = await qwen3.client.create_model(model_id, lora)
    assert again is not None
    assert again.tensors
    assert again == await qwen3.client.create_model(model_id, lora)
    with pytest.raises(AlreadyExists):
        await qwen3.client.create_model(model_id, weights_pb2.LoraConfig(rank=3, train_mlp=True))


@pytest.mark.parametrize(
    ("lora", "field"),
    [
        (weights_pb2.LoraConfig(rank=0, train_mlp=True), "lora.rank"),
        (weights_pb2.LoraConfig(rank=65, train_mlp=True), "lora.rank"),
        (weights_pb2.LoraConfig(rank=4), "lora.train_attention"),
        (weights_pb2.LoraConfig(rank=4, train_mlp=True, train_vision=True), "lora.train_vision"),
        (weights_pb2.LoraConfig(rank=4, train_mlp=True, alpha=-1), "lora.alpha"),
    ],
)
async def test_impossible_adapters_are_refused(qwen3: Bench, lora: weights_pb2.LoraConfig, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        await qwen3.create(lora)
    assert caught.value.field == field
    await qwen3.adapter()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"learning_rate": float("nan")}, "adam.learning_rate"),
        ({"beta1": 1.0}, "adam.beta1"),
        ({"beta2": -0.1}, "adam.beta2"),
        ({"eps": -1e-8}, "adam.eps"),
        ({"learning_rate": 1e39}, "adam.learning_rate"),
        ({"grad_clip_norm": -1.0}, "adam.grad_clip_norm"),
        ({"weight_decay": float("inf")}, "adam.weight_decay"),
    ],
)
async def test_impossible_steps_are_refused(qwen3: Bench, change: dict[str, float], field: str) -> None:
    model_id = await qwen3.adapter()
    with pytest.raises(InvalidInput) as caught:
        await qwen3.client.optim_step(model_id, adam(**change))
    assert caught.value.field == field
    assert (await qwen3.client.optim_step(model_id, adam())).step == 1


async def test_unknown_models_are_not_found(qwen3: Bench) -> None:
    datums = datums_of(qwen3.images, "text")
    for call in (
        qwen3.client.optim_step("nobody", adam()),
        qwen3.client.forward_backward(header("nobody", len(datums)), datums),
        qwen3.client.take_snapshot("nobody", "nobody@1"),
        qwen3.client.save_state("nobody", str(qwen3.scratch / "nobody")),
    ):
        with pytest.raises(NotFound, match="nobody"):
            await call


async def test_two_ranks_equal_one(one_rank: Bench, qwen3_vl: Bench) -> None:
    """The number of ranks changes neither losses, log-probabilities nor the trained weights."""
    datums = datums_of(qwen3_vl.images, "mixed")
    answers = []
    for bench in (one_rank, qwen3_vl):
        model_id = await bench.adapter(vision=True)
        losses = []
        for _ in range(3):
            result = await bench.client.forward_backward(header(model_id, len(datums)), datums)
            losses.append(result.metrics["loss:sum"])
            await bench.client.optim_step(model_id, adam())
        answers.append((losses, [logprobs_of(output) for output in result.outputs]))
    np.testing.assert_allclose(answers[0][0], answers[1][0], rtol=1e-4)
    for one, two in zip(answers[0][1], answers[1][1], strict=True):
        np.testing.assert_allclose(one, two, atol=2e-4)


async def test_a_rank_without_datum_or_image_joins_in(vlm: Bench) -> None:
    """One datum for two ranks, and an image beside text only; both with the vision tower trained."""
    model_id = await vlm.adapter(vision=True)
    image = datums_of(vlm.images, "image")[0]
    words = datums_of(vlm.images, "text")[0]
    for batch in ([words], [image], [image, words], [words, words, image]):
        result = await vlm.client.forward_backward(header(model_id, len(batch)), batch)
        assert np.isfinite(result.metrics["loss:sum"])
    assert (await vlm.client.optim_step(model_id, adam())).step == 1


async def test_known_images_beside_new_ones(vlm: Bench) -> None:
    """One rank has an image in its cache, the other has a new one: no hang, no second fetch, the same answers."""
    model_id = await vlm.adapter()
    pictures = [picture(140, 140, 1000 + number) for number in range(3)]
    datums = [datum(vlm.images.render([text(3, 1), one, text(5, 2)]), 9) for one in pictures]
    vlm.images.fetched.clear()
    alone = [await vlm.client.forward_backward(header(model_id, 1), [one]) for one in datums[:2]]
    for batch in (datums[:2], datums, [datums[0]] * 6, [*datums, *datums_of(vlm.images, "text")]):
        result = await vlm.client.forward_backward(header(model_id, len(batch)), batch)
        np.testing.assert_allclose(logprobs_of(result.outputs[0]), logprobs_of(alone[0].outputs[0]), atol=1e-5)
    digests = [one.input.spans[0].feature.digest for one in datums]
    # Each rank has its own cache, so each may fetch an image once.
    assert all(1 <= vlm.images.fetched.count(digest) <= 2 for digest in digests)


async def test_images_are_seen(qwen3_vl: Bench) -> None:
    """The same words after another picture have other log-probabilities."""
    model_id = await qwen3_vl.adapter()
    chunks = chunk_lists("image")[0]
    other = [chunks[0], chunks[1].rotate(180), chunks[2]]  # type: ignore[union-attr]
    datums = [datum(qwen3_vl.images.render(given), 0) for given in (chunks, other)]
    result = await qwen3_vl.client.forward_backward(header(model_id, 2, backward=False), datums)
    first, second = (logprobs_of(output)[-5:] for output in result.outputs)
    assert np.abs(first - second).max() > 1e-4


async def test_a_numbered_command_that_is_asked_for_twice_is_done_once(vlm: Bench) -> None:
    """Even if its caller disconnects in the middle, as a killed gateway does."""
    datums = datums_of(vlm.images, "mixed")

    async def train(is_repeated: bool) -> tuple[list[bytes], dict[str, float], dict[str, torch.Tensor]]:
        model_id = await vlm.adapter(rank=4)
        loss = header(model_id, len(datums))
        loss.seq_id = 1
        if is_repeated:
            await leave(vlm.client.forward_backward(loss, datums))
            await vlm.client.forward_backward(loss, datums)
        outputs = (await vlm.client.forward_backward(loss, datums)).outputs
        if is_repeated:
            await leave(vlm.client.optim_step(model_id, adam(), seq_id=2))
        step = await vlm.client.optim_step(model_id, adam(), seq_id=2)
        assert step.step == 1
        with pytest.raises(FailedPrecondition, match="seq_id 1 of model"):
            await vlm.client.forward_backward(loss, datums)
        logprobs = [logprobs_of(output).tobytes() for output in outputs]
        return logprobs, dict(step.metrics.values), await vlm.weights(model_id)

    once, twice = await train(False), await train(True)
    assert once[:2] == twice[:2]
    assert all(torch.equal(tensor, twice[2][name]) for name, tensor in once[2].items())


async def leave(call: Coroutine[Any, Any, Any]) -> None:
    """Cancels a call a moment after its start."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("full", [False, True])
async def test_gradients_of_a_step_that_was_not_taken_can_be_dropped(one_rank: Bench, full: bool) -> None:
    model_id = await one_rank.create(None) if full else await one_rank.adapter(rank=4)
    datums = datums_of(one_rank.images, "text")
    norms = []
    for is_left_over in (False, True):
        if is_left_over:
            await one_rank.client.forward_backward(header(model_id, len(datums)), datums)
        loss = header(model_id, len(datums))
        loss.drop_gradients = True
        await one_rank.client.forward_backward(loss, datums)
        step = await one_rank.client.optim_step(model_id, adam(learning_rate=0.0))
        norms.append(step.metrics.values["grad_norm:mean"])
    assert norms[0] == norms[1]
