"""The table of the examples' results."""

import json
import pathlib

import pytest

from examples.__main__ import EXAMPLES, OF_OTHERS, keep
from examples.summary import BEGIN, END, PAGE, RESULTS, is_met, table, write

MET = {
    "example": "rl_zoom",
    "seed": 0,
    "cloned": 0.25,
    "before": 0.2,
    "after": 0.9,
    "bar": 0.7,
    "seconds": 300.0,
    "prefix_breaks": 0,
    "largest_log_ratio": 2e-5,
}
MISSED = MET | {"seed": 1, "after": 0.6, "largest_log_ratio": 1e-5}


def test_a_seed_that_misses_its_bar_is_seen() -> None:
    line = table([MET, MISSED]).splitlines()[2]
    assert line == "| `rl_zoom` | 0.25, 0.25 | 0.20, 0.20 | **0.90**, *0.60* | 0.7 | 5, 5 | 0 | 2e-05 |"
    assert (is_met(MET), is_met(MISSED)) == (True, False)


def test_the_table_takes_the_place_of_the_one_before(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    write(page, [MET])
    assert page.read_text() == f"before\n{BEGIN}{table([MET])}{END}after\n"


def test_docs_have_the_results_that_are_kept() -> None:
    rows = json.loads(RESULTS.read_text())
    assert f"{BEGIN}{table(rows)}{END}" in PAGE.read_text(), "run python -m examples.summary"


@pytest.mark.parametrize("row", [row for row in json.loads(RESULTS.read_text()) if "bar" in row])
def test_nothing_kept_broke_a_prefix_or_disagreed(row: dict[str, float]) -> None:
    assert row["example"] in EXAMPLES | OF_OTHERS
    assert row["prefix_breaks"] == 0
    assert row.get("largest_log_ratio", 0.0) < 1e-3


def test_a_run_takes_the_place_of_the_one_before(tmp_path: pathlib.Path) -> None:
    results = tmp_path / "results.json"
    keep(MISSED | {"rewards": [0.12345]}, results)
    keep(MET, results)
    keep(MET | {"after": 1.0}, results)
    rows = json.loads(results.read_text())
    assert [(row["seed"], row["after"]) for row in rows] == [(0, 1.0), (1, 0.6)]
    assert rows[1]["rewards"] == [0.123]
