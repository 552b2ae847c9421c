"""Directories of tiny models with few or no training steps, built once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea_tinyvlm.build import build
from fovea_tinyvlm.recipe import Kind, Recipe


@pytest.fixture(scope="session")
def model_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    """One untrained directory per kind."""
    root = tmp_path_factory.mktemp("tiny-models")
    kinds: tuple[Kind, ...] = ("qwen3_vl", "qwen2_5_vl", "qwen3")
    for kind in kinds:
        build(Recipe(kind=kind), root / kind)
    return {kind: root / kind for kind in kinds}
