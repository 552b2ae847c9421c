"""Writes verdicts as a table, as JSON and as a page."""

import html
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table
from rich.text import Text

from fovea_conformance.check import Status
from fovea_conformance.runner import Verdict
from fovea_conformance.target import Options

_COLOURS = {
    Status.PASSED: "green",
    Status.FAILED: "red",
    Status.REFUSED: "yellow",
    Status.NOT_APPLICABLE: "bright_black",
}
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Tinker API conformance</title><style>
:root{color-scheme:light dark;--page:#fff;--ink:#1c2330;--soft:#566070;--line:#e4e7ec;
--good:#13713b;--bad:#b3261e;--refused:#8a5a00}
@media(prefers-color-scheme:dark){:root{--page:#101418;--ink:#e4e8ed;--soft:#9aa5b1;--line:#2b323b;
--good:#5fd08f;--bad:#ff8a80;--refused:#e3b341}}
body{font:15px/1.5 system-ui,sans-serif;margin:2.5rem auto;max-width:70rem;padding:0 1rem;color:var(--ink);
background:var(--page)}
h1{font-size:1.5rem;margin:0}p{color:var(--soft)}table{border-collapse:collapse;width:100%%;margin-top:1rem}
td,th{padding:.35rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
td:nth-child(2){white-space:nowrap}td:nth-child(5),th:nth-child(5){text-align:right;white-space:nowrap}
td:nth-child(4){color:var(--soft);font-size:13px;overflow-wrap:anywhere}
.passed{color:var(--good)}.failed{color:var(--bad);font-weight:600}.refused{color:var(--refused)}
.not_applicable{color:var(--soft)}
@media(max-width:40rem){tr:first-child{display:none}tr{display:grid;grid-template-columns:auto 1fr auto;gap:0 .8rem;
padding:.5rem 0;border-bottom:1px solid var(--line)}td{border:0;padding:0}td:nth-child(3),td:nth-child(4){
grid-column:1/-1;order:1}}
</style><h1>Tinker API conformance</h1><p>%s</p><p>%s</p>
<table><tr><th>Check</th><th>Verdict</th><th>What it says</th><th>What was seen</th><th>s</th></tr>%s</table></html>
"""


def summary(verdicts: Iterable[Verdict]) -> str:
    """Returns the number of checks by status, as text."""
    counts = Counter(verdict.status for verdict in verdicts)
    return ", ".join(f"{counts[status]} {status.replace('_', ' ')}" for status in Status if counts[status])


def table(verdicts: Iterable[Verdict], title: str) -> Table:
    """Returns a table with one verdict per row."""
    grid = Table(title=title, title_justify="left", show_lines=False)
    for column in ("check", "verdict", "what it says", "what was seen"):
        grid.add_column(column, overflow="fold")
    for verdict in verdicts:
        words = Text(verdict.status.replace("_", " "), style=_COLOURS[verdict.status])
        grid.add_row(verdict.check.check_id, words, Text(verdict.check.title), Text(verdict.detail[:300]))
    return grid


def write_json(verdicts: Iterable[Verdict], path: Path) -> None:
    """Writes a list of `{id, status, detail}` with title, section and seconds."""
    listed = [
        {
            "id": verdict.check.check_id,
            "status": verdict.status.value,
            "detail": verdict.detail,
            "title": verdict.check.title,
            "section": verdict.check.section,
            "seconds": round(verdict.seconds, 2),
        }
        for verdict in verdicts
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(listed, indent=1) + "\n")


def write_html(verdicts: list[Verdict], options: Options, path: Path) -> None:
    """Writes one static page."""
    rows = "".join(
        f'<tr><td>{verdict.check.check_id}</td><td class="{verdict.status}">{verdict.status.replace("_", " ")}</td>'
        f"<td>{html.escape(verdict.check.title)}</td><td>{html.escape(verdict.detail)}</td>"
        f"<td>{verdict.seconds:.1f}</td></tr>"
        for verdict in verdicts
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    where = html.escape(f"{options.base_url}, model {options.model}")
    path.write_text(_PAGE % (where, html.escape(summary(verdicts)), rows))
