"""Transfer of expert rows from a worker."""

import numpy as np
import torch

from fovea_sampler.vllm_patches.routed_experts import _Rows, _RowsConnector


def rows(start: int, end: int) -> np.ndarray:
    """Returns the rows of positions."""
    return np.arange(start, end, dtype=np.uint8)[:, None, None].repeat(3, 1).repeat(2, 2)


def test_each_row_leaves_once_in_order_whatever_is_computed_again() -> None:
    found = _Rows(torch.zeros(4, 3, 2, dtype=torch.uint8))
    found.put(0, rows(0, 5))  # a chunk of a prompt, which yields no rows yet
    found.put(5, rows(5, 100))
    start, sent = found.take(100)
    assert (start, sent.tolist()) == (0, rows(0, 100).tolist())
    found.put(100, rows(100, 101))
    start, sent = found.take(101)
    assert (start, sent.tolist()) == (100, rows(100, 101).tolist())
    found.put(0, rows(0, 64))  # after a preemption
    found.put(64, rows(64, 102))
    start, sent = found.take(102)
    assert (start, sent.tolist()) == (101, rows(101, 102).tolist())
    assert sent.dtype == np.uint8


def test_a_request_that_did_not_ask_gets_none() -> None:
    assert _RowsConnector().take_output(type("Request", (), {"request_id": "r"})(), None) is None
