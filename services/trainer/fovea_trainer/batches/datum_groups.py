"""Datums above the token budget: a group of ranks computes such a datum together (Ulysses, Jacobs et al., 2023).

Each rank of the group has an equal part of the tokens. Around attention the ranks trade tokens for heads: there each
has all tokens of some heads. All other layers see each token alone. The last part is padded by tokens of a document of
their own. Every rank evaluates the loss on the log-probabilities of all tokens, and continues with the gradient of its
own part. The images of the datum are dealt over the ranks by patches, and their embeddings are exchanged.

Shapes: T tokens of the padded datum, t tokens of one part, H heads, D head size or hidden size, M image embeddings of
the datum, m of one part.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from fovea_trainer.batches.datum_decoding import Datum, DatumSize
from fovea_trainer.batches.vision_cache import VisionOutput


class DatumGroups:
    """The groups of ranks that can compute a datum together. Groups of one size have consecutive ranks.

    Args:
        sizes: Numbers of ranks, each a divisor of all ranks; empty if no datum is ever shared.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sorted(sizes))
        self._own: dict[int, dist.ProcessGroup] = {}

    def open(self, sizes: Iterable[int]) -> None:
        """Creates the groups of these sizes on their first use, since each takes memory of a GPU. Collective."""
        for size in sorted(set(sizes) - self._own.keys() - {1}):
            for first in range(0, dist.get_world_size(), size):
                group = dist.new_group(list(range(first, first + size)))
                if first <= dist.get_rank() < first + size:
                    self._own[size] = group

    def share(self, size: int, token_count: int) -> "Share":
        """Returns this rank's part of a datum that its group of `size` ranks, an open one, computes."""
        return Share(self._own[size], token_count)


def allowed_sizes(most: int, heads: int) -> list[int]:
    """Returns the sizes of groups.

    Args:
        most: Maximum number of ranks of a group; groups must divide it.
        heads: Number of query heads, which a group divides evenly.
    """
    return [size for size in range(2, most + 1) if most % size == 0 and heads % size == 0]


@dataclass(frozen=True)
class Share:
    """This rank's part of a datum.

    Args:
        group: The ranks that compute the datum.
        token_count: Number of tokens of the datum.
    """

    group: dist.ProcessGroup
    token_count: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    @property
    def is_first(self) -> bool:
        """True on the rank that reports the results of the datum."""
        return self.group.rank() == 0

    @property
    def part_size(self) -> int:
        """t."""
        return -(-self.token_count // self.size)

    @property
    def start(self) -> int:
        """Position of the part's first token in the datum."""
        return self.group.rank() * self.part_size

    @property
    def padding(self) -> int:
        """Number of tokens after those of the datum."""
        return self.part_size * self.size - self.token_count

    def with_own_images(self, datum: Datum) -> Datum:
        """Returns the datum with the images alone that this rank computes.

        Images are dealt in order of size, the largest first, each to the rank with the fewest embeddings so far. Images
        of one digest stay together.
        """
        counts: dict[str, int] = {}
        for span in datum.spans:
            counts[span.feature.digest] = counts.get(span.feature.digest, 0) + span.embedding_count
        loads, own = [0] * self.size, set()
        for digest in sorted(counts, key=lambda one: -counts[one]):  # equal ones in the order of the datum
            rank = loads.index(min(loads))
            loads[rank] += counts[digest]
            if rank == self.group.rank():
                own.add(digest)
        return replace(datum, spans=tuple(span for span in datum.spans if span.feature.digest in own))

    def heads(self, tokens_1HtD: Tensor) -> Tensor:
        """Returns all tokens of this rank's heads, [1, H / ranks, T, D]. Heads fewer than ranks are repeated."""
        count = tokens_1HtD.shape[1]
        repeats = math.lcm(count, self.size) // count
        if repeats > 1:
            tokens_1HtD = tokens_1HtD.repeat_interleave(repeats, dim=1)
        return _apply(_Trade, tokens_1HtD, 1, 2, self.group)

    def tokens(self, heads_1THD: Tensor) -> Tensor:
        """Returns all heads of this rank's tokens, [1, t, H, D], given [1, T, H / ranks, D]."""
        return _apply(_Trade, heads_1THD, 1, 2, self.group)

    def whole(self, part_tK: Tensor) -> Tensor:
        """Returns the rows of all tokens without padding. Every rank must compute the same gradient of them."""
        return _apply(_Gather, part_tK, self.token_count, self.group)

    def summed(self, part: Tensor) -> Tensor:
        """Returns the sum of the ranks' tensors, of which each element is zero on all ranks but one."""
        return _apply(_Sum, part, self.group)


@dataclass(frozen=True)
class DealtImages:
    """The embeddings of all images of a shared datum.

    Args:
        share: This rank's part of the datum.
        count: M.
        own_rows: int64, the rows among the M of the images that this rank computes.
        taken_m: int64, the rows of embeddings in this rank's part of the tokens.
    """

    share: Share
    count: int
    own_rows: Tensor
    taken_m: Tensor

    def exchanged(self, own: VisionOutput | None, like: Tensor, levels: int) -> VisionOutput:
        """Returns the embeddings in this rank's part of the tokens. All ranks of the group must call it.

        Args:
            own: The tower's output for the images of this rank, or for a blank image if it has none but the tower is
                trained; else None.
            like: A tensor with the hidden size, dtype and device of the language model.
            levels: Number of levels of deepstack features.
        """
        parts = like.new_zeros(levels + 1, self.count, like.shape[-1])
        if own is not None and len(self.own_rows):
            parts = parts.index_copy(1, self.own_rows, torch.stack([own.embeddings, *own.deepstack]).to(parts.dtype))
        elif own is not None:
            parts = parts + own.anchored()
        taken = self.share.summed(parts).index_select(1, self.taken_m)
        return VisionOutput(taken[0], tuple(taken[1:]))


def _apply(function: Any, *arguments: Any) -> Tensor:
    found: Tensor = function.apply(*arguments)
    return found


class _Trade(torch.autograd.Function):
    """Scatters one dimension over the ranks and gathers another."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, scattered: int, gathered: int, group: dist.ProcessGroup) -> Tensor:
        ctx.options = gathered, scattered, group
        return _trade(given, scattered, gathered, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _trade(grads[0], *ctx.options), None, None, None


def _trade(given: Tensor, scattered: int, gathered: int, group: dist.ProcessGroup) -> Tensor:
    sent = torch.stack(given.chunk(group.size(), dim=scattered))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=gathered)


class _Gather(torch.autograd.Function):
    """Concatenates the ranks' rows, up to a count. The gradient of its own rows goes back to each rank."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.options = len(part), group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        # FSDP warns of a module that returns a view, so the rows are copied.
        return torch.cat(parts).narrow(0, 0, count).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        size, group = ctx.options
        padded = functional.pad(grads[0], (0, 0, 0, size * group.size() - len(grads[0])))
        return padded.narrow(0, size * group.rank(), size), None, None


class _Sum(torch.autograd.Function):
    """Sums over the ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _total(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _total(grads[0], ctx.group), None


def _total(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=group)
    return found


def group_sizes_of(sizes: Sequence[DatumSize], allowed: Sequence[int], token_budget: int) -> dict[int, int]:
    """Returns the size of the group of each datum above the token budget, keyed by index.

    It is the smallest with which a part is within the budget, or the largest allowed.
    """
    found = {}
    for index, size in enumerate(sizes):
        if allowed and size.token_count > token_budget:
            enough = (count for count in sorted(allowed) if -(-size.token_count // count) <= token_budget)
            found[index] = next(enough, max(allowed))
    return found


def long_steps(
    sizes: Sequence[DatumSize], groups: dict[int, int], world_size: int
) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    """Returns the micro-batches of shared datums: the size of the groups, and the datum of each rank.

    Groups of one size compute at once, datums of similar length together.
    """
    steps = []
    for size in sorted(set(groups.values()), reverse=True):
        own = sorted(
            (index for index, count in groups.items() if count == size), key=lambda i: (-sizes[i].token_count, i)
        )
        at_once = world_size // size
        for begin in range(0, len(own), at_once):
            dealt = own[begin : begin + at_once]
            ranks = [(index,) for index in dealt for _ in range(size)]
            steps.append((size, (*ranks, *[()] * (world_size - len(ranks)))))
    return steps
