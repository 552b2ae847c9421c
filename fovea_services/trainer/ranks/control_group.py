"""Communication between ranks besides tensors: a gloo group on the host with a timeout longer than any idle time.

Every command follows one rule: a FoveaError is raised on all ranks or on none. `agree` ensures this for work that can
fail on a single rank. Any other exception ends the rank, and with it the trainer. After a failure inside a collective
the ranks may be at different commands, so continuing would deadlock or corrupt data.
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
"""How long an idle rank waits for the next command. Heartbeats keep this timeout from expiring."""

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "bad_alloc")


class ControlGroup:
    """Collectives on Python objects over all ranks. All ranks must call each method in the same order.

    Objects must be plain data: see `plain_pickle`.
    """

    def __init__(self) -> None:
        plain_pickle.install()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        self._flag = torch.zeros(1, dtype=torch.int32)

    def broadcast(self, value: T | None) -> T:
        """Returns rank 0's value on every rank. On rank 0 it is the same object."""
        if self.world_size == 1:
            return cast(T, value)
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return cast(T, box[0])

    def gather(self, value: T) -> list[T]:
        """Returns all ranks' values on rank 0, in rank order, and an empty list on other ranks."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return cast(list[T], values or [])

    def barrier(self) -> None:
        """Returns once all ranks have called it."""
        self._any(False)

    def agree(self, action: Callable[[], T]) -> T:
        """Runs `action` on every rank. If it fails on any rank, raises one of the errors on all ranks.

        `action` must not communicate. An exception other than FoveaError is logged here. It becomes ResourceExhausted
        if memory ran out, else Internal, with the first line of its message.

        Args:
            action: The work of this rank.

        Returns:
            This rank's result.
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
                error = Internal(f"rank {self.rank} of the trainer failed, see its log: {reason}")
        if self._any(error is not None):
            errors: list[FoveaError | None] = [None] * self.world_size
            dist.all_gather_object(errors, error, group=self.group)
            raise next(found for found in errors if found is not None)
        return result

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 only and returns its result on all ranks. An error is raised on all ranks."""
        result = self.agree(action if self.rank == 0 else lambda: cast(T, None))
        return self.broadcast(result)

    def any_each(self, flags: list[bool]) -> list[bool]:
        """Returns the elementwise OR over the ranks' flags. All ranks must pass lists of the same length."""
        counts = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=self.group)
        return [bool(count) for count in counts.tolist()]

    def minimum(self, value: int) -> int:
        """Returns the smallest value of any rank."""
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)
        return int(found.item())

    def _any(self, flag: bool) -> bool:
        self._flag.fill_(int(flag))
        dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self.group)
        return bool(self._flag.item())


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True for an out-of-memory error. For CPU memory and cuBLAS torch raises a plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
