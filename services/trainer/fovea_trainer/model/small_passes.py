"""Passes of small micro-batches as CUDA graphs, so that a small step takes the time of its kernels, not of the host.

A pass of a small micro-batch launches thousands of short kernels, and the host needs about 50 us for each. A CUDA graph
launches all of them at once. A graph has fixed addresses and sizes. A small micro-batch is therefore padded to one of a
few sizes, and its adapter's weights are copied to a fixed place before the pass.

The first pass of a size runs without a graph, and the second one is recorded. Both run the same kernels on the same
padded sizes, so their results are equal bit for bit. After a restart, a replayed command may thus run without a graph
although it ran as a graph before.

Small calls of several adapters share a pass: each has a slot of P rows, and products with adapters are batched over
slots. The rounding of a row depends on the size of the pass, but not on the contents of other slots. A replayed command
therefore runs again in the same slot of a pass of the same size, with fillers in all other slots.

Shapes: T packed tokens, S padded tokens, M image embeddings, D hidden size.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor

from fovea_trainer.batches.datum_decoding import Datum
from fovea_trainer.batches.micro_batch import Batch, Documents
from fovea_trainer.batches.places import MOST_SLOTS, PassTerms, padded_size, power_of_two
from fovea_trainer.batches.vision_cache import VisionOutput
from fovea_trainer.model.lora import LoraInjector, LoraWeights
from fovea_trainer.model.lora_linear import LoraPair, unembedding_of
from fovea_trainer.model.packed_model import PackedModel

logger = logging.getLogger(__name__)

_MOST_SIZES = 24
"""The most passes that are kept; the least recently used one makes room."""
_MOST_STANDINS = 4
_ALIGNMENT = 32  # elements of at least 2 bytes: whole lines of a CPU's cache


@dataclass(frozen=True)
class _Size:
    """The sizes of one recorded pass.

    Args:
        tokens: S.
        documents: Maximum number of documents, including those of padding.
        longest: Maximum number of tokens of a document.
        with_images: True if deepstack features of images are added to the first layers.
        temperature: Divisor of the logits.
        slots: Number of adapters, each with an equal part of the tokens.
    """

    tokens: int
    documents: int
    longest: int
    with_images: bool
    temperature: float
    slots: int

    @classmethod
    def of(cls, batch: Batch, with_images: bool, temperature: float, slots: int = 1) -> "_Size":
        tokens = padded_size(len(batch.tokens_T)) if slots == 1 else len(batch.tokens_T)
        longest = power_of_two(batch.documents.longest)
        padding = -(-(tokens - len(batch.tokens_T)) // longest)
        documents = power_of_two(len(batch.documents.bounds) - 1 + padding)
        return cls(tokens, documents, longest, with_images, temperature, slots)

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
        slots: Number of adapters for which there is room at a time.
    """

    def __init__(self, like: LoraWeights, slots: int = 1) -> None:
        self.cast_KN, self.grad_KN = (_rows_like(one, slots) for one in (like.cast_weights, like.flat_grad))
        self._layout = like.layout

    @staticmethod
    def size_bytes(like: LoraWeights, slots: int) -> int:
        """Returns the memory of a stand-in."""
        return slots * sum(one.numel() * one.element_size() for one in (like.cast_weights, like.flat_grad))

    def pairs(self, size: _Size) -> dict[str, LoraPair]:
        """Returns the pairs over the buffers for passes of a size."""
        if size.slots == 1:
            return self._layout.pairs_on(self.cast_KN[0], self.grad_KN[0])
        return self._layout.pairs_on(self.cast_KN[: size.slots], self.grad_KN[: size.slots], size.tokens // size.slots)


def _rows_like(flat: Tensor, count: int) -> Tensor:
    """Returns zeros with `count` rows like a flat buffer. All rows are aligned alike, which affects bits on a CPU."""
    width = -(-len(flat) // _ALIGNMENT) * _ALIGNMENT
    return flat.new_zeros(count, width)[:, : len(flat)]


class _Pass:
    """One forward and backward pass of one size on one stand-in. It launches single kernels until it is recorded."""

    def __init__(self, module: PackedModel, size: _Size, stand_in: _StandIn, rows: int, device: torch.device) -> None:
        self._module, self._size = module, size
        self._grad_KN = stand_in.grad_KN[: size.slots]
        self.pairs = stand_in.pairs(size)
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

    def forward(self, with_gradient: bool) -> Tensor:
        """Returns the log-probabilities of the targets, float32 [S, 1], with their graph unless it is recorded."""
        if self._graphs is not None:
            self._graphs[0].replay()
            return self._recorded_S1
        with torch.set_grad_enabled(with_gradient):
            return self._compute()

    def backward(self, logprobs_S1: Tensor, grad_T1: Tensor) -> None:
        """Computes the gradients of the stand-in, which must still hold the weights of the forward pass.

        Args:
            logprobs_S1: The result of `forward`.
            grad_T1: Its gradient, without those of padding.
        """
        self._grad_S1.zero_()[: len(grad_T1)].copy_(grad_T1)
        if self._graphs is not None:
            self._graphs[1].replay()
        else:
            self._back_propagate(logprobs_S1)

    def _compute(self) -> Tensor:
        vision = index_S = None
        if self._deepstack:
            vision, index_S = VisionOutput(self._embeddings_SD, tuple(self._deepstack)), self._everywhere_S
        documents = Documents(self._bounds, self._size.longest)
        hidden_SD = self._module.run_language(self._embeddings_SD, self._positions, documents, vision, index_S)
        return self._module.logprobs(
            hidden_SD, unembedding_of(self.pairs), self._targets_S1, self._size.temperature, takes_all=True
        )

    def _back_propagate(self, logprobs_S1: Tensor) -> None:
        self._grad_KN.zero_()
        torch.autograd.backward([logprobs_S1], [self._grad_S1])

    def record(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Records both passes as graphs. The memory of their results comes from `pool`, which all passes share."""
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads may copy snapshots at this time, so only this thread must avoid calls that break a recording.
        options: Any = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(forward, **options), torch.enable_grad():
            logprobs_S1 = self._compute()
        with torch.cuda.graph(backward, **options):
            self._back_propagate(logprobs_S1)
        self._recorded_S1 = logprobs_S1.detach()
        self._graphs = forward, backward


class SmallPasses:
    """Computes small micro-batches of adapters in padded passes, which it records.

    Args:
        module: The model, whole on this rank.
        injector: Applies the stand-ins' tensors to the model.
        most_tokens: Maximum number of tokens of a small micro-batch; 0 disables this class.
        records: True if passes may be recorded.
        has_room: Returns True if a pass of a given number of tokens may keep its memory permanently.
        fits: Returns True if buffers of a given number of bytes may be kept for shared passes.
        set_aside: Called with the pool of all recordings after each.
    """

    def __init__(
        self,
        module: PackedModel,
        injector: LoraInjector,
        most_tokens: int,
        records: bool,
        has_room: Callable[[int], bool],
        fits: Callable[[int], bool],
        set_aside: Callable[[Any], None],
    ) -> None:
        self._module, self._injector, self._most_tokens = module, injector, most_tokens
        self._has_room, self._fits, self._set_aside = has_room, fits, set_aside
        self._passes: LRUCache[tuple[_StandIn, _Size], _Pass] = LRUCache(_MOST_SIZES)
        self._stand_ins: LRUCache[Any, _StandIn] = LRUCache(_MOST_STANDINS)
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._may_record = self._records = records

    def takes(self, batch: Batch, recompute: float) -> bool:
        """Returns True if `logprobs` can compute a micro-batch. Earlier passes have no effect on the answer.

        On a CPU these are all that may share a pass: padded, a call has the same bits whether it shares one or not.
        """
        on_cpu = batch.tokens_T.device.type == "cpu"
        may_pad = self._module.can_be_shared if on_cpu else self._may_record and self._module.can_be_recorded
        return (
            bool(self._most_tokens)
            and bool(batch.datums)
            and len(batch.tokens_T) <= self._most_tokens
            and batch.targets_TK.shape[1] == 1
            and batch.experts_TLk is None
            and batch.support_TM is None
            and batch.documents.share is None
            and not recompute
            and may_pad
        )

    def logprobs(
        self, batch: Batch, weights: LoraWeights, cached: dict[str, VisionOutput], temperature: float
    ) -> Tensor:
        """Returns the log-probabilities, float32 [T, 1]. The backward pass adds to the gradients of the adapter."""
        stand_in = self._stand_in(weights, 1)
        stand_in.cast_KN[0].copy_(weights.flat)
        return self._run(batch, stand_in, 1, cached, temperature, lambda: weights.flat_grad.add_(stand_in.grad_KN[0]))

    @property
    def most_shared_tokens(self) -> int:
        """Most tokens of a shared pass; 0 if the model cannot share passes."""
        return self._most_tokens if self._module.can_be_shared else 0

    def share_of(
        self, weights: LoraWeights, datums: Sequence[Datum], temperature: float, backward: bool
    ) -> PassTerms | None:
        """Returns the conditions under which a call may share a pass; None if it computes alone. For any thread.

        Args:
            weights: The adapter of the call.
            datums: The datums of the call.
            temperature: Divisor of the logits.
            backward: True for a call with gradients.
        """
        rows = padded_size(sum(len(datum.tokens) for datum in datums))
        is_plain = all(
            datum.targets.shape[1] == 1 and datum.experts is None and datum.support is None for datum in datums
        )
        if not (is_plain and 2 * rows <= self.most_shared_tokens):
            return None
        on_cpu = weights.flat.device.type == "cpu"
        if on_cpu and weights.settings.rank == 1:
            return None  # A CPU computes a product with a vector in another way than a batch of them.
        # On a CPU, a sum over the rows of a slot has other bits if the slot is taller.
        kind = weights.layout, temperature, backward, rows if on_cpu else None
        return PassTerms(kind, rows, min(MOST_SLOTS, self._most_tokens // rows))

    def slots_of(self, weights: LoraWeights) -> int:
        """Returns for how many adapters like this one a pass has slots; 1 if there is no memory for more."""
        if (key := (weights.layout, MOST_SLOTS)) not in self._stand_ins:
            counts = (MOST_SLOTS >> shift for shift in range(4))
            found = next((count for count in counts if self._fits(_StandIn.size_bytes(weights, count))), 1)
            if found == 1:
                return 1
            self._stand_ins[key] = _StandIn(weights, found)
        return len(self._stand_ins[key].cast_KN)

    def shared_logprobs(
        self,
        batch: Batch,
        adapters: Sequence[LoraWeights | None],
        cached: dict[str, VisionOutput],
        temperature: float,
    ) -> Tensor:
        """Returns the log-probabilities of a shared pass, float32 [T, 1].

        After the backward pass, `add_gradients` adds the gradients of adapters.

        Args:
            batch: The micro-batch: an equal number of tokens for each slot, in order.
            adapters: The adapter of each slot; None for an empty slot. `slots_of` has returned at least as many.
            cached: As for `PackedModel.forward`.
            temperature: Divisor of the logits.
        """
        used = [weights for weights in adapters if weights is not None]
        stand_in = self._stand_in(used[0], len(adapters))
        rows = [stand_in.cast_KN[slot] for slot, weights in enumerate(adapters) if weights is not None]
        torch._foreach_copy_(rows, [weights.flat.detach() for weights in used])
        return self._run(batch, stand_in, len(adapters), cached, temperature, lambda: None)

    def add_gradients(self, adapters: Sequence[LoraWeights | None]) -> None:
        """Adds the gradients of the last shared pass to those of its adapters. None leaves out a slot."""
        if found := self.gradients(adapters):
            torch._foreach_add_([weights.flat_grad for weights in adapters if weights is not None], found)

    def gradients(self, adapters: Sequence[LoraWeights | None]) -> list[Tensor]:
        """Returns the gradients of the last shared pass, without slots that are None. The next pass overwrites them."""
        like = next((weights for weights in adapters if weights is not None), None)
        if like is None:
            return []
        grad_KN = self._stand_in(like, len(adapters)).grad_KN
        return [grad_KN[slot] for slot, weights in enumerate(adapters) if weights is not None]

    def _run(
        self,
        batch: Batch,
        stand_in: _StandIn,
        slots: int,
        cached: dict[str, VisionOutput],
        temperature: float,
        after: Callable[[], object],
    ) -> Tensor:
        self._module.set_recompute(0.0)  # an earlier pass may have set it
        with torch.no_grad():
            embeddings_TD, vision, index_M = self._module.embed(batch, cached)
        with_images = vision is not None and bool(vision.deepstack)
        size = _Size.of(batch, with_images, temperature, slots)
        one = self._pass(stand_in, size, len(batch.positions), embeddings_TD.device)
        one.load(batch, embeddings_TD, vision, index_M)
        anchor = torch.zeros((), device=embeddings_TD.device, requires_grad=torch.is_grad_enabled())
        apply: Any = _SmallPass.apply
        with self._injector.holding(one.pairs):
            found: Tensor = apply(anchor, one, len(batch.tokens_T), after)
        return found

    def _stand_in(self, weights: LoraWeights, slots: int) -> _StandIn:
        """Returns the buffers for a pass of `slots` slots. All passes of several slots share one stand-in."""
        kept = MOST_SLOTS if slots > 1 else 1
        key = (weights.layout, kept)
        if key not in self._stand_ins:
            self._stand_ins[key] = _StandIn(weights, kept)
        return self._stand_ins[key]

    def _pass(self, stand_in: _StandIn, size: _Size, rows: int, device: torch.device) -> _Pass:
        key = (stand_in, size)
        one = self._passes.get(key)
        if one is None:
            one = self._passes[key] = _Pass(self._module, size, stand_in, rows, device)
        elif not one.is_recorded and self._records and self._module.can_be_recorded and self._has_room(size.tokens):
            with self._injector.holding(one.pairs):
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
        if self._pool is not None:
            self._set_aside(self._pool)

    def _record(self, one: _Pass) -> None:
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        one.record(self._pool, self._stream)


class _SmallPass(torch.autograd.Function):
    """Connects a pass to the loss. For autograd, the whole pass is this one function."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, one: _Pass, count: int, after: Callable[[], object]) -> Tensor:
        # The graph of a pass belongs to this node, so that it is freed with it if the backward pass never runs.
        ctx.one, ctx.after, ctx.logprobs_S1 = one, after, one.forward(anchor.requires_grad)
        found: Tensor = ctx.logprobs_S1.detach()[:count].clone()
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        logprobs_S1, ctx.logprobs_S1 = ctx.logprobs_S1, None
        ctx.one.backward(logprobs_S1, grads[0])
        ctx.after()
        return None, None, None, None
