"""Images whose tokens see each other both ways, on CPU.

Replaces: `vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder.build`, and wraps
    `vllm.v1.core.sched.scheduler.Scheduler._try_schedule_encoder_inputs`.
Why: in Gemma 3, and in the sliding layers of Gemma 4 31B, the tokens of an image see each other both ways. vLLM's GPU
    backends are told where images stand; its CPU backend takes no notice and is causal there, 0.2 to 2 nat off. Its
    kernel can do it: here the rows of each image are a sequence of their own over the same cache, which ends with the
    image and is not causal. A step must hold such an image whole. `disable_chunked_mm_input`, which only the GPU
    platforms switch on for these models, sees to it but for an image that begins where a step does, or before it
    because a part of it is cached.
Upstream: none filed.
Delete when: `cpu_attn.py` reads `mm_req_doc_ranges`, and the scheduler splits no image whatever is cached.
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
"""Of each image of a request, the first and the last of its embeddings, counted from the start of the prompt."""


class Segment(NamedTuple):
    """Rows of a step that see alike.

    Attributes:
        request: Index of their request in the batch.
        end: The row of the step after the last.
        seen: Tokens of the request from its start that they may see: up to the segment's own end.
        causal: Whether a row sees nothing after itself.
    """

    request: int
    end: int
    seen: int
    causal: bool


def apply() -> None:
    """Takes the place of vLLM's own; twice is no error."""
    builder: Any = CPUAttentionMetadataBuilder
    builder.build = _build_with_images
    scheduler: Any = Scheduler
    scheduler._try_schedule_encoder_inputs = _schedule_whole_images


def configure(config: VllmConfig) -> None:
    """What vLLM's GPU platforms do themselves: images of such a model are never split between steps."""
    if config.model_config.is_mm_prefix_lm:
        config.scheduler_config.disable_chunked_mm_input = True


def check(runner: Any) -> None:
    """Raises ValueError if images may be longer than a window: the CPU kernel's windows reach as far ahead as back."""
    window = getattr(runner.model_config.hf_text_config, "sliding_window", None)
    if not runner.is_mm_prefix_lm or window is None or runner.mm_budget is None:
        return
    longest = runner.mm_budget.mm_max_toks_per_item.get("image", 0)
    if longest > window:
        raise ValueError(
            f"images of up to {longest} tokens do not fit the model's window of {window} tokens, which the sampler"
            " needs on a CPU: lower max_soft_tokens in processor_config.json, or sample on a GPU"
        )


def segments(starts: Sequence[int], lengths: Sequence[int], images: Mapping[int, Ranges]) -> Iterator[Segment]:
    """The rows of a step, cut where an image begins or ends.

    Args:
        starts: First row of each request in the step, and the number of all rows.
        lengths: Tokens of each request after the step.
        images: Of each request that has some.
    """
    for request, ((start, end), length) in enumerate(zip(pairwise(starts), lengths, strict=True)):
        before = length - (end - start)  # tokens that earlier steps have computed
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
    """Whether the layers of a builder do: of a model that keeps images within its windows, those with one."""
    layers = get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names).values()
    text = builder.vllm_config.model_config.hf_text_config
    only_windows = getattr(text, "use_bidirectional_attention", None) == "vision"
    return not only_windows or all(layer.mm_prefix_clamp_sliding_window for layer in layers)


def _build_with_images(builder: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
    """Takes the place of CPUAttentionMetadataBuilder.build."""
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
    """Takes the place of Scheduler._try_schedule_encoder_inputs: rather than split an image, a step waits for room."""
    found = _schedule_images(scheduler, request, num_computed_tokens, num_new_tokens, *rest, **named)
    end = num_computed_tokens + found[1]
    if scheduler.scheduler_config.disable_chunked_mm_input and _splits(request.mm_features, num_computed_tokens, end):
        budget = rest[0] if rest else named["encoder_compute_budget"]
        return [], 0, budget, [], []
    return found


def _splits(features: Any, computed: int, end: int) -> bool:
    """Whether a step from `computed` to `end` begins in an image, or with one, and leaves a rest of it."""
    places = [feature.mm_position for feature in features]
    return any(place.offset <= computed < end < place.offset + place.length for place in places)
