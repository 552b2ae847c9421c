"""Tiny checkpoints of the families that people train: published configurations with fewer, narrower layers.

Layer patterns, special tokens, model and processor classes are those of the published checkpoint that each declaration
names; the weights are random. What numbers of pixels say (side of a tile, of a window) is scaled down so that an image
has few tokens. Files are what transformers 5 writes: processor_config.json, chat_template.jinja.
"""

from fovea_tinyvlm.families.cache import ensure_families, ensure_family
from fovea_tinyvlm.families.declaration import Family
from fovea_tinyvlm.families.registry import FAMILIES, build_family

__all__ = ["FAMILIES", "Family", "build_family", "ensure_families", "ensure_family"]
