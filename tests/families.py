"""The tiny families, all built by the first test that wants one: each alone takes eight seconds, most of it imports."""

from pathlib import Path

from fovea_tinyvlm.cache import ensure
from fovea_tinyvlm.families import FAMILIES, ensure_families
from fovea_tinyvlm.recipe import KINDS


def ensure_family(name: str) -> Path:
    """As `fovea_tinyvlm.families.ensure_family`."""
    return ensure(name) if name in KINDS else ensure_families([*FAMILIES])[name]
