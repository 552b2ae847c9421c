"""Rows of docs/models.md that differ most: packed training and rendered images against the family's own code."""

import pytest

from parity import renderer_part, trainer_part
from tinyvlm.families import ensure_family

DIFFERENT = ("qwen3_vl", "gemma3_text")


@pytest.mark.parametrize("name", DIFFERENT)
def test_renderer_and_trainer_equal_the_family_s_own(name: str) -> None:
    directory = ensure_family(name)
    for part in (renderer_part, trainer_part):
        finding = part.check(directory)
        assert finding.works, finding.says
