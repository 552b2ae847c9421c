"""What differs between model families. A new family is a new file here that defines `FAMILY`; nothing else changes."""

import importlib
import pkgutil
from typing import Any

from services.sampler.families.base import Family

__all__ = ["Family", "family_of"]


def family_of(config: dict[str, Any]) -> Family:
    """The family of a checkpoint, by its Hugging Face configuration.

    Raises ValueError, listing the known ones, for a model with a vision tower or experts that no file here describes.
    """
    known: list[str] = []
    for module_info in pkgutil.iter_modules(__path__):
        family: type[Family] | None = getattr(importlib.import_module(f"{__name__}.{module_info.name}"), "FAMILY", None)
        if family is None:
            continue
        if family.describes(config):
            return family(config)
        known.append(module_info.name)
    raise ValueError(
        f"model_type {config.get('model_type')!r} is not supported; known: {', '.join(sorted(known))} (any dense "
        "language model; training takes qwen3 only)"
    )
