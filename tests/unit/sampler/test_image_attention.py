"""Images with full attention to themselves on vLLM's CPU backend: where a step is cut, and the result of its kernel."""

# ruff: noqa: N806 -- shape suffixes

from types import SimpleNamespace

import pytest
import torch

from fovea_sampler.vllm_patches import image_attention_cpu
from fovea_sampler.vllm_patches.image_attention_cpu import Segment, segments


def test_a_step_is_cut_where_images_begin_and_end() -> None:
    whole = list(segments([0, 10], [10], {0: [(2, 4), (5, 7)]}))
    assert whole == [
        Segment(0, 2, 2, True),
        Segment(0, 5, 5, False),
        Segment(0, 8, 8, False),
        Segment(0, 10, 10, True),
    ]


def test_what_earlier_steps_computed_is_left_out() -> None:
    """A request with an image that is cached except for its last token, one that decodes after an image, one without
    images.
    """
    found = list(segments([0, 4, 5, 8], [10, 21, 3], {0: [(0, 2), (3, 6)], 1: [(4, 9)]}))
    assert found == [
        Segment(0, 1, 7, False),
        Segment(0, 4, 10, True),
        Segment(1, 5, 21, True),
        Segment(2, 8, 3, True),
    ]


@pytest.mark.parametrize(("dtype", "head_size", "isa"), [(torch.float32, 32, "vec"), (torch.bfloat16, 48, "vec16")])
@pytest.mark.parametrize("window", [None, 40])
def test_the_kernel_takes_an_image_as_a_sequence_of_its_own(
    dtype: torch.dtype, head_size: int, isa: str, window: int | None
) -> None:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    torch.manual_seed(0)
    current_platform.import_kernels()
    first, last, before, length, block_size = 40, 64, 20, 90, 32
    query = torch.randn(length, 4, head_size).to(dtype)
    key, value = (torch.randn(length, 2, head_size).to(dtype) for _ in range(2))
    table = torch.tensor([[5, 2, 7]], dtype=torch.int32)
    cache = torch.zeros(8, 2, 2 * block_size, head_size, dtype=dtype)
    keys, values = cache.chunk(2, dim=2)
    slots = (table[0].long()[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa)
    found = list(segments([0, length - before], [length], {0: [(first, last)]}))
    starts = torch.tensor([0, *(segment.end for segment in found)], dtype=torch.int32)
    seen = torch.tensor([segment.seen for segment in found], dtype=torch.int32)
    causal = torch.tensor([segment.causal for segment in found], dtype=torch.int32)
    shape = {"num_reqs": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": head_size, "dtype": dtype, "isa": isa}
    plan = ops.cpu_attn_get_scheduler_metadata(
        **shape,
        seq_lens=seen,
        query_start_loc=starts,
        causal=False,
        sliding_window_size=window or -1,
        enable_kv_split=True,
        dynamic_causal=causal,
    )
    out = torch.empty(length - before, 4, head_size, dtype=dtype)
    ops.cpu_attention_with_kv_cache(
        query[before:], keys, values, out, starts, seen, head_size**-0.5, False, None, window or -1,
        table.expand(3, -1).contiguous(), 0.0, plan, None, causal,
    )  # fmt: skip
    places = torch.arange(length)
    is_image = (places >= first) & (places <= last)
    mask = (places[:, None] >= places) | (is_image[:, None] & is_image)
    if window is not None:
        mask &= places[:, None] - places < window
    q_HTD, k_HTD, v_HTD = (tensor.float().transpose(0, 1) for tensor in (query, key, value))
    k_HTD, v_HTD = k_HTD.repeat_interleave(2, 0), v_HTD.repeat_interleave(2, 0)
    expected = torch.nn.functional.scaled_dot_product_attention(q_HTD, k_HTD, v_HTD, mask).transpose(0, 1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), expected[before:], atol=tolerance, rtol=tolerance)


def test_images_longer_than_a_window_are_refused() -> None:
    runner = SimpleNamespace(
        is_mm_prefix_lm=True,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(sliding_window=64)),
        mm_budget=SimpleNamespace(mm_max_toks_per_item={"image": 64}),
    )
    image_attention_cpu.check(runner)
    runner.mm_budget.mm_max_toks_per_item["image"] = 65
    with pytest.raises(ValueError, match="images of up to 65 tokens do not fit the model's window of 64"):
        image_attention_cpu.check(runner)


@pytest.mark.parametrize(
    ("computed", "end", "splits"),
    [(4, 8, True), (5, 8, True), (5, 9, False), (3, 8, False)],  # vLLM itself handles the last case
)
def test_a_step_that_begins_with_an_image_or_in_it_ends_after_it(computed: int, end: int, splits: bool) -> None:
    image = SimpleNamespace(mm_position=SimpleNamespace(offset=4, length=5))
    assert image_attention_cpu._splits([image], computed, end) == splits
