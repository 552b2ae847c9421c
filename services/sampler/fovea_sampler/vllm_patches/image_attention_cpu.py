"""Bidirectional attention within images on a CPU.

Replaces: `vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder.build`, and wraps
    `vllm.v1.core.sched.scheduler.Scheduler._try_schedule_encoder_inputs`.
Why: in Gemma 3, and in the sliding-window layers of Gemma 4 31B, each token of an image attends to all tokens of that
    image. vLLM's GPU backends receive the positions of images. Its CPU backend ignores them and attends causally, with
    errors of 0.2 to 2 nat. Its kernel supports what is needed: the patch makes the rows of each image a non-causal
    sequence of their own, over the same cache, that ends with the image.
    For that, one step must compute a whole image. vLLM's option `disable_chunked_mm_input` is meant to ensure this, but
    only the GPU platforms set it for these models. Even with the option, vLLM splits an image that begins at the start
    of a step or is partly cached. The patch sets the option and schedules such images whole.
Upstream: none filed.
Delete when: `cpu_attn.py` reads `mm_req_doc_ranges`, and the scheduler never splits an image, even a partly cached one.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder
from vllm.v1.core.sched.scheduler import Scheduler

_build: Any = CPUAttentionMetadataBuilder.build
_schedule_images: Any = Scheduler._try_schedule_encoder_inputs

Ranges = Sequence[tuple[int, int]]
"""The first and the last embedding of each image of a request, as positions in the prompt."""


class Segment(NamedTuple):
    """Consecutive rows of a step, of one request, with the same kind of attention.

    Attributes:
        request: The index of the request in the batch.
        end: The row of the step after the segment's last row.
        seen: The number of tokens from the start of the request that the rows may attend to: up to the segment's end.
        causal: True if a row attends only to itself and earlier tokens.
    """

    request: int
    end: int
    seen: int
    causal: bool


def apply() -> None:
    """Applies the patch to this process. It may be called twice."""
    builder: Any = CPUAttentionMetadataBuilder
    builder.build = _build_with_images
    scheduler: Any = Scheduler
    scheduler._try_schedule_encoder_inputs = _schedule_whole_images


def configure(config: VllmConfig) -> None:
    """Sets the option that keeps an image in one step, for models that need it, as vLLM's GPU platforms do."""
    if config.model_config.is_mm_prefix_lm:
        config.scheduler_config.disable_chunked_mm_input = True


def check(runner: Any) -> None:
    """Raises ValueError if an image may be longer than the sliding window.

    The CPU kernel's window of a non-causal sequence reaches as far ahead as back, so an image must fit into it.
    """
    window = getattr(runner.model_config.hf_text_config, "sliding_window", None)
    if not runner.is_mm_prefix_lm or window is None or runner.mm_budget is None:
        return
    longest = runner.mm_budget.mm_max_toks_per_item.get("image", 0)
    if longest > window:
        raise ValueError(
            f"images of up to {longest} tokens do not fit the model's window of {window} tokens, as the sampler"
            " requires on a CPU: lower max_soft_tokens in processor_config.json, or sample on a GPU"
        )


def segments(starts: Sequence[int], lengths: Sequence[int], images: Mapping[int, Ranges]) -> Iterator[Segment]:
    """Yields the rows of a step, split where an image begins or ends.

    Args:
        starts: The first row of each request in the step, then the number of all rows.
        lengths: The number of tokens of each request after the step.
        images: The images of each request that has any, by the index of the request.
    """
    for request, ((start, end), length) in enumerate(zip(pairwise(starts), lengths, strict=True)):
        before = length - (end - start)  # tokens that earlier steps computed
        place = before
        for first, last in images.get(request, ()):
            image_start, image_end = max(first, before), min(last + 1, length)
            if image_start >= image_end:
                continue
            if image_start > place:
                yield Segment(request, start + image_start - before, image_start, True)
            yield Segment(request, start + image_end - before, image_end, False)
            place = image_end
        if length > place:
            yield Segment(request, end, length, True)


def _sees_images_whole(builder: Any) -> bool:
    """Returns True if the layers of a builder attend bidirectionally within images.

    In models with `use_bidirectional_attention` "vision", only the layers with a sliding window do.
    """
    layers = get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names).values()
    text = builder.vllm_config.model_config.hf_text_config
    only_windows = getattr(text, "use_bidirectional_attention", None) == "vision"
    return not only_windows or all(layer.mm_prefix_clamp_sliding_window for layer in layers)


def _build_with_images(builder: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
    """Replaces CPUAttentionMetadataBuilder.build: makes a sequence of each segment if the step contains an image."""
    metadata: CPUAttentionMetadata = _build(builder, common_prefix_len, common, fast_build)
    images = {request: ranges for request, ranges in (common.mm_req_doc_ranges or {}).items() if ranges}
    if not images or not metadata.causal or not _sees_images_whole(builder):
        return metadata
    found = list(segments(common.query_start_loc.tolist(), common.seq_lens.tolist(), images))
    if all(segment.causal for segment in found):
        return metadata
    metadata.query_start_loc = torch.tensor([0, *(segment.end for segment in found)], dtype=torch.int32)
    metadata.seq_lens = torch.tensor([segment.seen for segment in found], dtype=torch.int32)
    metadata.dynamic_causal = torch.tensor([segment.causal for segment in found], dtype=torch.int32)
    metadata.block_table = metadata.block_table[[segment.request for segment in found]]
    metadata.causal = False
    metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(found),
        num_heads=builder.num_heads,
        num_kv_heads=builder.num_kv_heads,
        head_dim=builder.head_dim,
        seq_lens=metadata.seq_lens,
        dtype=builder.dtype,
        query_start_loc=metadata.query_start_loc,
        causal=False,
        sliding_window_size=builder.window_size,
        isa=builder.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        dynamic_causal=metadata.dynamic_causal,
        kv_cache_dtype=builder.kv_cache_dtype,
    )
    return metadata


def _schedule_whole_images(
    scheduler: Any, request: Any, num_computed_tokens: int, num_new_tokens: int, *rest: Any, **named: Any
) -> Any:
    """Replaces Scheduler._try_schedule_encoder_inputs: schedules no token of an image that does not fit as a whole."""
    found = _schedule_images(scheduler, request, num_computed_tokens, num_new_tokens, *rest, **named)
    end = num_computed_tokens + found[1]
    if scheduler.scheduler_config.disable_chunked_mm_input and _splits(request.mm_features, num_computed_tokens, end):
        budget = rest[0] if rest else named["encoder_compute_budget"]
        return [], 0, budget, [], []
    return found


def _splits(features: Any, computed: int, end: int) -> bool:
    """Returns True if a step from `computed` to `end` starts at or within an image and does not reach its end."""
    places = [feature.mm_position for feature in features]
    return any(place.offset <= computed < end < place.offset + place.length for place in places)
