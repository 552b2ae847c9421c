import pathlib

import pytest
from PIL import Image

from examples.chart import draw_curves


def row(example: str, seed: int, steps: int) -> dict[str, object]:
    return {"example": example, "seed": seed, "before": 0.1, "after": 0.9, "rewards": [0.1] * steps}


@pytest.mark.parametrize(("examples", "lines"), [(1, 1), (3, 1), (4, 2)])
def test_every_example_has_a_panel(tmp_path: pathlib.Path, examples: int, lines: int) -> None:
    rows = [row(f"example-{number}", seed, 3 + 40 * number) for number in range(examples) for seed in (0, 1)]
    rows.append({"example": "of-preferences", "seed": 0, "before": 0.1, "after": 0.9})
    draw_curves(rows, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        width, height = picture.size
    assert height == pytest.approx(width * lines * 2.5 / (3 * 3.6), rel=0.01)
