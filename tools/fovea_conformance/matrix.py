"""Writes the matrix in docs/reference/tinker.md from the suite's JSON: `python -m fovea_conformance.matrix`."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VERDICTS = ROOT / "docs" / "reference" / "conformance.json"
PAGE = ROOT / "docs" / "reference" / "tinker.md"
BEGIN, END = "<!-- matrix: made by `make conformance` -->\n", "<!-- end of matrix -->\n"
_SECTIONS = {
    "A": "Start-up, authentication, sessions",
    "B": "Futures",
    "C": "Order and idempotency",
    "D": "Sampling",
    "E": "Training",
    "F": "Images",
    "G": "Checkpoints, REST, the SDK's command line",
    "H": "The cookbook, end to end",
    "I": "Several base models, and what SDK 0.39 adds",
    "J": "Recorded samples and stable_reinforce",
    "K": "Projects, the search for sessions, the audit log",
}


def matrix(verdicts: list[dict[str, Any]]) -> str:
    """Returns Markdown with one table per section and one row per check, with the reason of a refusal."""
    parts = []
    for section, rows in groupby(verdicts, key=lambda verdict: verdict["section"]):
        lines = [f"### {section}. {_SECTIONS[section]}\n", "| check | what it says | verdict |", "|---|---|---|"]
        for row in rows:
            reason = "" if row["status"] == "passed" else f": {_cell(row['detail'])}"
            lines.append(f"| {row['id']} | {_cell(row['title'])} | {row['status'].replace('_', ' ')}{reason} |")
        parts.append("\n".join(lines))
    passed = sum(row["status"] == "passed" for row in verdicts)
    return f"{passed} of {len(verdicts)} passed.\n\n" + "\n\n".join(parts) + "\n"


def with_matrix(page: str, verdicts: list[dict[str, Any]]) -> str:
    """Returns the page with a new matrix. Raises ValueError if the page has no marks for it."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks the lines {BEGIN!r} and {END!r}")
    return head + BEGIN + matrix(verdicts) + END + tail


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(with_matrix(PAGE.read_text(), json.loads(VERDICTS.read_text())))
