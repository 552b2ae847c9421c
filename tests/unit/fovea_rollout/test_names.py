"""Names in `from fovea_rollout import ...`, and the cost of that import."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fovea_rollout

NAMES = sorted(fovea_rollout._MODULE_OF)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_its_modules_own(name: str) -> None:
    module = importlib.import_module(f"fovea_rollout.{fovea_rollout._MODULE_OF[name]}")
    assert getattr(fovea_rollout, name) is vars(module)[name]


def test_type_checkers_see_the_same_names() -> None:
    seen = re.findall(r"from (\S+) import (\S+) as \2\n", Path(fovea_rollout.__file__).read_text())
    assert sorted(seen) == sorted((f"fovea_rollout.{fovea_rollout._MODULE_OF[name]}", name) for name in NAMES)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = fovea_rollout.Nothing


def test_environments_and_templates_need_neither_sdk_nor_gymnasium() -> None:
    program = (
        "import sys; from fovea_rollout import ChatTemplate, Step; print({'tinker', 'gymnasium'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
