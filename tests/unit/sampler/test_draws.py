"""A draw reports log-probabilities before and after truncation, and the remaining tokens."""

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from fovea.wire.tensors import FULL_ROW, MOST_SUPPORT, unpack_support
from fovea_sampler.vllm_patches.draws import DrawLogprobs, StepSupports

ROWS = 4


def min_p_of(*values: float) -> Any:
    """Applies vLLM's own min-p processor to a batch of requests."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=ROWS))
    processor = MinPLogitsProcessor(config, torch.device("cpu"), False)
    added: list[Any] = [(row, SimpleNamespace(min_p=value), None, []) for row, value in enumerate(values)]
    processor.update_state(SimpleNamespace(added=added, removed=[], moved=[], batch_size=ROWS))
    return processor


def draw(
    vocabulary: int, recorded: list[int], k: list[int] | None = None, p: list[float] | None = None,
    min_p: tuple[float, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, DrawLogprobs]:  # fmt: skip
    """Returns logits, tokens, log-probabilities and the sampler."""
    logits = 2 * torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(1))
    sampler = DrawLogprobs(TopKTopPSampler("processed_logprobs"), [min_p_of(*min_p)] if min_p else [])
    sampler.record(recorded)
    tokens, logprobs = sampler(
        logits.clone(), {}, None if k is None else torch.tensor(k), None if p is None else torch.tensor(p)
    )
    assert logprobs is not None
    return logits, tokens, logprobs, sampler


def rows_of(sampler: DrawLogprobs, recorded: list[int]) -> list[list[int]]:
    """Returns the recorded rows after their transfer between processes."""
    step = pickle.loads(pickle.dumps(StepSupports(recorded, recorded, sampler.supports)))
    found = []
    for index in recorded:
        ids, offsets = unpack_support(step.slice_request(index, 1).token_ids.tobytes(), "row")
        assert len(offsets) == 2
        found.append(ids.tolist())
    return found


@pytest.mark.parametrize(
    "cuts",
    [
        {"k": [3, 500, 7, 1]},
        {"p": [0.5, 1.0, 0.9, 0.1]},
        {"min_p": (0.2, 0.0, 0.5, 1.0)},
        {"k": [50] * 4, "p": [0.9] * 4, "min_p": (0.05,) * 4},
    ],
)
def test_rows_that_ask_are_renormalised_over_what_was_left(cuts: dict[str, Any]) -> None:
    recorded = [0, 2, 3]
    logits, tokens, logprobs, sampler = draw(500, recorded, **cuts)
    whole = logits.log_softmax(-1)
    torch.testing.assert_close(logprobs[1], whole[1])
    for row, ids in zip(recorded, rows_of(sampler, recorded), strict=True):
        assert int(tokens[row]) in ids
        assert ids == torch.isfinite(logprobs[row]).nonzero()[:, 0].tolist()
        torch.testing.assert_close(logprobs[row, ids], logits[row, ids].log_softmax(-1))
        assert whole[row, ids].min() >= whole[row].sort().values[-len(ids)], "the most likely ones must remain"
    if "k" in cuts and len(cuts) == 1:
        assert [len(ids) for ids in rows_of(sampler, recorded)] == [3, 7, 1]


def test_nothing_changes_if_no_row_asks() -> None:
    logits, _, logprobs, sampler = draw(500, [], k=[3] * 4, min_p=(0.5,) * 4)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1))
    assert sampler.supports is None


def test_a_row_with_everything_or_too_much_left_is_full() -> None:
    logits, _, logprobs, sampler = draw(3000, [0, 1, 2, 3], k=[3000, MOST_SUPPORT, MOST_SUPPORT + 1, 5])
    assert [len(ids) for ids in rows_of(sampler, [0, 1, 2, 3])] == [0, MOST_SUPPORT, 0, 5]
    torch.testing.assert_close(logprobs[[0, 2]], logits.log_softmax(-1)[[0, 2]])


def test_a_step_returns_rows_of_those_that_ask_alone() -> None:
    step = StepSupports([0, 2], [2], (torch.tensor([[4, 9, 77]], dtype=torch.int32), torch.tensor([2])))
    assert step.slice_request(1, 1) is None
    greedy, drawn = step.slice_request(0, 1), step.slice_request(2, 1)
    assert greedy is not None
    assert drawn is not None
    assert greedy.token_ids.tobytes() == FULL_ROW
    assert drawn.token_ids.tolist() == [5, 5, 0]
    nothing_drawn = StepSupports([1], [], None).slice_request(1, 1)
    assert nothing_drawn is not None
    np.testing.assert_array_equal(nothing_drawn.token_ids, [0])
