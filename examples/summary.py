"""`python -m examples.summary`: the table and the curves of docs/lab/learning.md, from examples/results.json."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any

FOLDER = pathlib.Path(__file__).parent
RESULTS = FOLDER / "results.json"
PAGE = FOLDER.parent / "docs" / "lab" / "learning.md"
BEGIN, END = "<!-- python -m examples.summary -->\n", "<!-- end of the table -->\n"
_COLUMNS = ("example", "cloned player", "before", "after", "bar", "minutes", "prefix breaks", "trainer - sampler")

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
    """Returns a table with one line per example of reinforcement learning. Results below the bar are in italics."""
    lines = [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
    measured = (row for row in rows if "bar" in row)
    for name, runs in groupby(measured, key=lambda row: str(row["example"])):
        lines.append(_line(name, list(runs)))
    return "".join(f"{line}\n" for line in lines)


def _largest(log_ratios: Sequence[float | None]) -> str:
    known = [one for one in log_ratios if one is not None]
    return f"{max(known):.0e}" if known else "not kept"


def is_met(row: Row) -> bool:
    """Returns whether a run reached its bar."""
    return bool(row["after"] >= row["bar"])


def write(page: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes the table between its two marks in the page."""
    text = page.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    page.write_text(before + table(rows) + after)


def _line(name: str, runs: Sequence[Row]) -> str:
    after = ", ".join(f"**{run['after']:.2f}**" if is_met(run) else f"*{run['after']:.2f}*" for run in runs)
    cells = (
        f"`{name}`",
        ", ".join(f"{run['cloned']:.2f}" for run in runs),
        ", ".join(f"{run['before']:.2f}" for run in runs),
        after,
        f"{runs[-1]['bar']:g}",
        ", ".join(f"{run['seconds'] / 60:.0f}" for run in runs),
        str(sum(run["prefix_breaks"] for run in runs)),
        _largest([run.get("largest_log_ratio") for run in runs]),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    from examples.chart import draw_curves  # matplotlib takes a second to load

    measured = json.loads(RESULTS.read_text())
    write(PAGE, measured)
    draw_curves(measured, PAGE.with_suffix(".png"))
