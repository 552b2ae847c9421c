"""Names in `from fovea_data import ...`, and the requirements of that import."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fovea_data

NAMES = sorted(fovea_data._MODULE_OF)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_its_modules_own(name: str) -> None:
    module = importlib.import_module(fovea_data._MODULE_OF[name])
    assert getattr(fovea_data, name) is vars(module)[name]


def test_type_checkers_see_the_same_names() -> None:
    seen = re.findall(r"from (\S+) import (\S+) as \2\n", Path(fovea_data.__file__).read_text())
    assert sorted(seen) == sorted((fovea_data._MODULE_OF[name], name) for name in NAMES)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = fovea_data.Nothing


def test_it_needs_neither_torch_nor_vllm() -> None:
    program = "import sys; sys.modules.update(torch=None, vllm=None); import fovea_data.fine_tuning"
    subprocess.run([sys.executable, "-c", program], check=True)
