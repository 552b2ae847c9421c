"""Builds all tiny families for the first test that needs one: a single build takes eight seconds, mostly imports."""

from pathlib import Path

from fovea_tinyvlm.cache import ensure
from fovea_tinyvlm.families import FAMILIES, ensure_families
from fovea_tinyvlm.recipe import KINDS


def ensure_family(name: str) -> Path:
    """Returns a family's folder, like `fovea_tinyvlm.families.ensure_family`."""
    return ensure(name) if name in KINDS else ensure_families([*FAMILIES])[name]
