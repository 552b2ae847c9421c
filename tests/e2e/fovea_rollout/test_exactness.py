"""Training data equals the sampled data: the same tokens, pictures and log-probabilities, and loss on nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import tinker
from transformers import PreTrainedTokenizerBase

from fovea_rollout import (
    ChatTemplate,
    Picture,
    RolloutSettings,
    SamplingSettings,
    Segment,
    TinkerPolicy,
    TrainingDatum,
    Trajectory,
    run_rollouts,
    training_datums,
)
from tests.e2e.fovea_rollout.environments import Looking, Walking
from tests.e2e.prompts import PromptBuilder
from tests.e2e.stack import Stack

ROLLOUTS = 50
TURNS = 3
TOLERANCE = 1e-3

STORIES = [
    f"<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\nThe {thing} is {colour} all over.<|im_end|>\n"
    for thing in ("house", "old cat", "sea", "long way home")
    for colour in ("red", "green", "pale blue")
]

Column = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def trained(
    stack: Stack, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[tinker.TrainingClient, tinker.SamplingClient]]:
    """A model that learned longer answers than the base gives, and its sampler."""
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=8, seed=3).result()
        data = [PromptBuilder(tokenizer).build(text).datum() for text in STORIES]
        for _ in range(16):
            training.forward_backward(data, "cross_entropy").result()
            training.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
        yield training, training.save_weights_and_get_sampling_client().result()


def sampled_positions(segment: Segment, lengths: dict[int, int]) -> list[int]:
    """Returns the datum position that predicts each sampled token."""
    positions, start = [], 0
    for index, chunk in enumerate(segment.chunks):
        length = lengths[index] if isinstance(chunk, Picture) else len(chunk.ids)
        if index in segment.sampled:
            positions += range(start - 1, start + length - 1)
        start += length
    return positions


def column(made: TrainingDatum, name: str) -> npt.NDArray:
    return made.datum.loss_fn_inputs[name].to_numpy()


async def check_masks(trajectory: Trajectory, made: Sequence[TrainingDatum], policy: TinkerPolicy) -> None:
    """Checks that the loss covers exactly the sampled tokens and that pictures are the sampled ones."""
    assert trajectory.prefix_breaks == 0
    assert len(made) == len(trajectory.segments) == 1
    (segment,), (one,) = trajectory.segments, made
    lengths = {i: await policy.token_count(c) for i, c in enumerate(segment.chunks) if isinstance(c, Picture)}
    positions = sampled_positions(segment, lengths)
    tokens = [token for turn in trajectory.turns for token in turn.sampled.ids]
    logprobs = [logprob for turn in trajectory.turns for logprob in turn.sampled.logprobs]
    assert np.flatnonzero(column(one, "advantages")).tolist() == positions
    assert column(one, "target_tokens")[positions].tolist() == tokens
    assert column(one, "logprobs")[positions].tolist() == np.array(logprobs, np.float32).tolist()
    for name in ("target_tokens", "logprobs"):
        assert not np.delete(column(one, name), positions).any()
    chunks = one.datum.model_input.chunks
    seen = [chunk.digest for chunk in trajectory.turns[-1].prompt if isinstance(chunk, Picture)]
    sent = [Picture(chunk.data, chunk.format).digest for chunk in chunks if chunk.type == "image"]
    assert list(one.pictures) == sent == seen
    assert one.turns == tuple(range(TURNS))


async def trainer_logprobs(
    training: tinker.TrainingClient, made: Sequence[TrainingDatum], temperature: float, vocabulary: int
) -> list[Column]:
    """Returns the log-probabilities of the targets at a temperature.

    The trainer's own are at T = 1, so for other temperatures those of all tokens are requested and rescaled.
    """
    if temperature == 1.0:
        answer = await training.forward([one.datum for one in made], "importance_sampling")
        assert answer.metrics["ratio:max"] == pytest.approx(1.0, abs=TOLERANCE)
        return [output["logprobs"].to_numpy() for output in answer.loss_fn_outputs]
    found: list[Column] = []
    parts = np.array_split(np.arange(vocabulary), 2)  # one request for all tokens of a datum would be too large
    for start in range(0, len(made), 10):
        some = made[start : start + 10]
        answers = [await training.forward([scoring(one, part) for one in some], "cross_entropy") for part in parts]
        for one, *outputs in zip(some, *(answer.loss_fn_outputs for answer in answers), strict=True):
            raw = [output["logprobs"].to_numpy().reshape(-1, len(p)) for output, p in zip(outputs, parts, strict=True)]
            scaled = np.concatenate(raw, axis=1).astype(np.float64) / temperature
            scaled -= np.logaddexp.reduce(scaled, axis=1, keepdims=True)
            found.append(scaled[np.arange(len(scaled)), column(one, "target_tokens")].astype(np.float32))
    return found


def scoring(made: TrainingDatum, tokens: npt.NDArray[np.int64]) -> tinker.Datum:
    """Returns a datum that requests the log-probabilities of these tokens at each position."""
    targets = np.tile(tokens, (made.datum.model_input.length, 1))
    inputs = {"target_tokens": targets, "weights": np.zeros(targets.shape, np.float32)}
    return tinker.Datum(
        model_input=made.datum.model_input,
        loss_fn_inputs={name: tinker.TensorData.from_numpy(value) for name, value in inputs.items()},
    )


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "temperature"), [(Looking, 0.7), (Walking, 1.0)])
async def test_fifty_rollouts_train_as_they_were_sampled(
    trained: tuple[tinker.TrainingClient, tinker.SamplingClient],
    tokenizer: PreTrainedTokenizerBase,
    pattern: type[Looking],
    temperature: float,
) -> None:
    training, sampling = trained
    policy = TinkerPolicy(sampling)
    settings = RolloutSettings(SamplingSettings(max_tokens=3, temperature=temperature, seed=11), max_turns=TURNS)
    factories = [lambda seed=seed: pattern(seed, TURNS) for seed in range(ROLLOUTS)]
    trajectories = await run_rollouts(policy, ChatTemplate(tokenizer), factories, settings, concurrency=64)
    assert [(t.end, t.failure) for t in trajectories] == [("done", None)] * ROLLOUTS
    assert {turn.answer.is_cut for t in trajectories for turn in t.turns} == {True, False}, (
        "both kinds of end must occur"
    )
    made = []
    for trajectory in trajectories:
        ones = await training_datums(trajectory, [1.0] * TURNS, policy)
        await check_masks(trajectory, ones, policy)
        made += ones
    assert len({one.pictures for one in made}) == ROLLOUTS
    scored = made if temperature == 1.0 else made[::3]  # requesting the logits of all tokens is slow
    scores = await trainer_logprobs(training, scored, temperature, len(tokenizer))
    differences = [
        np.abs(score - column(one, "logprobs"))[column(one, "advantages") != 0].max()
        for score, one in zip(scores, scored, strict=True)
    ]
    print(f"{pattern.__name__}, T = {temperature}: at most {max(differences):.1e} over {len(scored)} rollouts")
    assert max(differences) <= TOLERANCE
