"""The elements of tensors that one of two workers holds, by the rules of tensor parallelism, not by Fovea's code."""

import math
import re
from collections.abc import Mapping, Sequence

_WHOLE = re.compile(r"norm|patch_embed|pos_embed|mlp\.gate\.weight$|(proj|fc2)\.bias$")
"""Norms, embeddings of patches, routers, and biases that are added to sums over workers."""
_VOCABULARY_BLOCK = 64


def own_size(name: str, shape: Sequence[int], worker: int) -> int:
    """Returns the elements of a tensor of Qwen3-VL, with experts or without, that a worker holds."""
    size = math.prod(shape)
    if _WHOLE.search(name):
        return size
    if re.search(r"embed_tokens|lm_head", name):  # vLLM pads the vocabulary before it divides it
        rows = -(-shape[0] // _VOCABULARY_BLOCK) * _VOCABULARY_BLOCK // 2
        return size // shape[0] * (rows if worker == 0 else shape[0] - rows)
    return size // 2


def own_bytes(shapes: Mapping[str, Sequence[int]], worker: int, item_bytes: int = 4) -> int:
    """Returns the bytes of a model that a worker holds."""
    return item_bytes * sum(own_size(name, shape, worker) for name, shape in shapes.items())


def received_bytes(metrics_page: str) -> list[float]:
    """Returns the bytes that each of two workers has received, from a sampler's page of metrics."""
    found = re.findall(r'^fovea_sampler_received_bytes_total{worker="(\d)"} (\S+)', metrics_page, re.MULTILINE)
    return [float(size) for _, size in sorted(found)] or [0.0, 0.0]
