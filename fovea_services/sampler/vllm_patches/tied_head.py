"""Tied unembeddings on CPU after new full weights.

Replaces: nothing; completes `vllm.model_executor.model_loader.reload.finalize_layerwise_reload`.
Why: on CPU an unembedding that shares the embedding's weight multiplies by a packed copy of it (`cpu_linear`). vLLM
    packs again what it has loaded, and the shared weight is loaded by the embedding only: `lm_head` went on with the
    old one, 1.3 nat off (measured).
Upstream: none filed; vllm-project/vllm RFC 48312, on weight reloading for RL, has tensors derived from weights as its
    second point.
Delete when: a reload of a tied embedding leaves a `cpu_linear` of the new weight.
"""

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


def apply(model: torch.nn.Module) -> None:
    """Packs all embeddings and unembeddings of a CPU model again, after its weights have changed."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
