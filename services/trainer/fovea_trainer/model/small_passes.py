"""Passes of small micro-batches as CUDA graphs, so that a small step takes the time of its kernels, not of the host.

A pass of a small micro-batch launches thousands of short kernels, and the host needs about 50 us for each. A CUDA graph
launches all of them at once. A graph has fixed addresses and sizes. A small micro-batch is therefore padded to one of a
few sizes, and its adapter's weights are copied to a fixed place before the pass.

The first pass of a size runs without a graph, and the second one is recorded. Both run the same kernels on the same
padded sizes, so their results are equal bit for bit. After a restart, a replayed command may thus run without a graph
although it ran as a graph before.

Shapes: T packed tokens, S padded tokens, M image embeddings, D hidden size.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor

from fovea_trainer.batches.micro_batch import Batch, Documents
from fovea_trainer.batches.vision_cache import VisionOutput
from fovea_trainer.model.lora import UNEMBEDDING, LoraInjector, LoraWeights
from fovea_trainer.model.lora_linear import LoraPair
from fovea_trainer.model.packed_model import PackedModel

logger = logging.getLogger(__name__)

_LEAST = 64
_MOST_SIZES = 24
"""The most passes that are kept; the least recently used one makes room."""
_MOST_STANDINS = 4


def padded_size(count: int) -> int:
    """Returns the smallest allowed size for `count` tokens. At most an eighth of it, or 63 tokens, is padding."""
    step = max(_power_of_two(count) // 16, _LEAST)
    return -(-count // step) * step


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


@dataclass(frozen=True)
class _Size:
    """The sizes of one recorded pass.

    Args:
        tokens: S.
        documents: Maximum number of documents, including those of padding.
        longest: Maximum number of tokens of a document.
        with_images: True if deepstack features of images are added to the first layers.
        temperature: Divisor of the logits.
    """

    tokens: int
    documents: int
    longest: int
    with_images: bool
    temperature: float

    @classmethod
    def of(cls, batch: Batch, with_images: bool, temperature: float) -> "_Size":
        tokens = padded_size(len(batch.tokens_T))
        longest = _power_of_two(batch.documents.longest)
        padding = -(-(tokens - len(batch.tokens_T)) // longest)
        documents = _power_of_two(len(batch.documents.bounds) - 1 + padding)
        return cls(tokens, documents, longest, with_images, temperature)

    def bounds(self, bounds: Tensor, count: int) -> Tensor:
        """Returns int32 [documents + 1]: the given bounds, then those of padding documents, then those of empty ones.

        Args:
            bounds: int32, the bounds of the micro-batch.
            count: The number of its tokens, which is the last bound.
        """
        added = torch.arange(1, self.documents + 2 - len(bounds), dtype=bounds.dtype, device=bounds.device)
        return torch.cat([bounds, (count + added * self.longest).clamp(max=self.tokens)])


class _StandIn:
    """Fixed buffers for weights and gradients. All adapters of one layout use them in turn.

    Args:
        like: An adapter of that layout.
    """

    def __init__(self, like: LoraWeights) -> None:
        self.cast = torch.zeros_like(like.cast_weights)
        self.grad = torch.zeros_like(like.flat_grad)
        self.pairs = like.pairs_on(self.cast, self.grad)

    @property
    def unembedding(self) -> LoraPair | None:
        return self.pairs.get(UNEMBEDDING)


class _Pass:
    """One forward and backward pass of one size on one stand-in. It launches single kernels until it is recorded."""

    def __init__(self, module: PackedModel, size: _Size, stand_in: _StandIn, rows: int, device: torch.device) -> None:
        self._module, self._size, self._stand_in = module, size, stand_in
        text = module.hf.config.get_text_config()
        options: Any = {"dtype": module.hf.dtype, "device": device}
        self._embeddings_SD = torch.zeros(size.tokens, text.hidden_size, **options)
        self._positions = torch.zeros(rows, size.tokens, dtype=torch.int64, device=device)
        self._bounds = torch.zeros(size.documents + 1, dtype=torch.int32, device=device)
        self._targets_S1 = torch.zeros(size.tokens, 1, dtype=torch.int64, device=device)
        self._grad_S1 = torch.zeros(size.tokens, 1, device=device)
        levels = module.deepstack_levels if size.with_images else 0
        self._deepstack = [torch.zeros(size.tokens, text.hidden_size, **options) for _ in range(levels)]
        self._everywhere_S = torch.arange(size.tokens, device=device)
        self._logprobs_S1: Tensor | None = None
        self._graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None

    @property
    def is_recorded(self) -> bool:
        return self._graphs is not None

    def load(self, batch: Batch, embeddings_TD: Tensor, vision: VisionOutput | None, index_M: Tensor | None) -> None:
        """Copies a micro-batch into the tensors of the pass. The rows after its tokens are padding."""
        count = len(batch.tokens_T)
        self._embeddings_SD[:count].copy_(embeddings_TD)
        self._positions[:, :count].copy_(batch.positions)
        self._targets_S1[:count].copy_(batch.targets_TK)
        self._bounds.copy_(self._size.bounds(batch.documents.bounds, count))
        for level_SD, level_MD in zip(self._deepstack, vision.deepstack if vision else (), strict=False):
            level_SD.zero_().index_copy_(0, index_M, level_MD.to(level_SD.dtype))  # type: ignore[arg-type]

    def forward(self, count: int, with_gradient: bool) -> Tensor:
        """Returns the log-probabilities of the targets, a copy, float32 [T, 1]. `count` is T."""
        if self._graphs is not None:
            self._graphs[0].replay()
        else:
            with torch.set_grad_enabled(with_gradient):
                self._logprobs_S1 = self._compute()
        assert self._logprobs_S1 is not None
        return self._logprobs_S1.detach()[:count].clone()

    def backward(self, grad_T1: Tensor, weights: LoraWeights) -> None:
        """Adds to the gradients of an adapter. The stand-in must still hold its weights."""
        self._grad_S1.zero_()[: len(grad_T1)].copy_(grad_T1)
        if self._graphs is not None:
            self._graphs[1].replay()
        else:
            self._back_propagate()
            self._logprobs_S1 = None
        weights.flat_grad.add_(self._stand_in.grad)

    def _compute(self) -> Tensor:
        vision = index_S = None
        if self._deepstack:
            vision, index_S = VisionOutput(self._embeddings_SD, tuple(self._deepstack)), self._everywhere_S
        documents = Documents(self._bounds, self._size.longest)
        hidden_SD = self._module.run_language(self._embeddings_SD, self._positions, documents, vision, index_S)
        return self._module.logprobs(
            hidden_SD, self._stand_in.unembedding, self._targets_S1, self._size.temperature, takes_all=True
        )

    def _back_propagate(self) -> None:
        self._stand_in.grad.zero_()
        assert self._logprobs_S1 is not None
        torch.autograd.backward([self._logprobs_S1], [self._grad_S1])

    def record(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Records both passes as graphs. The memory of their results comes from `pool`, which all passes share."""
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads may copy snapshots at this time, so only this thread must avoid calls that break a recording.
        options: Any = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(forward, **options), torch.enable_grad():
            self._logprobs_S1 = self._compute()
        with torch.cuda.graph(backward, **options):
            self._back_propagate()
        self._logprobs_S1 = self._logprobs_S1.detach()
        self._graphs = forward, backward


class SmallPasses:
    """Computes small micro-batches of adapters in padded passes, which it records.

    Args:
        module: The model, whole on this rank.
        injector: Applies the stand-ins' tensors to the model.
        most_tokens: Maximum number of tokens of a small micro-batch; 0 disables this class.
        has_room: Returns True if a pass of a given number of tokens may keep its memory permanently.
        set_aside: Called with the bytes that a recorded pass has allocated and keeps.
    """

    def __init__(
        self,
        module: PackedModel,
        injector: LoraInjector,
        most_tokens: int,
        has_room: Callable[[int], bool],
        set_aside: Callable[[int], None],
    ) -> None:
        self._module, self._injector, self._most_tokens = module, injector, most_tokens
        self._has_room, self._set_aside = has_room, set_aside
        self._passes: LRUCache[tuple[_StandIn, _Size], _Pass] = LRUCache(_MOST_SIZES)
        self._stand_ins: LRUCache[Any, _StandIn] = LRUCache(_MOST_STANDINS)
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._records = True

    def takes(self, batch: Batch, recompute: bool) -> bool:
        """Returns True if `logprobs` can compute a micro-batch. Earlier passes have no effect on the answer."""
        return (
            bool(self._most_tokens)
            and bool(batch.datums)
            and len(batch.tokens_T) <= self._most_tokens
            and batch.targets_TK.shape[1] == 1
            and batch.experts_TLk is None
            and batch.support_TM is None
            and not recompute
            and self._module.can_be_recorded
        )

    def logprobs(
        self, batch: Batch, weights: LoraWeights, cached: dict[str, VisionOutput], temperature: float
    ) -> Tensor:
        """Returns the log-probabilities, float32 [T, 1]. The backward pass adds to the gradients of the adapter."""
        with torch.no_grad():
            embeddings_TD, vision, index_M = self._module.embed(batch, cached)
        with_images = vision is not None and bool(vision.deepstack)
        stand_in = self._stand_in(weights)
        one = self._pass(stand_in, weights, _Size.of(batch, with_images, temperature), len(batch.positions))
        stand_in.cast.copy_(weights.flat)
        one.load(batch, embeddings_TD, vision, index_M)
        anchor = weights.flat.new_zeros((), requires_grad=torch.is_grad_enabled())
        apply: Any = _SmallPass.apply
        with self._injector.holding(stand_in.pairs):
            found: Tensor = apply(anchor, one, len(batch.tokens_T), weights)
        return found

    def _stand_in(self, weights: LoraWeights) -> _StandIn:
        key = weights.layout
        if key not in self._stand_ins:
            self._stand_ins[key] = _StandIn(weights)
        return self._stand_ins[key]

    def _pass(self, stand_in: _StandIn, weights: LoraWeights, size: _Size, rows: int) -> _Pass:
        key = (stand_in, size)
        one = self._passes.get(key)
        if one is None:
            one = self._passes[key] = _Pass(self._module, size, stand_in, rows, weights.flat.device)
        elif not one.is_recorded and self._records and self._has_room(size.tokens):
            with self._injector.holding(stand_in.pairs):
                self._try_to_record(one)
        return one

    def _try_to_record(self, one: _Pass) -> None:
        """Records a pass. If that fails, this pass and all later ones run without graphs, with the same results."""
        try:
            self._record(one)
        except RuntimeError as error:
            self._records = False
            reason = str(error).splitlines()[0]
            logger.warning("no CUDA graph of a training pass could be recorded, small steps take longer: %s", reason)

    def _record(self, one: _Pass) -> None:
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        reserved = torch.cuda.memory_reserved()
        one.record(self._pool, self._stream)
        self._set_aside(torch.cuda.memory_reserved() - reserved)


class _SmallPass(torch.autograd.Function):
    """Connects a pass to the loss. For autograd, the whole pass is this one function."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, one: _Pass, count: int, weights: LoraWeights) -> Tensor:
        ctx.one, ctx.weights = one, weights
        return one.forward(count, anchor.requires_grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.one.backward(grads[0], ctx.weights)
        return None, None, None, None
