"""The cache: one build per recipe, names that follow the recipe, and no visible partial build."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest

from fovea_tinyvlm.cache import ensure_recipe, fingerprint
from fovea_tinyvlm.recipe import Recipe

RECIPE = Recipe(kind="qwen3")


def test_fingerprint_follows_the_recipe() -> None:
    assert fingerprint(RECIPE) == fingerprint(Recipe(kind="qwen3"))
    assert len({fingerprint(Recipe(kind="qwen3", seed=seed)) for seed in range(3)}) == 3


def test_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = tmp_path / "python"  # -m fovea_tinyvlm.build RECIPE DIRECTORY
    fails.write_text('#!/bin/sh\ntouch "$4/config.json"\nexit 3\n')
    fails.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fails))
    monkeypatch.setenv("FOVEA_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="failed with exit status 3"):
        ensure_recipe(RECIPE)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def _ensure(recipe: Recipe) -> str:
    return str(ensure_recipe(recipe))


@pytest.mark.slow
def test_two_processes_build_a_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEA_CACHE", str(tmp_path))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.map(_ensure, [RECIPE, RECIPE])
    assert first == second
    assert [str(path) for path in tmp_path.iterdir() if path.is_dir()] == [first]
    modified = Path(first, "model.safetensors").stat().st_mtime_ns
    assert _ensure(RECIPE) == first, "a later call must not build either"
    assert Path(first, "model.safetensors").stat().st_mtime_ns == modified


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        Recipe(kind="gpt")  # type: ignore[arg-type]
