"""Pickles of plain data: what ranks tell each other, and what DCP writes about a checkpoint.

Whoever can write what is unpickled runs code of its choice, unless the unpickler knows which names it may look up.
These know classes that hold data, and the few functions that rebuild arrays; anything else is refused by name.
"""

import pickle
import traceback
from collections import OrderedDict
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
from google.protobuf.message import Message
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import api, filesystem, metadata, planner, storage
from torch.distributed.checkpoint.api import CheckpointException

from fovea.wire import errors

_DCP = {module.__name__ for module in (filesystem, metadata, planner, storage)}
_OWN = "fovea_services.trainer."
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
    """A pickle names something that plain data does not need. The message says what."""


class MetadataUnpickler(pickle.Unpickler):
    """Reads what DCP writes about a checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        """Looks a global up. Raises NotPlain for one that is not on the list."""
        if (module, name) in _TYPES:
            return _TYPES[module, name]
        if self._is_plain(module, name):
            found = super().find_class(module, name)
            if (module, name) in _FUNCTIONS or self._holds_data(module, found):
                return found
        raise NotPlain(f"it names {module}.{name}, which plain data does not need: it is damaged, or somebody's attack")

    def _is_plain(self, module: str, name: str) -> bool:
        """Whether a name may be imported at all; a dotted one would reach into what is imported."""
        return "." not in name and (module in _DCP or module == "torch" or (module, name) in _FUNCTIONS)

    def _holds_data(self, module: str, found: Any) -> bool:
        """Whether making or calling `found` does nothing but hold data."""
        if module == "torch":
            return isinstance(found, torch.dtype | torch.layout | torch.memory_format)
        # A class of another module may do more, and so does Enum itself: it makes classes.
        return isinstance(found, type) and found.__module__ == module and self._is_data(found)

    def _is_data(self, found: type) -> bool:
        return is_dataclass(found) or issubclass(found, Enum)


class MessageUnpickler(MetadataUnpickler):
    """Reads what ranks tell each other: commands and results, errors, and what DCP plans."""

    def _is_plain(self, module: str, name: str) -> bool:
        ours = module.startswith((_OWN, _MESSAGES)) or module in ("builtins", errors.__name__, api.__name__)
        return super()._is_plain(module, name) or (ours and "." not in name)

    def _is_data(self, found: type) -> bool:
        is_named_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
        # DCP tells all ranks which of them failed, and how, by a CheckpointException: it holds just that.
        return super()._is_data(found) or is_named_tuple or issubclass(found, Message | Exception | CheckpointException)


class MessagePickler(pickle.Pickler):
    """Writes what `MessageUnpickler` reads. Exceptions of other libraries travel as their text."""

    def reducer_override(self, obj: Any) -> Any:
        """Replaces what the other end would refuse."""
        if isinstance(obj, Exception) and type(obj).__module__ not in ("builtins", errors.__name__):
            return RuntimeError, (f"{type(obj).__name__}: {obj}",)
        return NotImplemented


def install() -> None:
    """Has torch's collectives of objects, those of DCP too, write and read plain data alone, in this process."""
    collectives: Any = distributed_c10d
    assert {"_pickler", "_unpickler"} <= vars(collectives).keys(), "this torch pickles in another way"
    collectives._pickler, collectives._unpickler = MessagePickler, MessageUnpickler
