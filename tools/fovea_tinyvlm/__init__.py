"""Builds the project's own tiny models, with real architectures and processor files, in about a minute each.

`qwen3_vl` is pre-trained on generated pictures (invented signs, coloured shapes, dots) but never on digits. If it
learns digits afterwards, fine-tuning works.
"""

from __future__ import annotations

from fovea_tinyvlm.cache import ensure, ensure_recipe
from fovea_tinyvlm.recipe import KINDS, Kind, Recipe, default_recipe

__all__ = ["KINDS", "Kind", "Recipe", "default_recipe", "ensure", "ensure_recipe"]
