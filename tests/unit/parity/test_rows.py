"""The rows of docs/reference/models.md that differ most: rendered images and packed training against transformers."""

import pytest

from fovea_parity import renderer_part, trainer_part
from tests.families import ensure_family


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "internvl", "llava_onevision", "minicpmv4_6"])
def test_the_renderer_makes_what_the_family_s_processor_makes(name: str) -> None:
    finding = renderer_part.check(ensure_family(name))
    assert finding.works, finding.says


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "idefics3", "qwen3_omni_moe"])
def test_packed_training_is_the_family_s_own(name: str) -> None:
    finding = trainer_part.check(ensure_family(name))
    assert finding.works, finding.says
