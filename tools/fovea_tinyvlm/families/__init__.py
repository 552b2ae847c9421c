"""Tiny checkpoints of the families that people train: published configurations with fewer and narrower layers.

The layer patterns, special tokens, model class and processor class are those of the published checkpoint that each
declaration names. The weights are random. Sizes in pixels (of tiles and windows) are scaled down, so that an image has
few tokens. The files have the form that transformers 5 writes: processor_config.json, chat_template.jinja.
"""

from fovea_tinyvlm.families.cache import ensure_families, ensure_family
from fovea_tinyvlm.families.declaration import Family
from fovea_tinyvlm.families.registry import FAMILIES, build_family

__all__ = ["FAMILIES", "Family", "build_family", "ensure_families", "ensure_family"]
