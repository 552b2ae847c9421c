"""The default learning rate."""

import json
import pathlib

import pytest

from fovea_rollout.loop.learning_rate import FINE_TUNING_RATE, REINFORCING_RATE, _by_width


def checkpoint(folder: pathlib.Path, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(("width", "rate"), [(128, 1.02e-3), (2000, 1.3e-4), (4096, 7.6e-5)])
def test_it_falls_with_the_width(width: int, rate: float, tmp_path: pathlib.Path) -> None:
    name = checkpoint(tmp_path, model_type="qwen3", hidden_size=width)
    assert _by_width(name, REINFORCING_RATE) == pytest.approx(rate, rel=0.02)


def test_the_width_is_that_of_the_language_part(tmp_path: pathlib.Path) -> None:
    name = checkpoint(tmp_path, model_type="qwen3_vl", text_config={"hidden_size": 128}, vision_config={})
    assert _by_width(name, FINE_TUNING_RATE) == pytest.approx(3.1e-3, rel=0.02)


def test_without_a_width_it_is_the_one_of_2000(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _by_width(str(tmp_path / "nowhere"), REINFORCING_RATE) == REINFORCING_RATE
    assert "is unknown, so the learning rate is 0.00013" in caplog.text
