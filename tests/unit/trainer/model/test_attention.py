"""Packed attention against a dense mask."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from fovea_trainer.model import packed_attention as attention
from fovea_trainer.model.document_masks import Packing, group_by_length
from fovea_trainer.model.packed_attention import Kernel, Scores, flex, kernel_for, kernel_of, packed_attention, varlen_4

CASES = [[5], [3, 3, 3], [1, 4, 2], [4, 2, 4, 2, 4], [7, 1, 1, 7, 3], [2, 5, 2]]


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: list[int],
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    count = q.shape[2]
    document = torch.zeros(count, dtype=torch.int64)
    for number, (start, end) in enumerate(pairwise(bounds)):
        document[start:end] = number
    allowed = document[:, None] == document[None, :]
    if causal:
        allowed &= torch.ones(count, count, dtype=torch.bool).tril()
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    if window is not None:
        places = torch.arange(count)
        allowed &= places[:, None] - places[None, :] < window
    scores = q @ k.transpose(-1, -2) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is None:
        return (scores.softmax(-1) @ v).transpose(1, 2)
    with_sinks = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return (with_sinks.softmax(-1)[..., :-1] @ v).transpose(1, 2)


def check_equal(found: Tensor, expected: Tensor, given: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Checks that two results are equal, and the gradients of their inputs."""
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    for one, other in zip(given, copies, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("lengths", CASES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_equals_dense_attention(lengths: list[int], causal: bool, kv_heads: int) -> None:
    torch.manual_seed(0)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    shapes = [(1, 4, bounds[-1], 6), (1, kv_heads, bounds[-1], 6), (1, kv_heads, bounds[-1], 6)]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    copies = [tensor.detach().clone().requires_grad_() for tensor in given]
    expected = _dense(*copies, bounds, causal)
    found, _ = packed_attention(
        nn.Module(), *given, None, 0.3, torch.tensor(bounds, dtype=torch.int32), max(lengths), causal
    )
    check_equal(found, expected, given, copies)


@pytest.mark.parametrize("lengths", CASES)
@pytest.mark.parametrize("kind", ["window", "softcap", "sinks", "all"])
def test_windows_caps_and_sinks(lengths: list[int], kind: str) -> None:
    torch.manual_seed(0)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    shapes = [(1, 4, bounds[-1], 6), (1, 2, bounds[-1], 6), (1, 2, bounds[-1], 6), (4,)]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    copies = [tensor.detach().clone().requires_grad_() for tensor in given]
    window = 3 if kind in ("window", "all") else None
    softcap = 0.5 if kind in ("softcap", "all") else None
    with_sinks = kind in ("sinks", "all")
    expected = _dense(*copies[:3], bounds, True, window, softcap, copies[3] if with_sinks else None)
    more = {"sliding_window": window, "softcap": softcap, "s_aux": given[3] if with_sinks else None}
    found, _ = packed_attention(
        nn.Module(), *given[:3], None, 0.3, torch.tensor(bounds, dtype=torch.int32), max(lengths), True, **more
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    direction = torch.randn_like(expected)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    for one, other in zip(given, copies, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_tokens_of_a_block_see_those_after_them(window: int | None) -> None:
    """Documents of one length, one of them without a block; bounds between two blocks of the same number."""
    torch.manual_seed(0)
    bounds, blocks = [0, 6, 12, 18], torch.tensor([-1, 0, 0, 0, -1, 1] + [-1] * 6 + [1, 1, 1, 1, -1, -1])
    q, k, v = (torch.randn(1, 2, 18, 6, dtype=torch.float64) for _ in range(3))
    places = torch.arange(18)
    allowed = places[:, None] >= places[None, :]
    allowed |= (blocks[:, None] == blocks[None, :]) & (blocks >= 0)
    allowed &= places[:, None] // 6 == places[None, :] // 6
    if window is not None:
        allowed &= places[:, None] - places[None, :] < window
    expected = nn.functional.scaled_dot_product_attention(q, k, v, allowed).transpose(1, 2)
    limits = torch.tensor(bounds, dtype=torch.int32)
    packing = Packing(limits, 18, blocks)
    for _ in range(2):  # the second time with cached masks
        found, _ = packed_attention(
            nn.Module(), q, k, v, cu_seq_lens_q=limits, max_length_q=6, sliding_window=window, packing=packing
        )
        torch.testing.assert_close(found, expected)


def test_blocks_may_count_in_windows_alone() -> None:
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(3))
    limits, blocks = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([-1, 0, 0, 0, -1, -1])
    everywhere, windowed = Packing(limits, 6, blocks), Packing(limits, 6, blocks, only_windows=True)

    def run(packing: Packing | None, window: int | None) -> torch.Tensor:
        given = {"cu_seq_lens_q": limits, "max_length_q": 6, "sliding_window": window, "packing": packing}
        return packed_attention(nn.Module(), q, k, v, **given)[0]

    torch.testing.assert_close(run(windowed, 4), run(everywhere, 4))
    torch.testing.assert_close(run(windowed, None), run(None, None))
    assert (run(everywhere, None) - run(None, None)).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", ["plain", "not causal", "window", "blocks", "blocks in a window", "softcap", "sinks"])
def test_flex_attention_is_the_same(kind: str) -> None:
    """GPUs use it where flash attention cannot. On a CPU it has no backward pass."""
    torch.manual_seed(0)
    lengths = [4, 2, 4, 7]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    q, k, v = (torch.randn(1, heads, 17, 16, dtype=torch.float64) for heads in (4, 2, 2))
    blocks = torch.tensor([-1, 0, 0, 0, -1, -1, 1, 1, -1, -1, 2, 2, 2, 2, 2, -1, -1]) if "blocks" in kind else None
    packing = Packing(bounds, 17, blocks)
    window = 3 if "window" in kind else None
    softcap = 0.5 if kind == "softcap" else None
    sinks = torch.randn(4, dtype=torch.float64) if kind == "sinks" else None
    scores = Scores(0.3, kind != "not causal", window, softcap, sinks)
    expected, _ = packed_attention(
        nn.Module(), q, k, v, None, 0.3, bounds, 7, scores.causal, 0.0, window, softcap, sinks, packing
    )
    torch.testing.assert_close(flex(q, k, v, scores, packing), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_block_masks_are_those_that_torch_makes_of_the_whole(seed: int) -> None:
    """Ours are built from tensors without visiting each pair of tokens, so one kernel serves all."""
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 100, 127, 128, 129, 300, 500]) for _ in range(rng.randint(1, 5))]
    count, causal, window = sum(lengths), seed % 4 > 0, rng.choice([None, 1, 64, 128, 200]) if seed % 4 else None
    blocks = torch.full((count,), -1)
    for block, start in enumerate(range(rng.randint(0, 40), count, 150)):
        blocks[start : start + rng.randint(1, 149)] = block
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    packing = Packing(bounds, count, blocks if causal else None)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    places = torch.arange(count)
    seen = (places[:, None] >= places) | ((blocks[:, None] == blocks) & (blocks >= 0))
    if window is not None:
        seen &= places[:, None] - places < window
    seen = (seen | (not causal)) & (documents[:, None] == documents)
    found = packing.block_mask(causal, window)
    expected = create_block_mask(lambda b, h, query, key: seen[query, key], None, None, count, count, device="cpu")
    assert torch.equal(found.mask_mod(places, places, places[:, None], places), seen)
    for marked in ("kv", "full_kv", "q", "full_q"):
        counts, indices = getattr(found, f"{marked}_num_blocks"), getattr(found, f"{marked}_indices")
        assert torch.equal(counts, getattr(expected, f"{marked}_num_blocks"))
        for row, number in enumerate(counts[0, 0].tolist()):
            assert torch.equal(indices[0, 0, row, :number], getattr(expected, f"{marked}_indices")[0, 0, row, :number])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head_mask": None, "use_cache": False}, "does not support head_mask"),
        ({"attention_mask": torch.ones(2, 2)}, "no mask"),
        ({"dropout": 0.1}, "no dropout"),
        ({"sliding_window": 4, "is_causal": False}, "only causal windows"),
    ],
)
def test_nothing_that_is_asked_is_ignored(given: dict[str, Any], message: str) -> None:
    query = torch.zeros(1, 1, 2, 4)
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        packed_attention(nn.Module(), query, query, query, cu_seq_lens_q=bounds, max_length_q=2, **given)


def test_equal_lengths_make_one_call() -> None:
    grouping = group_by_length((0, 4, 8, 12))
    assert [(group.length, group.start, group.count) for group in grouping.groups] == [(4, 0, 3)]
    assert grouping.restore is None


def test_bounds_are_needed() -> None:
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        packed_attention(nn.Module(), query, query, query, None)


def _like_flash_4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> tuple[torch.Tensor, None]:
    """Computes attention from the arguments of flash-attn-4, each used as in its interface.py."""
    bounds, (left, right) = given.pop("cu_seqlens_q"), given.pop("window_size")
    assert torch.equal(given.pop("cu_seqlens_k"), bounds)
    assert given.pop("max_seqlen_q") == given.pop("max_seqlen_k") >= int(bounds.diff().max())
    right = 0 if given.pop("causal") else right
    scaling = given.pop("softmax_scale")
    assert not given
    places = torch.arange(len(q))
    documents = torch.searchsorted(bounds[1:], places, right=True)
    distances = places[:, None] - places
    seen = documents[:, None] == documents
    seen &= (distances <= left) if left is not None else True
    seen &= (distances >= -right) if right is not None else True
    q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scaling, enable_gqa=True)
    return out.transpose(0, 1), None


@pytest.mark.parametrize("lengths", CASES)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (True, 1), (False, None)])
def test_flash_4_is_given_the_same_attention(lengths: list[int], causal: bool, window: int | None) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    q, k, v = (torch.randn(1, heads, int(bounds[-1]), 8, dtype=torch.float64) for heads in (4, 2, 2))
    expected = _dense(q, k, v, bounds.tolist(), causal, window)
    found = varlen_4(_like_flash_4, q, k, v, Scores(0.3, causal, window), bounds, max(lengths))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("channels", "scores", "expected"),
    [
        (64, Scores(None, False), Kernel.FLASH_4),
        (128, Scores(None, True, 512), Kernel.FLASH_4),
        (256, Scores(None, True), Kernel.FLASH_4),
        (32, Scores(None, True), Kernel.VARLEN),
        (68, Scores(None, True), Kernel.VARLEN),
        (512, Scores(None, True), Kernel.FLEX),
        (128, Scores(None, True, softcap=30.0), Kernel.FLEX),
        (128, Scores(None, True, sinks_H=torch.zeros(2)), Kernel.FLEX),
    ],
)
def test_flash_4_does_what_it_can_and_the_rest_stays(
    channels: int, scores: Scores, expected: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = Packing(torch.tensor([0, 4], dtype=torch.int32), 4)
    with FakeTensorMode():
        query = torch.empty(1, 2, 4, channels, dtype=torch.bfloat16, device="cuda")
    monkeypatch.setattr(attention, "flash_4", lambda: (_like_flash_4, "flash-attn-4 is installed"))
    assert kernel_for(query, scores, packing) == expected
    monkeypatch.setattr(attention, "flash_4", lambda: (None, "flash-attn-4 is not installed"))
    assert kernel_for(query, scores, packing) == (Kernel.VARLEN if expected == Kernel.FLASH_4 else expected)
    assert kernel_for(query.float(), scores, packing) == Kernel.GROUPED
    assert kernel_of(query.device, query.dtype) == (Kernel.VARLEN, "flash-attn-4 is not installed")


def test_the_kernel_of_a_machine_without_a_gpu() -> None:
    assert kernel_of(torch.device("cpu"), torch.bfloat16) == (Kernel.GROUPED, "there is no GPU")
