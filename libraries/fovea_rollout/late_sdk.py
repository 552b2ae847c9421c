"""The Tinker SDK, imported when it is used: it takes seconds to load, and a wrong address should be reported before."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tinker as tinker


class _Late(ModuleType):
    """A module that is imported when its first attribute is read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


if not TYPE_CHECKING:
    tinker = _Late("tinker")
