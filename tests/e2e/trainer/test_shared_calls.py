"""Small calls of several models in one pass: results, gradients and failures equal those of separate calls."""

import asyncio

import numpy as np
import torch

from fovea.api.v1 import trainer_pb2
from fovea.client import ForwardBackwardResult
from fovea.wire.errors import InvalidInput
from tests.e2e.trainer.conftest import Bench, adam
from tests.e2e.trainer.examples import chunk_lists, datum, header, text

Call = tuple[trainer_pb2.ForwardBackwardHeader, list[trainer_pb2.Datum]]


async def _trained(bench: Bench, count: int) -> list[str]:
    """Returns different adapters, each after one step so that both factors matter."""
    models = [await bench.adapter(seed=seed) for seed in range(count)]
    for seed, model in enumerate(models):
        await bench.client.forward_backward(*_call(bench, model, [text(20, seed)]))
        await bench.client.optim_step(model, adam(learning_rate=0.02))
    return models


def _call(bench: Bench, model: str, chunks: list, loss: str = "cross_entropy", place: str = "alone") -> Call:
    lists = [one if isinstance(one[0], list) else [one] for one in chunks]
    datums = [datum(bench.images.render(one), seed) for seed, one in enumerate(lists)]
    made = header(model, len(datums), loss)
    made.place = place
    return made, datums


async def _together(bench: Bench, calls: list[Call]) -> list[ForwardBackwardResult | BaseException]:
    """Runs calls while a longer one occupies the trainer, so that all of them wait together."""
    busy = await bench.adapter()
    running = asyncio.create_task(
        bench.client.forward_backward(*_call(bench, busy, [text(400, seed) for seed in range(24)]))
    )
    await asyncio.sleep(0.3)
    found = await asyncio.gather(*(bench.client.forward_backward(*call) for call in calls), return_exceptions=True)
    await running
    return found


async def test_each_call_gives_what_it_gives_alone(shared: Bench) -> None:
    models = await _trained(shared, 5)
    lists = [[text(30, 1)], chunk_lists("image")[:1], [text(25, 3), text(17, 2)], [text(40, 4)], [text(61, 5)]]
    alone, gradients = [], []
    for model, chunks in zip(models, lists, strict=True):
        alone.append(await shared.client.forward_backward(*_call(shared, model, chunks)))
        gradients.append(await shared.descend(model))
    models = await _trained(shared, 5)
    calls = [_call(shared, model, chunks, place="") for model, chunks in zip(models, lists, strict=True)]
    found = await _together(shared, calls)
    for model, result, expected, gradient in zip(models, found, alone, gradients, strict=True):
        assert isinstance(result, ForwardBackwardResult)
        assert result.metrics == expected.metrics, "on a CPU a call must have the same bits alone and in a shared pass"
        assert result.outputs == expected.outputs
        descended = await shared.descend(model)
        assert descended.keys() == gradient.keys()
        assert all(torch.equal(descended[name], gradient[name]) for name in gradient)
    assert sum("x" in result.place for result in found if isinstance(result, ForwardBackwardResult)) >= 2


async def test_in_the_same_place_a_call_is_repeated_to_the_bit(shared: Bench) -> None:
    lists = [[text(30 + number, number)] for number in range(6)]
    models = await _trained(shared, 6)
    found = await _together(
        shared, [_call(shared, model, chunks, place="") for model, chunks in zip(models, lists, strict=True)]
    )
    gradients = [await shared.descend(model) for model in models]
    models = await _trained(shared, 6)
    for model, chunks, result, gradient in zip(models, lists, found, gradients, strict=True):
        assert isinstance(result, ForwardBackwardResult)
        again = await shared.client.forward_backward(*_call(shared, model, chunks, place=result.place))
        assert (again.outputs, again.metrics, again.place) == (result.outputs, result.metrics, result.place)
        descended = await shared.descend(model)
        assert all(torch.equal(descended[name], gradient[name]) for name in gradient)


async def test_a_call_that_fails_leaves_the_others_alone(shared: Bench) -> None:
    models = await _trained(shared, 4)
    calls = [_call(shared, model, [text(30, 1)], place="") for model in models]
    broken = calls[2][1][0].loss_inputs["weights"]
    count = len(broken.data) // 4
    broken.data = np.full(count, 3e38, np.float32).tobytes()
    found = await _together(shared, calls)
    assert isinstance(found[2], InvalidInput)
    assert "datum[0]: its cross_entropy loss" in str(found[2])
    for result in (found[0], found[1], found[3]):
        assert isinstance(result, ForwardBackwardResult)
    norms = [(await shared.client.optim_step(model, adam())).metrics.values["grad_norm:mean"] for model in models]
    assert norms[2] == 0, "the failed call must add no gradients"
    assert min(norms[0], norms[1], norms[3]) > 0
