"""Pickling of plain data: messages between ranks, and the metadata that DCP writes about a checkpoint.

An attacker that controls a pickle can run any code, unless the unpickler restricts the names it looks up. These
unpicklers allow data classes and the few functions that rebuild arrays. For anything else the error names what was
requested.
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
    """A pickle refers to something that plain data does not need. The message names it."""


class MetadataUnpickler(pickle.Unpickler):
    """Reads the metadata that DCP writes about a checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        """Looks up a global.

        Raises:
            NotPlain: The name is not allowed.
        """
        if (module, name) in _TYPES:
            return _TYPES[module, name]
        if self._is_plain(module, name):
            found = super().find_class(module, name)
            if (module, name) in _FUNCTIONS or self._holds_data(module, found):
                return found
        raise NotPlain(f"it names {module}.{name}, which plain data does not need: it is damaged, or malicious")

    def _is_plain(self, module: str, name: str) -> bool:
        """Returns True if a name may be imported. Dotted names are rejected, because they reach into objects."""
        return "." not in name and (module in _DCP or module == "torch" or (module, name) in _FUNCTIONS)

    def _holds_data(self, module: str, found: Any) -> bool:
        """Returns True if creating or calling `found` has no effect besides holding data."""
        if module == "torch":
            return isinstance(found, torch.dtype | torch.layout | torch.memory_format)
        # A class imported from another module may do more. Enum itself is excluded too, since it creates classes.
        return isinstance(found, type) and found.__module__ == module and self._is_data(found)

    def _is_data(self, found: type) -> bool:
        return is_dataclass(found) or issubclass(found, Enum)


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


def install() -> None:
    """Makes torch's object collectives, including DCP's, use plain data only, in this process."""
    collectives: Any = distributed_c10d
    assert {"_pickler", "_unpickler"} <= vars(collectives).keys(), "this version of torch pickles differently"
    collectives._pickler, collectives._unpickler = MessagePickler, MessageUnpickler
