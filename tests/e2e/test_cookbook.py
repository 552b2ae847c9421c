"""The real tinker-cookbook in its own environments, against a separate Fovea; set `FOVEA_COOKBOOK=1` to run it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from cookbook.environments import ENVIRONMENTS
from cookbook.recipes import RECIPES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2700),
    pytest.mark.skipif(
        os.environ.get("FOVEA_COOKBOOK") != "1", reason="builds two client environments; set FOVEA_COOKBOOK=1 to run it"
    ),
]


def test_every_recipe_of_both_versions_does_what_it_should(tmp_path: pathlib.Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "cookbook", "--json", str(results), "--work", str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(results.read_text())
    ran = {(row["recipe"], row["version"]) for row in rows}
    assert ran == {(recipe.name, version) for recipe in RECIPES for version in ENVIRONMENTS}
    assert all(row["ok"] for row in rows)
    assert {check for row in rows for check in row["checks"]} >= {"C100", "C117", "C118", "C119"}
