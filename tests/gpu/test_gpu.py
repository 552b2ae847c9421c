"""Training with images, live pushes, and agreement of sampler and trainer on real GPUs in bfloat16."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tinker

from benchmarks.agreement import draw, kl, random_prompts, score
from benchmarks.client import Bench, datum, take_step
from fovea_trainer.model.memory_budget import MAX_TOKENS

LARGEST_KL = 1e-3
"""In nats per token; bfloat16 causes differences of some hundredths at single tokens."""


def image_data(bench: Bench) -> list[tinker.Datum]:
    rng = np.random.default_rng(1)
    return [datum(bench.prompt(rng, 32, side), bench.tokens(rng, 24)) for side in (0, 256, 320, 256)]


def losses(training: tinker.TrainingClient, data: list[tinker.Datum], steps: int, rate: float) -> list[float]:
    return [take_step(training, data, rate).metrics["loss:sum"] for _ in range(steps)]


def assert_agree(bench: Bench, training: tinker.TrainingClient, temperature: float) -> None:
    """Checks agreement on text and after pictures."""
    sampler = training.save_weights_and_get_sampling_client().result(600)
    for side in (0, 256):
        for found in score(training, draw(sampler, random_prompts(bench, 4, side, 3), temperature, 3)()):
            assert kl(found.differences) <= LARGEST_KL


def scores(sampler: Any, data: list[tinker.Datum]) -> npt.NDArray[np.float64]:
    """Returns the sampler's log-probabilities of all prompt tokens."""
    pending = [sampler.compute_logprobs(one.model_input) for one in data]
    return np.array([value for future in pending for value in future.result(600)[1:]], np.float64)


def text_differences(one: tinker.Datum, output: Any, sampled: list[float | None]) -> npt.NDArray[np.float64]:
    """Returns trainer minus sampler at positions with a text token as target."""
    targets = np.asarray(one.loss_fn_inputs["target_tokens"].data)[:-1]
    trained = np.asarray(output["logprobs"].data, np.float64)[:-1]
    difference: npt.NDArray[np.float64] = trained - np.array(sampled[1:], np.float64)
    return np.compress(targets != 0, difference)


def base_scores(bench: Bench, data: list[tinker.Datum]) -> npt.NDArray[np.float64]:
    return scores(bench.service.create_sampling_client(base_model=bench.model).result(600), data)


@pytest.mark.parametrize(("rank", "rate"), [(32, 2e-3), (0, 5e-4)], ids=["adapter", "full"])
def test_images_are_learnt_and_what_is_pushed_is_what_is_sampled(bench: Bench, rank: int, rate: float) -> None:
    data = image_data(bench)
    before = base_scores(bench, data)
    training = bench.training(rank)
    found = losses(training, data, 20, rate)
    assert found[-1] < 0.8 * found[0], found
    after = scores(training.save_weights_and_get_sampling_client().result(600), data)
    assert np.abs(after - before).max() > 0.1, "the push must change the scores"
    assert_agree(bench, training, temperature=1.0)
    training.save_weights_and_get_sampling_client().result(600)
    # The base is restored exactly, after an adapter and after other full weights.
    np.testing.assert_array_equal(base_scores(bench, data), before)


def test_adapters_of_several_ranks_keep_apart(bench: Bench) -> None:
    data = image_data(bench)
    tenants = [bench.training(rank) for rank in (8, 32, 64)]
    for index, training in enumerate(tenants):
        losses(training, data[index : index + 1], 4, 1e-3)
    samplers: list[Any] = [training.save_weights_and_get_sampling_client().result(600) for training in tenants]
    together = [[sampler.compute_logprobs(one.model_input) for one in data] for sampler in samplers]
    for training, pending in zip(tenants, together, strict=True):
        outputs = training.forward(data, "cross_entropy").result(600).loss_fn_outputs
        for one, output, future in zip(data, outputs, pending, strict=True):
            assert kl(text_differences(one, output, future.result(600))) <= LARGEST_KL


def test_sampled_logprobs_at_another_temperature_are_the_trainers(bench: Bench) -> None:
    training = bench.training(32)
    losses(training, image_data(bench), 4, 1e-3)
    assert_agree(bench, training, temperature=0.7)


def test_a_datum_above_the_token_budget_trains(bench: Bench) -> None:
    rng = np.random.default_rng(4)
    length = MAX_TOKENS + 1024
    long = [datum(bench.prompt(rng, length - 1000), bench.tokens(rng, 1001))]
    assert long[0].model_input.length == length
    found = losses(bench.training(8), long, 4, 1e-3)
    assert found[-1] < found[0]


def test_a_repeated_step_gives_the_same_loss_packed_or_alone(bench: Bench) -> None:
    data = image_data(bench)
    training = bench.training(8)
    together = training.forward(data, "cross_entropy").result(600).loss_fn_outputs
    for one, output in zip(data, together, strict=True):
        alone = training.forward([one], "cross_entropy").result(600).loss_fn_outputs[0]
        difference = np.asarray(alone["logprobs"].data) - np.asarray(output["logprobs"].data)
        assert np.abs(difference).mean() <= 0.05
