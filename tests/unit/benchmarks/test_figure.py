"""The JSON line of a figure."""

import json
from pathlib import Path

import numpy as np
import pytest

import benchmarks.figure
from benchmarks.figure import emit, quantile

RESULTS = Path(benchmarks.figure.__file__).parent / "results"


def test_quantiles_are_numpys() -> None:
    values = np.random.default_rng(0).random(37).tolist()
    for share in (0.0, 0.25, 0.5, 0.99, 1.0):
        assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)))
    assert quantile([3.0], 0.99) == 3.0


def test_a_line_has_value_reference_and_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    emit("some.figure", [3.0, 1.0, 2.0], "s", [4.0], in_flight=8)
    line = json.loads(capsys.readouterr().out)
    assert (line["value"], line["reference"], line["ratio"], line["repeats"]) == (2.0, 4.0, 0.5, 3)
    assert line["spread"] == [1.5, 2.5]
    assert line["sizes"] == {"in_flight": 8}
    assert line["machine"]["cores"] > 0
    assert line["versions"]["grpcio"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_line_of_the_results_names_its_figure(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines
    assert all(line["figure"] for line in lines)
