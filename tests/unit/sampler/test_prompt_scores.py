"""The workers' prompt scores against the plain definition, for any chunks."""

from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fovea.api.v1 import sampler_pb2
from fovea_sampler.engine_api import SampleSpec, TargetRows
from fovea_sampler.vllm_patches.prompt_scorer import PromptScores, ScorePlan, Scores

VOCABULARY = 11


def logits_of(row_count: int, seed: int = 0) -> torch.Tensor:
    """Returns random logits, float32 [rows, vocabulary]."""
    return torch.randn(row_count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def spec_of(
    prompt: list[int], rows: list[list[int]] | None = None, temperature: float = 1.0, **options: int | bool
) -> SampleSpec:
    """Returns a request for scores."""
    targets = None
    if rows is not None:
        ids = np.asarray([token for row in rows for token in row], dtype=np.int32)
        targets = TargetRows(ids, np.cumsum([0, *(len(row) for row in rows)]))
    request = sampler_pb2.SampleRequest(sample_count=1, **options)  # type: ignore[arg-type]
    params = sampler_pb2.SamplingParams(max_tokens=1, temperature=temperature)
    return SampleSpec(request, params, np.asarray(prompt, np.int32), targets=targets)


def run(spec: SampleSpec, logits: torch.Tensor, cuts: list[int], block: int = 3, seed: int = 5) -> Scores:
    """Returns scores in chunks that end at `cuts`, via the wire, with blocks of rows as the runner makes them."""
    plan = ScorePlan.of(spec, seed)
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(plan.to_message()))
    scores = PromptScores(ScorePlan.from_message(message), spec.tokens.tolist())
    edges = [0, *cuts, len(spec.tokens)]
    for start, end in pairwise(edges):
        rows = scores.wanted(start, end)
        for first in range(0, len(rows), block):
            scores.add(rows[first : first + block], logits[rows[first : first + block]])
    return Scores.unpack(plan, scores.packed().numpy())


def expected(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    """Returns log-softmax computed in float64."""
    return logits.double().log_softmax(-1).float().numpy()


@given(data=st.data(), length=st.integers(2, 12))
def test_every_option_at_once_in_any_chunks(data: st.DataObject, length: int) -> None:
    ids = st.integers(0, VOCABULARY - 1)
    prompt = data.draw(st.lists(ids, min_size=length, max_size=length))
    rows = data.draw(st.lists(st.lists(ids, max_size=4), min_size=length - 1, max_size=length - 1))
    last_n = data.draw(st.integers(0, length - 1))
    cuts = sorted(data.draw(st.lists(st.integers(1, length), max_size=3)))
    listed = data.draw(st.booleans())
    alt = data.draw(st.integers(0, 2))
    spec = spec_of(
        prompt, rows, prompt_logprobs=listed, top_prompt_logprobs=2 * listed, prompt_logprobs_last_n=last_n * listed,
        alt_token_count=alt,
    )  # fmt: skip
    logits = logits_of(length - 1)
    table = expected(logits)
    scores = run(spec, logits, cuts)
    first = length - 1 - (last_n or length - 1) if listed else length - 1
    every = np.arange(length - 1)
    np.testing.assert_allclose(scores.actual, table[every, prompt[1:]][first:], atol=1e-6)
    assert scores.top.token_ids.tolist() == np.argsort(-table, axis=-1)[first:, : 2 * listed].tolist()
    np.testing.assert_allclose(scores.top.logprobs, -np.sort(-table, axis=-1)[first:, : 2 * listed], atol=1e-6)
    np.testing.assert_allclose(scores.targets, [table[i, t] for i, row in enumerate(rows) for t in row], atol=1e-6)
    assert scores.alt.token_ids.shape == (length - 1, alt)
    np.testing.assert_allclose(scores.alt.logprobs, np.take_along_axis(table, scores.alt.token_ids, 1), atol=1e-6)
    assert scores.alt.token_ids.tolist() == run(spec, logits, [], block=99).alt.token_ids.tolist()


def test_a_chunk_computed_again_after_a_preemption() -> None:
    spec = spec_of([1, 2, 3, 4], [[1], [], [2, 3]], prompt_logprobs=True, alt_token_count=2)
    plan, logits = ScorePlan.of(spec, 5), logits_of(3)
    scores = PromptScores(plan, spec.tokens.tolist())
    scores.add(scores.wanted(0, 2), logits_of(2, seed=9))
    scores.add(scores.wanted(0, 4), logits)
    again, once = Scores.unpack(plan, scores.packed().numpy()), run(spec, logits, [])
    assert again.actual.tolist() == once.actual.tolist()
    assert again.targets.tolist() == once.targets.tolist()
    assert again.alt.token_ids.tolist() == once.alt.token_ids.tolist()


def test_only_wanted_rows_need_logits() -> None:
    prompt = [1] * 10
    rows: list[list[int]] = [[] for _ in range(9)]
    rows[4] = [7]
    plan = ScorePlan.of(spec_of(prompt, rows, prompt_logprobs=True, prompt_logprobs_last_n=2), 0)
    scores = PromptScores(plan, prompt)
    assert scores.wanted(0, 10).tolist() == [4, 7, 8]
    assert scores.wanted(0, 4).size == 0
    assert PromptScores(ScorePlan.of(spec_of(prompt, alt_token_count=1), 0), prompt).wanted(3, 99).tolist() == [
        *range(3, 9)
    ]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution_at_the_temperature(temperature: float) -> None:
    """A chi-squared statistic of 3000 draws at each of 4 positions, with 10 degrees of freedom each."""
    count = 3000
    spec = spec_of([0] * 5, temperature=temperature, alt_token_count=count)
    logits = logits_of(4)
    drawn = run(spec, logits, [2], seed=1).alt.token_ids
    masses = (logits.double() / temperature).softmax(-1).numpy()
    for row, mass in zip(drawn, masses, strict=True):
        seen = np.bincount(row, minlength=VOCABULARY)
        # Rare tokens are merged, because the statistic needs at least a few expected draws.
        rare = mass * count < 5
        seen_all = np.append(seen[~rare], seen[rare].sum())
        wanted = np.append(mass[~rare], mass[rare].sum()) * count
        statistic = ((seen_all - wanted) ** 2 / np.maximum(wanted, 1e-9))[wanted > 0].sum()
        assert statistic < 35, "far beyond the 99.9th percentile, 29.6"


def test_seeds_and_the_greedy_temperature() -> None:
    logits = logits_of(4)
    spec = spec_of([0] * 5, alt_token_count=50)
    same, other = run(spec, logits, [], seed=2**63 - 1), run(spec, logits, [], seed=2**31 - 1)
    assert same.alt.token_ids.tolist() == run(spec, logits, [3], seed=2**63 - 1).alt.token_ids.tolist()
    assert same.alt.token_ids.tolist() != other.alt.token_ids.tolist()
    greedy = run(spec_of([0] * 5, temperature=0.0, alt_token_count=3), logits, [])
    assert greedy.alt.token_ids.tolist() == logits.argmax(-1, keepdim=True).expand(-1, 3).tolist()


def test_draws_at_the_edges_of_the_distribution() -> None:
    """Tokens without mass are never drawn, not even with the largest number below 1."""
    spec = spec_of([0, 0], alt_token_count=2)
    scores = PromptScores(ScorePlan.of(spec, 0), [0, 0])
    scores._uniform[:] = [[0.0, np.nextafter(1.0, 0.0)]]
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, 3:6] = torch.tensor([0.1, 0.2, 0.3])
    scores.add(np.asarray([0]), logits)
    assert scores._alt_ids.tolist() == [[3, 5]]


def test_a_prompt_of_one_token_has_no_rows() -> None:
    spec = spec_of([4], prompt_logprobs=True, top_prompt_logprobs=2, alt_token_count=3)
    scores = run(spec, logits_of(0), [])
    assert scores.actual.shape == (0,)
    assert scores.alt.token_ids.shape == (0, 3)
    # vLLM cannot send an empty tensor.
    assert PromptScores(ScorePlan.of(spec, 0), [4]).packed().numel() == 1


def test_scores_of_another_plan() -> None:
    plan = ScorePlan.of(spec_of([1, 2, 3], prompt_logprobs=True), 0)
    with pytest.raises(ValueError, match="instead of"):
        Scores.unpack(plan, np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="instead of"):
        Scores.unpack(plan, np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="instead of"):
        Scores.unpack(plan, np.zeros(3, np.float32))
