"""Communication between ranks besides tensors: a gloo group on the host with a timeout longer than any idle time.

Every command follows one rule: a FoveaError is raised on all ranks or on none. `agree` ensures this for work that can
fail on a single rank. Any other exception ends the rank, and with it the trainer. After a failure inside a collective
the ranks may be at different commands, so they could deadlock or corrupt data if they continued.

Objects between ranks are pickled, and so is the metadata that DCP (torch.distributed.checkpoint) writes. A malicious
pickle can run any code, unless the unpickler restricts the names that it looks up. These unpicklers allow data classes
and the few functions that rebuild arrays. For any other name they raise an error that contains it.
"""

import logging
import pickle
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from google.protobuf.message import Message
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import api, filesystem, metadata, planner, storage
from torch.distributed.checkpoint.api import CheckpointException

from fovea.wire import errors
from fovea.wire.errors import FoveaError, Internal, ResourceExhausted

_DCP = {module.__name__ for module in (filesystem, metadata, planner, storage)}
_OWN = "fovea_trainer."
_MESSAGES = "fovea.api.v1."
_TYPES: dict[tuple[str, str], type] = {
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("traceback", "FrameSummary"): traceback.FrameSummary,
    ("traceback", "StackSummary"): traceback.StackSummary,
}
_FUNCTIONS = {
    ("fovea.wire.errors", "_rebuild"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("torch.serialization", "_get_layout"),
}


class NotPlain(pickle.UnpicklingError):
    """The error for a pickle with a name that plain data does not need. The message contains the name."""


class MetadataUnpickler(pickle.Unpickler):
    """Reads the metadata that DCP writes about a checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        """Looks up a global.

        Raises:
            NotPlain: The name is not allowed.
        """
        if (module, name) in _TYPES:
            return _TYPES[module, name]
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if self._is_plain(module, name):
            found = super().find_class(module, name)
            if (module, name) in _FUNCTIONS or self._holds_data(module, found):
                return found
        raise NotPlain(f"it names {module}.{name}, which plain data does not need: it is damaged, or malicious")

    def _is_plain(self, module: str, name: str) -> bool:
        """Returns True if a name may be imported. Dotted names are rejected: they reach attributes of objects."""
        return "." not in name and (module in _DCP or module == "torch" or (module, name) in _FUNCTIONS)

    def _holds_data(self, module: str, found: Any) -> bool:
        """Returns True if `found` only holds data, so that to create it has no other effect."""
        if module == "torch":
            return isinstance(found, torch.dtype | torch.layout | torch.memory_format)
        # A class that the module only imports may do more. This also excludes Enum itself, which creates classes.
        return isinstance(found, type) and found.__module__ == module and self._is_data(found)

    def _is_data(self, found: type) -> bool:
        return is_dataclass(found) or issubclass(found, Enum)


def _enum_member(found: Any, name: str) -> Enum:
    """Stands for `getattr`, by which early Python 3.11 (3.11.2) pickles members of an Enum; reads nothing else."""
    if not (isinstance(found, type) and issubclass(found, Enum)):
        raise NotPlain(
            f"it names builtins.getattr of {found!r:.80}, which plain data does not need: it is damaged, or malicious"
        )
    return found[name]


class MessageUnpickler(MetadataUnpickler):
    """Reads messages between ranks: commands and results, errors, and DCP's plans."""

    def _is_plain(self, module: str, name: str) -> bool:
        ours = module.startswith((_OWN, _MESSAGES)) or module in ("builtins", errors.__name__, api.__name__)
        return super()._is_plain(module, name) or (ours and "." not in name)

    def _is_data(self, found: type) -> bool:
        is_named_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
        # DCP reports failed ranks and their errors in a CheckpointException, which only holds data.
        return super()._is_data(found) or is_named_tuple or issubclass(found, Message | Exception | CheckpointException)


class MessagePickler(pickle.Pickler):
    """Writes what `MessageUnpickler` reads. Exceptions of other libraries are replaced by their text."""

    def reducer_override(self, obj: Any) -> Any:
        """Replaces objects that the reader would reject."""
        if isinstance(obj, Exception) and type(obj).__module__ not in ("builtins", errors.__name__):
            return RuntimeError, (f"{type(obj).__name__}: {obj}",)
        return NotImplemented


def exchange_plain_data() -> None:
    """Restricts the object collectives of torch and DCP in this process to plain data."""
    collectives: Any = distributed_c10d
    assert {"_pickler", "_unpickler"} <= vars(collectives).keys(), "this version of torch pickles differently"
    collectives._pickler, collectives._unpickler = MessagePickler, MessageUnpickler


logger = logging.getLogger(__name__)
T = TypeVar("T")

CONTROL_TIMEOUT = timedelta(days=7)
"""How long an idle rank waits for the next command. Heartbeats keep this timeout from expiring."""

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "bad_alloc")


class ControlGroup:
    """Collectives on Python objects over all ranks. All ranks must call each method in the same order.

    Objects must be plain data: see `MessageUnpickler`.
    """

    def __init__(self) -> None:
        exchange_plain_data()
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
        """Runs `action` on every rank. If it fails on any, raises the error of the first failed rank on all ranks.

        `action` must not communicate. An exception other than FoveaError is logged here. It becomes ResourceExhausted
        if memory ran out, else Internal, with the first line of its message.

        Args:
            action: The work of this rank.

        Returns:
            This rank's result.
        """
        results: list[T] = []
        (error,) = self.agree_each([lambda: results.append(action())])
        if error is not None:
            raise error
        return results[0]

    def agree_each(self, actions: Sequence[Callable[[], object]]) -> list[FoveaError | None]:
        """Runs actions one after another, each as `agree` runs one. All ranks must pass as many.

        Returns:
            For each action the error of the first rank on which it failed, or None.
        """
        errors = [self.error_of(action) for action in actions]
        if not self._any(any(error is not None for error in errors)):
            return errors
        of_ranks: list[list[FoveaError | None]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(of_ranks, errors, group=self.group)
        return [next(filter(None, found), None) for found in zip(*of_ranks, strict=True)]

    def error_of(self, action: Callable[[], object]) -> FoveaError | None:
        """Runs an action on this rank alone. Returns its error, as `agree` would raise it. Not collective."""
        try:
            action()
        except FoveaError as known:
            return known
        except Exception as failure:
            logger.exception("rank %d failed before computing", self.rank)
            return error_of_rank(self.rank, failure)
        return None

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 only and returns its result on all ranks. An error is raised on all ranks."""
        result = self.agree(action if self.rank == 0 else lambda: cast(T, None))
        return self.broadcast(result)

    def any_each(self, flags: list[bool]) -> list[bool]:
        """Returns the elementwise OR over the ranks' flags. All ranks must pass lists of the same length."""
        return list(map(bool, self.most_each(flags)))

    def most_each(self, counts: Sequence[int]) -> list[int]:
        """Returns the elementwise maximum over the ranks' counts. All ranks must pass lists of the same length."""
        found = torch.tensor(counts, dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return [int(count) for count in found.tolist()]

    def minimum(self, value: int) -> int:
        """Returns the smallest value of any rank."""
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)
        return int(found.item())

    def _any(self, flag: bool) -> bool:
        if self.world_size == 1:
            return flag
        self._flag.fill_(int(flag))
        dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self.group)
        return bool(self._flag.item())


def error_of_rank(rank: int, failure: Exception) -> FoveaError:
    """Returns the error that callers see if a rank failed with an exception other than a FoveaError."""
    reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
    if is_out_of_memory(failure):
        return ResourceExhausted(f"rank {rank} of the trainer ran out of memory: {reason}")
    return Internal(f"rank {rank} of the trainer failed, see its log: {reason}")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True for an out-of-memory error. For CPU memory and for cuBLAS, torch raises a plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
