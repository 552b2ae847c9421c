"""Section D: log-probabilities of the prompt, of chosen tokens in it, and of sampled tokens."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import tinker
from tinker import types

from fovea_conformance.agreement import (
    MAX_TOLERANCE,
    MEAN_TOLERANCE,
    PATIENCE_S,
    expect_agree,
    expect_moved,
    forward_scores,
    logprobs_of,
    prompt_scores,
    scored,
    train,
)
from fovea_conformance.check import check, expect, expect_close, may_refuse, user_error
from fovea_conformance.target import Target

_LENGTH = 16
_TOP = 20
_ONE = types.SamplingParams(max_tokens=1)

Row = list[tuple[int, float]]


@check("C64", "prompt_logprobs: length equals prompt, first None, absent when not requested")
def c64_prompt(target: Target) -> str:
    """Asks with 1 and 2 samples, and without samples."""
    sampler = target.sampler().result(PATIENCE_S)
    prompt = target.prompt(target.tokens(_LENGTH))
    first: list[float] = []
    for count in (1, 2):
        scores = scored(sampler.sample(prompt, count, _ONE, True).result(PATIENCE_S).prompt_logprobs)
        expect(len(scores) == _LENGTH - 1, f"{len(scores) + 1} prompt log-probabilities for {_LENGTH} tokens")
        expect(max(scores) <= 0, f"a prompt log-probability is {max(scores)}")
        first = first or scores
        expect_agree(scores, first, f"the prompt's log-probabilities with {count} samples")
    plain = sampler.sample(prompt, 1, _ONE).result(PATIENCE_S)
    expect(plain.prompt_logprobs is None, "prompt log-probabilities came without being requested")
    expect(plain.topk_prompt_logprobs is None, "alternatives came without being requested")
    expect(plain.sequences[0].topk_logprobs is None, "alternatives of samples came without being requested")
    return f"{_LENGTH} entries, the first None; none when not requested"


@check("C65", "compute_logprobs[1:] matches training forward logprobs within tolerance for base and tuned weights")
def c65_agreement(target: Target) -> str:
    """Compares a new adapter with the base model. Then takes two steps, and compares the saved weights."""
    service = target.service()
    training = target.training(service)
    texts = [target.tokens(25, seed) for seed in range(2)]
    data = [target.datum(24, seed) for seed in range(2)]
    base = target.sampler(service).result(PATIENCE_S)
    fresh = forward_scores(training, data)
    far = [_compare(base, texts, fresh, "base weights")]
    train(training, data)
    tuned = training.save_weights_and_get_sampling_client().result(PATIENCE_S)
    trained = forward_scores(training, data)
    expect_moved(fresh[0], trained[0], "the trainer's scores before and after two steps")
    far.append(_compare(tuned, texts, trained, "tuned weights"))
    return f"largest difference {far[0]:.1e} base, {far[1]:.1e} tuned"


def _compare(sampler: tinker.SamplingClient, texts: list[list[int]], wanted: list[list[float]], what: str) -> float:
    return max(
        expect_agree(prompt_scores(sampler, text), scores, what) for text, scores in zip(texts, wanted, strict=True)
    )


@check("C66", "prompt_logprobs_last_n: only the last n scored")
def c66_last_n(target: Target) -> str:
    """Asks for n of 1, 5 and all but one, with alternatives.

    An n out of range, or without prompt_logprobs, must fail with an error about it.
    """
    sampler = target.sampler().result(PATIENCE_S)
    prompt = target.prompt(target.tokens(_LENGTH))
    full = prompt_scores(sampler, prompt)
    for n in (1, 5, _LENGTH - 1):
        with may_refuse():
            answer = sampler.sample(
                prompt, 1, _ONE, True, topk_prompt_logprobs=2, prompt_logprobs_last_n=n
            ).result(PATIENCE_S)  # fmt: skip
        for name, values in (("logprobs", answer.prompt_logprobs), ("rows", answer.topk_prompt_logprobs)):
            there = [at for at, value in enumerate(values or []) if value is not None]
            expect(there == list(range(_LENGTH - n, _LENGTH)), f"last_n {n}: {name} at positions {there}")
        tail = [value for value in answer.prompt_logprobs or [] if value is not None]
        expect_agree(tail, full[-n:], f"the last {n}")
    with user_error("prompt_logprobs_last_n"):
        sampler.compute_logprobs(prompt, _LENGTH).result(PATIENCE_S)
    session = target.sampling_session(target.session())
    bad = target.submit_sample(session, 0, prompt_logprobs_last_n=2)["request_id"]
    error = target.collect(bad)
    named = error.get("category") == "user" and "prompt_logprobs" in str(error.get("error"))
    expect(named, f"prompt_logprobs_last_n without prompt_logprobs ends with {str(error)[:200]}")
    return f"n 1, 5 and {_LENGTH - 1} of {_LENGTH}; out of range and without prompt_logprobs fail"


@check("C67", "topk_prompt_logprobs 20: row 0 None, other rows 20 descending pairs, also without prompt logprobs")
def c67_alternatives(target: Target) -> str:
    """Asks in both ways.

    The prompt's own token must be in its row, with its own score, if and only if it is likely enough.
    """
    sampler = target.sampler().result(PATIENCE_S)
    tokens = target.tokens(_LENGTH)
    inside = 0
    for included in (True, False):
        answer = sampler.sample(target.prompt(tokens), 1, _ONE, included, _TOP).result(PATIENCE_S)
        expect((answer.prompt_logprobs is not None) == included, "prompt log-probabilities came unasked, or did not")
        rows = answer.topk_prompt_logprobs or []
        expect(len(rows) == _LENGTH, f"{len(rows)} rows for {_LENGTH} tokens")
        expect(rows[0] is None, f"row 0 is {rows[0]}")
        for row in rows[1:]:
            _expect_row(row, _TOP)
        if answer.prompt_logprobs is not None:
            inside = _expect_own(tokens[1:], scored(answer.prompt_logprobs), [row or [] for row in rows[1:]])
    return f"{_LENGTH - 1} rows of {_TOP} each way; {inside} prompt tokens are among them, with their own scores"


def _expect_row(row: Row | None, count: int) -> None:
    expect(row is not None and len(row) == count, f"a row has {len(row or [])} pairs, expected {count}")
    pairs = row or []
    expect(len({token for token, _ in pairs}) == count, f"a row repeats a token: {pairs}")
    falling = all(one >= two for (_, one), (_, two) in pairwise(pairs))
    expect(falling, f"a row is not descending: {[round(logprob, 3) for _, logprob in pairs]}")
    total = sum(np.exp(logprob) for _, logprob in pairs)
    expect(total <= 1.001, f"a row's probabilities add up to {total:.4f}")


def _expect_own(tokens: Sequence[int], scores: Sequence[float], rows: Sequence[Row]) -> int:
    """Compares the score of each token with its row; returns how many tokens are in their rows."""
    inside = 0
    for token, score, row in zip(tokens, scores, rows, strict=True):
        found = dict(row).get(token)
        likely, least = score - row[-1][1], row[-1][1]
        if found is None:
            expect(likely <= MAX_TOLERANCE, f"token {token} scores {score:.3f}, more than its row's last {least:.3f}")
        else:
            inside += 1
            expect_close(found, score, MEAN_TOLERANCE, f"the score of token {token} in its row")
    return inside


@check("C68", "topk_sample_logprobs: one row per generated token")
def c68_sampled(target: Target) -> str:
    """Draws two samples of 8 tokens with 5 alternatives.

    At temperature 1 a sampled token must have the score in its row.
    """
    sampler = target.sampler().result(PATIENCE_S)
    given = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[])
    answer = sampler.sample(target.prompt(), 2, given, topk_sample_logprobs=5).result(PATIENCE_S)
    for sequence in answer.sequences:
        rows = sequence.topk_logprobs or []
        expect(len(rows) == len(sequence.tokens), f"{len(rows)} rows for {len(sequence.tokens)} tokens")
        for row in rows:
            _expect_row(row, 5)
        _expect_own(sequence.tokens, logprobs_of(sequence), [row or [] for row in rows])
    greedy = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    sequence = sampler.sample(target.prompt(), 1, greedy, topk_sample_logprobs=5).result(PATIENCE_S).sequences[0]
    firsts = [row[0][1] if row else 0.0 for row in sequence.topk_logprobs or []]
    expect_agree(logprobs_of(sequence), firsts, "greedy tokens and the first of their rows")
    return "24 rows of 5, descending, that hold the drawn tokens' own scores"


@check("C69", "target_prompt_logprobs dense: values equal compute_logprobs for actual tokens, 0.0 where -1")
def c69_dense(target: Target) -> str:
    """Scores columns of the actual tokens, of the likeliest ones and of -1, with some rows of only -1.

    Bad shapes must fail with an error about them.
    """
    sampler = target.sampler().result(PATIENCE_S)
    tokens, actual, best, best_scores = _known(target, sampler)
    ids = np.stack([np.asarray(tokens[1:]), np.asarray(best), np.full(_LENGTH - 1, -1)], axis=1).astype(np.int64)
    ids[3] = -1
    with may_refuse():
        found = _score(sampler, tokens, types.TensorData.from_numpy(ids))
    expect(found.sparse_crow_indices is None, "a dense request was answered with CSR")
    expect(found.shape == [_LENGTH - 1, 3] and found.dtype == "float32", f"shape {found.shape}, {found.dtype}")
    values = found.to_numpy()
    expect(bool((values[ids < 0] == 0).all()), f"skipped cells hold {values[ids < 0]}")
    kept = [row for row in range(_LENGTH - 1) if row != 3]
    far = expect_agree(values[kept, 0].tolist(), [actual[row] for row in kept], "the actual tokens")
    expect_agree(values[kept, 1].tolist(), [best_scores[row] for row in kept], "the likeliest tokens")
    for bad in (ids[:-1], np.full_like(ids, -1), np.where(ids < 0, 2**31 - 2, ids)):
        with user_error("target"):
            _score(sampler, tokens, types.TensorData.from_numpy(bad))
    return f"{2 * len(kept)} cells, {far:.1e} from compute_logprobs; 3 bad tables fail"


@check("C70", "target_prompt_logprobs sparse: response keeps the CSR indices")
def c70_sparse(target: Target) -> str:
    """Compares a table of 100 columns with dense scoring. A row has 0, 1 or 2 ids (also token 0 and a listed -1)."""
    sampler = target.sampler().result(PATIENCE_S)
    tokens, actual, best, _ = _known(target, sampler)
    crow, columns, ids = [0], [], []
    for row in range(_LENGTH - 1):
        cells = [] if row % 5 == 2 else [(row, tokens[row + 1]), (99, (best[row], 0, -1)[row % 3])][: 1 + row % 2]
        columns += [column for column, _ in cells]
        ids += [token for _, token in cells]
        crow.append(len(ids))
    asked = types.TensorData(ids, "int64", [_LENGTH - 1, 100], crow, columns)
    with may_refuse():
        found = _score(sampler, tokens, asked)
    expect(found.sparse_crow_indices == crow, f"row pointers {found.sparse_crow_indices}, expected {crow}")
    expect(found.sparse_col_indices == columns, f"columns {found.sparse_col_indices}, expected {columns}")
    expect(found.shape == [_LENGTH - 1, 100], f"shape {found.shape}")
    dense = np.full((_LENGTH - 1, 2), -1, np.int64)
    for row, (start, end) in enumerate(pairwise(crow)):
        dense[row, : end - start] = ids[start:end]
    wanted = _score(sampler, tokens, types.TensorData.from_numpy(dense)).to_numpy()
    flat = [float(wanted[row, cell]) for row in range(_LENGTH - 1) for cell in range(crow[row + 1] - crow[row])]
    far = expect_agree([float(value) for value in found.data], flat, "sparse and dense scoring")
    own = [start for start, end in pairwise(crow) if end > start]
    rows = [row for row in range(_LENGTH - 1) if crow[row + 1] > crow[row]]
    expect_agree([float(found.data[at]) for at in own], [actual[row] for row in rows], "the actual tokens")
    return f"{len(ids)} cells in 100 columns keep their indices, {far:.1e} from dense"


@check("C71", "prompt_alt_tokens_k 4: two [len-1, 4] tensors, logprobs consistent with target scoring")
def c71_drawn(target: Target) -> str:
    """Scores sampled tokens as targets.

    Samples at temperature 1 must vary, and those at 0 must be the likeliest tokens.
    """
    sampler = target.sampler().result(PATIENCE_S)
    tokens, actual, best, _ = _known(target, sampler)
    with may_refuse():
        drawn, logprobs = _alternatives(sampler, tokens, 1.0)
    scores = _score(sampler, tokens, types.TensorData.from_numpy(drawn)).to_numpy()
    far = expect_agree(logprobs.ravel().tolist(), scores.ravel().tolist(), "drawn tokens and the same as targets")
    different = sum(len(set(row)) > 1 for row in drawn.tolist())
    certain = sum(score > -0.1 for score in actual)
    expect(different > 0 or certain == len(actual), "every row repeats one draw")
    likeliest, their_scores = _alternatives(sampler, tokens, 0.0)
    wanted = _score(sampler, tokens, types.TensorData.from_numpy(np.asarray(best, np.int64)[:, None])).to_numpy()
    expect(bool((likeliest == likeliest[:, :1]).all()), "the draws of a row differ at temperature 0")
    expect_agree(their_scores[:, 0].tolist(), wanted[:, 0].tolist(), "draws at temperature 0 and the likeliest tokens")
    return f"{drawn.size} draws, {far:.1e} from target scoring; {different} rows vary, none at temperature 0"


def _alternatives(
    sampler: tinker.SamplingClient, tokens: list[int], temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    given = types.SamplingParams(max_tokens=1, temperature=temperature, seed=3)
    prompt = types.ModelInput.from_ints(tokens)
    found = sampler.sample(prompt, 1, given, prompt_alt_tokens_k=4).result(PATIENCE_S).prompt_alt_tokens
    assert found is not None  # the SDK raises otherwise
    for name, one in (("tokens", found.tokens), ("logprobs", found.logprobs)):
        expect(one.sparse_crow_indices is None, f"{name} are sparse")
        expect(one.shape == [_LENGTH - 1, 4], f"{name} have the shape {one.shape}")
    return found.tokens.to_numpy().astype(np.int64), found.logprobs.to_numpy()


class _Known(NamedTuple):
    """A prompt, the scores of its tokens after the first, and the likeliest tokens there with their scores."""

    tokens: list[int]
    actual: list[float]
    best: list[int]
    best_scores: list[float]


def _known(target: Target, sampler: tinker.SamplingClient) -> _Known:
    tokens = target.tokens(_LENGTH)
    answer = sampler.sample(target.prompt(tokens), 1, _ONE, True, 2).result(PATIENCE_S)
    rows = [row[0] if row else (0, 0.0) for row in (answer.topk_prompt_logprobs or [])[1:]]
    actual = scored(answer.prompt_logprobs)
    expect(len(rows) == len(actual) == _LENGTH - 1, f"{len(actual)} scores and {len(rows)} rows for {_LENGTH} tokens")
    return _Known(tokens, actual, [token for token, _ in rows], [logprob for _, logprob in rows])


def _score(sampler: tinker.SamplingClient, tokens: list[int], ids: types.TensorData) -> types.TensorData:
    """Returns the log-probabilities of chosen tokens at the prompt's positions."""
    prompt = types.ModelInput.from_ints(tokens)
    answer = sampler.sample(prompt, 1, _ONE, target_prompt_logprobs=ids).result(PATIENCE_S)
    expect(answer.target_prompt_logprobs is not None, "target_prompt_logprobs was ignored")
    assert answer.target_prompt_logprobs is not None
    return answer.target_prompt_logprobs
