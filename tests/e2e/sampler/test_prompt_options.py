"""Target tokens, drawn alternatives and the last n log-probabilities of a prompt equal the model's."""

import asyncio
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from fovea.api.v1 import sampler_pb2
from fovea.client.inference import SamplerClient
from fovea.wire import tensors
from tests.e2e.sampler.asking import Answer, ask, rendered, request_for
from tests.e2e.sampler.conftest import Prompt, PromptMaker, picture
from tests.e2e.sampler.process import SamplerProcess
from tests.e2e.sampler.reference import Reference, random_adapter
from tests.e2e.sampler.sender import Sender
from tests.waiting import eventually

TOLERANCE = 1e-3
FILLER = -99999.0


def image_prompt(prompts: PromptMaker) -> Prompt:
    """Returns text, an image and text."""
    return prompts.make("Look at this: ", picture(1), " What do you see?")


def ragged(length: int, seed: int, vocabulary: int) -> list[list[int]]:
    """Returns up to four ids per row; some rows are empty."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocabulary, generator.integers(0, 5)).tolist() for _ in range(length - 1)]


def picked(table: npt.NDArray[np.float32], rows: list[list[int]]) -> npt.NDArray[np.float32]:
    """Returns the cells of a table that target rows refer to."""
    return np.asarray([table[i, token] for i, row in enumerate(rows) for token in row], dtype=np.float32)


def drawn(table: npt.NDArray[np.float32], ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Returns the cells of a table that draws refer to."""
    return np.take_along_axis(table[: len(ids)], ids, 1)


def off_by(answer: Answer, table: npt.NDArray[np.float32], rows: list[list[int]]) -> float:
    """Returns the largest difference of the target log-probabilities."""
    assert answer.target_logprobs is not None
    wanted = picked(table, rows)
    assert answer.target_logprobs.shape == wanted.shape
    return float(np.abs(answer.target_logprobs - wanted).max())


@pytest.mark.parametrize("listed", [False, True])
async def test_targets_follow_the_whole_vocabulary(
    client: SamplerClient, prompts: PromptMaker, reference: Reference, listed: bool
) -> None:
    """At temperature 1 for any request, with the other prompt options or without."""
    for prompt in (image_prompt(prompts), prompts.make("Text alone is the same path.")):
        table = reference.table(prompt.tokens, prompt.images)
        rows = ragged(len(prompt.tokens), 1, table.shape[1])
        rows[3] = [*range(40), 7, 7]  # more than any row of alternatives, and one id twice
        options = {"prompt_logprobs": True, "top_prompt_logprobs": 5, "alt_token_count": 2} if listed else {}
        answer = await ask(
            client,
            request_for(prompt.wire, target_rows=rows, max_tokens=2, temperature=0.5, sample_count=3, **options),
        )
        assert off_by(answer, table, rows) < TOLERANCE
        assert (answer.prompt_top is not None) is listed
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs.size == (len(prompt.tokens) if listed else 0)
        if listed:
            assert np.abs(answer.prompt_logprobs - reference.prompt_logprobs(prompt.tokens, prompt.images))[
                1:
            ].max() < (TOLERANCE)


async def test_actual_tokens_as_targets_equal_the_prompt_logprobs(client: SamplerClient, prompts: PromptMaker) -> None:
    prompt = image_prompt(prompts)
    rows = [[token] for token in prompt.tokens[1:].tolist()]
    scored = await ask(client, request_for(prompt.wire, prompt_logprobs=True, max_tokens=1))
    targets = await ask(client, request_for(prompt.wire, target_rows=rows, max_tokens=1))
    assert scored.prompt_logprobs is not None
    assert targets.target_logprobs is not None
    assert np.abs(scored.prompt_logprobs[1:] - targets.target_logprobs).max() < 1e-5


async def test_a_prompt_of_several_steps_in_a_mixed_batch(
    client: SamplerClient, prompts: PromptMaker, reference: Reference
) -> None:
    """A step has at most 2,048 tokens: long prompts are split at places that depend on the rest of the batch."""
    tokens = prompts.make("A prompt of several steps. " * 1200).tokens[:4600]
    wires = [rendered([tokens.tolist()]), rendered([tokens[:2049].tolist()]), rendered([tokens[:2048].tolist()])]
    table = reference.table(tokens)
    rows = ragged(len(tokens), 3, table.shape[1])
    options = {"alt_token_count": 2, "seed": 4, "max_tokens": 4, "prompt_logprobs": True, "top_prompt_logprobs": 1}
    lengths = [4600, 2049, 2048]
    requests = [
        request_for(wire, target_rows=rows[: length - 1], **options)
        for wire, length in zip(wires, lengths, strict=True)
    ]
    others = [request_for(prompts.make(f"Between {i}").wire, max_tokens=30, sample_count=2) for i in range(6)]
    answers = (await asyncio.gather(*(ask(client, request) for request in [*others, *requests])))[len(others) :]
    for request, length, answer in zip(requests, lengths, answers, strict=True):
        assert off_by(answer, table, rows[: length - 1]) < TOLERANCE
        assert answer.prompt_logprobs is not None
        assert np.abs(answer.prompt_logprobs[1:] - table[np.arange(length - 1), tokens[1:length]]).max() < TOLERANCE
        assert answer.alt_ids is not None
        assert answer.alt_logprobs is not None
        assert np.abs(answer.alt_logprobs - drawn(table, answer.alt_ids)).max() < TOLERANCE
        # The whole prompt is cached by now but scored again, with the same draws.
        again = await ask(client, request)
        assert again.cached_token_count == 0
        assert off_by(again, table, rows[: length - 1]) < TOLERANCE
        assert again.alt_ids is not None
        # A draw may change where float32 rounding crosses a boundary; two such places are already unusual.
        assert np.count_nonzero(again.alt_ids != answer.alt_ids) <= 2
        unscored = await ask(client, request_for(request.prompt, max_tokens=1))
        assert unscored.cached_token_count > length // 2


async def test_targets_and_draws_of_adapters_and_base_in_one_batch(
    client: SamplerClient, prompts: PromptMaker, reference: Reference, model: Path
) -> None:
    """The unembedding is adapted too, so that rows under a wrong adapter would show."""
    adapters = {
        "to-a@1": (random_adapter(reference, 8, seed=1), 8),
        "to-b@1": (random_adapter(reference, 4, seed=2), 4),
    }
    sender = await Sender(client).join()
    references = {"": reference}
    for snapshot_id, (adapter, rank) in adapters.items():
        await sender.push(snapshot_id, adapter, rank)
        references[snapshot_id] = Reference(model).merge(adapter, rank)
    plain = prompts.make("Adapters change every distribution of a prompt.")
    pairs = [(snapshot_id, prompt) for prompt in (image_prompt(prompts), plain) for snapshot_id in references]
    tables = [references[snapshot_id].table(prompt.tokens, prompt.images) for snapshot_id, prompt in pairs]
    rows = ragged(300, 5, tables[0].shape[1])
    answers = await asyncio.gather(
        *(
            ask(
                client,
                request_for(
                    prompt.wire,
                    snapshot_id,
                    target_rows=rows[: len(prompt.tokens) - 1],
                    alt_token_count=3,
                    sample_count=2,
                    max_tokens=6,
                ),
            )
            for snapshot_id, prompt in pairs
        )
    )
    for (snapshot_id, prompt), table, answer in zip(pairs, tables, answers, strict=True):
        assert off_by(answer, table, rows[: len(prompt.tokens) - 1]) < TOLERANCE, snapshot_id
        assert answer.alt_ids is not None
        assert np.abs(answer.alt_logprobs - drawn(table, answer.alt_ids)).max() < TOLERANCE, snapshot_id
    base = picked(tables[0], rows[: len(pairs[0][1].tokens) - 1])
    assert np.abs(base - picked(tables[1], rows[: len(pairs[0][1].tokens) - 1])).max() > 0.05, (
        "they must change the scores"
    )
    for snapshot_id in adapters:
        await client.drop_snapshot(snapshot_id)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
async def test_alternatives_are_drawn_at_the_temperature(
    client: SamplerClient, prompts: PromptMaker, reference: Reference, temperature: float
) -> None:
    """The mean of log p(drawn) matches the distribution at this temperature; top-k and top-p do not truncate."""
    prompt = image_prompt(prompts)
    cold = reference.table(prompt.tokens, prompt.images)[:-1].astype(np.float64)
    scaled = reference.table(prompt.tokens, prompt.images, temperature)[:-1].astype(np.float64)
    mass = np.exp(scaled)
    mean = (mass * cold).sum(-1)
    spread = (mass * (cold - mean[:, None]) ** 2).sum(-1)
    k = 64
    answer = await ask(
        client,
        request_for(prompt.wire, alt_token_count=k, temperature=temperature, top_k=1, top_p=0.1, seed=9, max_tokens=1),
    )
    assert answer.alt_ids is not None
    assert answer.alt_logprobs is not None
    assert answer.alt_ids.shape == answer.alt_logprobs.shape == (len(prompt.tokens) - 1, k)
    assert np.abs(answer.alt_logprobs - drawn(cold, answer.alt_ids)).max() < TOLERANCE
    error = answer.alt_logprobs.mean() - mean.mean()
    assert abs(error) < 5 * np.sqrt(spread.sum() / k) / len(mean) + TOLERANCE


async def test_alternatives_are_repeatable_with_a_seed_alone(client: SamplerClient, prompts: PromptMaker) -> None:
    prompt = image_prompt(prompts).wire
    ids = [
        (await ask(client, request_for(prompt, alt_token_count=8, max_tokens=1, **seed))).alt_ids
        for seed in ({"seed": -5}, {"seed": -5}, {"seed": 6}, {}, {})
    ]
    assert all(each is not None for each in ids)
    assert np.array_equal(ids[0], ids[1])
    for i, j in ((0, 2), (2, 3), (3, 4)):
        assert not np.array_equal(ids[i], ids[j])


async def test_alternatives_at_temperature_0_are_the_greedy_token(
    client: SamplerClient, prompts: PromptMaker, reference: Reference
) -> None:
    prompt = image_prompt(prompts)
    answer = await ask(client, request_for(prompt.wire, alt_token_count=3, temperature=0.0, max_tokens=1))
    best = reference.table(prompt.tokens, prompt.images)[:-1].argmax(-1)
    assert answer.alt_ids is not None
    assert answer.alt_ids.tolist() == [[token] * 3 for token in best.tolist()]


@pytest.mark.parametrize("last_n", [1, 4, -1])
async def test_only_the_last_n_are_scored(
    client: SamplerClient, prompts: PromptMaker, reference: Reference, last_n: int
) -> None:
    """Targets and alternatives are not affected. -1 means all."""
    prompt = image_prompt(prompts)
    length = len(prompt.tokens)
    last_n = last_n if last_n > 0 else length - 1
    table = reference.table(prompt.tokens, prompt.images)
    rows = ragged(length, 6, table.shape[1])
    answer = await ask(
        client,
        request_for(
            prompt.wire,
            prompt_logprobs=True,
            top_prompt_logprobs=3,
            prompt_logprobs_last_n=last_n,
            target_rows=rows,
            alt_token_count=1,
            max_tokens=1,
        ),
    )
    assert answer.prompt_logprobs is not None
    assert answer.prompt_top is not None
    expected = reference.prompt_logprobs(prompt.tokens, prompt.images)
    assert np.isnan(answer.prompt_logprobs[:-last_n]).all()
    assert np.abs(answer.prompt_logprobs - expected)[-last_n:].max() < TOLERANCE
    ids, logprobs = tensors.decode(answer.prompt_top.token_ids), tensors.decode(answer.prompt_top.logprobs)
    assert ids.shape == logprobs.shape == (length, 3)
    assert not ids[:-last_n].any()
    assert (logprobs[:-last_n] == FILLER).all()
    best = np.sort(table[:-1], axis=-1)[:, ::-1][:, :3]
    assert np.abs(logprobs[-last_n:] - best[-last_n:]).max() < TOLERANCE
    assert (np.diff(logprobs[-last_n:], axis=-1) <= 0).all()
    assert off_by(answer, table, rows) < TOLERANCE
    assert answer.alt_ids is not None
    assert answer.alt_ids.shape == (length - 1, 1)


async def test_results_that_were_not_requested_are_absent(client: SamplerClient, prompts: PromptMaker) -> None:
    answer = await ask(client, request_for(image_prompt(prompts).wire, max_tokens=2))
    assert answer.prompt_logprobs is not None
    assert answer.target_logprobs is not None
    assert not answer.prompt_logprobs.size
    assert not answer.target_logprobs.size
    assert answer.prompt_top is None
    assert answer.alt_ids is None
    assert answer.sequences[0].logprobs
    assert not answer.sequences[0].top_ids


async def test_a_prompt_of_one_token(client: SamplerClient) -> None:
    request = request_for(
        rendered([[7]]), prompt_logprobs=True, top_prompt_logprobs=2, alt_token_count=3, max_tokens=2, temperature=0.0
    )
    answer = await ask(client, request)
    assert answer.prompt_logprobs is not None
    assert np.isnan(answer.prompt_logprobs).tolist() == [True]
    assert answer.alt_ids is not None
    assert answer.alt_ids.shape == (0, 3)
    assert len(answer.sequences[0].tokens) == 2


async def test_a_cancelled_scoring_does_not_affect_others(
    client: SamplerClient, sampler: SamplerProcess, prompts: PromptMaker
) -> None:
    tokens = prompts.make("Cancelled in the middle of its prompt. " * 1200).tokens[:8000].tolist()
    stop = sampler_pb2.StopCondition(ignore_eos=True)
    long = request_for(rendered([tokens]), alt_token_count=8, prompt_logprobs=True, max_tokens=2, stop=stop)
    tasks = [asyncio.create_task(ask(client, long)) for _ in range(3)]
    await eventually(lambda: sampler.metric("vllm:num_requests_running") > 0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    prompt = image_prompt(prompts)
    answer = await ask(client, request_for(prompt.wire, alt_token_count=2, max_tokens=1))
    assert answer.alt_ids is not None
    assert answer.alt_ids.shape == (len(prompt.tokens) - 1, 2)
