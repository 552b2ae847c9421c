"""How ranks talk to each other besides tensors: a gloo group on the host, with a timeout that outlasts idleness.

Rule for everything that a command does: a FoveaError is raised on all ranks or on none. `agree` makes it so for work
that can fail on one rank alone. Any other exception ends the rank, and with it the trainer: after a failure inside a
collective the ranks no longer stand at the same place, and guessing on would hang or corrupt.
"""

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from fovea.wire.errors import FoveaError, Internal, ResourceExhausted
from fovea_services.trainer.ranks import plain_pickle

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONTROL_TIMEOUT = timedelta(days=7)
"""An idle rank waits this long for the next command; heartbeats keep it from ever running out."""

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "bad_alloc")


class ControlGroup:
    """Object collectives over all ranks. Every method must be called on all ranks, in the same order.

    Objects are plain data: see `plain_pickle`.
    """

    def __init__(self) -> None:
        plain_pickle.install()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        self._flag = torch.zeros(1, dtype=torch.int32)

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value on every rank; on rank 0 that very object."""
        if self.world_size == 1:
            return cast(T, value)
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return cast(T, box[0])

    def gather(self, value: T) -> list[T]:
        """All ranks' values on rank 0, in rank order; an empty list elsewhere."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return cast(list[T], values or [])

    def barrier(self) -> None:
        """Returns once all ranks have called it."""
        self._any(False)

    def agree(self, action: Callable[[], T]) -> T:
        """Runs `action` on this rank; if it failed on any rank, raises that error on all.

        `action` must not communicate. What is no FoveaError is logged here and becomes ResourceExhausted if memory ran
        out, else Internal, with its first line.
        """
        error: FoveaError | None = None
        try:
            result = action()
        except FoveaError as known:
            error = known
        except Exception as failure:
            logger.exception("rank %d failed before computing", self.rank)
            reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
            if is_out_of_memory(failure):
                error = ResourceExhausted(f"rank {self.rank} of the trainer ran out of memory: {reason}")
            else:
                error = Internal(f"rank {self.rank} of the trainer failed, its log says where: {reason}")
        if self._any(error is not None):
            errors: list[FoveaError | None] = [None] * self.world_size
            dist.all_gather_object(errors, error, group=self.group)
            raise next(found for found in errors if found is not None)
        return result

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 only and hands its result to all; an error is raised on all."""
        result = self.agree(action if self.rank == 0 else lambda: cast(T, None))
        return self.broadcast(result)

    def any_each(self, flags: list[bool]) -> list[bool]:
        """For each place, whether any rank's flag is set. All ranks must give as many."""
        counts = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=self.group)
        return [bool(count) for count in counts.tolist()]

    def minimum(self, value: int) -> int:
        """The smallest value of any rank."""
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)
        return int(found.item())

    def _any(self, flag: bool) -> bool:
        self._flag.fill_(int(flag))
        dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self.group)
        return bool(self._flag.item())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory. Of a CPU torch says so with a RuntimeError, as cuBLAS does."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
