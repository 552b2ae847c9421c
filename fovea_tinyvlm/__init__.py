"""The tiny models that the project builds for itself: real architectures, real processor files, a minute to make.

`qwen3_vl` learns from pictures drawn here (invented signs, coloured shapes, dots), never from digits, so that teaching
it digits afterwards proves that fine-tuning works.
"""

from __future__ import annotations

from fovea_tinyvlm.cache import ensure, ensure_recipe
from fovea_tinyvlm.recipe import KINDS, Kind, Recipe, default_recipe

__all__ = ["KINDS", "Kind", "Recipe", "default_recipe", "ensure", "ensure_recipe"]
