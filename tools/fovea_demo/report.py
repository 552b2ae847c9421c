"""Writes a static page: the loss, the accuracy over steps, and held-out pictures with the model's answers.

The page has a light and a dark form, fits a phone, and loads nothing from other servers.
"""

import base64
import html
import math
import pathlib

from fovea_demo.digits import QUESTION, Scan
from fovea_demo.job import History
from fovea_rollout.line_chart import line_chart

GRID_COUNT = 60
STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #57606a; --line: #e1e5ea; --accent: #0b6bcb;
  --right: #eaf6ec; --wrong: #fdebe9; --bad: #b3261e }
@media (prefers-color-scheme: dark) { :root { --page: #101418; --ink: #e4e8ed; --soft: #9aa5b1; --line: #2b323b;
  --accent: #62aef7; --right: #16291d; --wrong: #3a1d1c; --bad: #ff8a80 } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: var(--ink);
  background: var(--page) }
h1 { margin: 0; line-height: 1.2 } .sub { color: var(--soft); margin-top: .4rem }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: 1.2rem 2rem;
  margin: 1.5rem 0 }
.figure b { display: block; font-size: 2rem; line-height: 1.1 } .figure span { color: var(--soft) }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(18rem, 100%), 1fr)); gap: 1.6rem }
.curve { margin: 0 } .curve figcaption { display: flex; justify-content: space-between; gap: 1rem; color: var(--soft) }
.curve figcaption b { color: var(--ink); white-space: nowrap } .curve svg { display: block; width: 100%; height: auto }
.curve .grid { stroke: var(--line) } .curve text { fill: var(--soft); font-size: 10px }
.curve .area { fill: var(--accent); opacity: .1 } .curve .path { fill: none; stroke: var(--accent); stroke-width: 1.8 }
.curve .dot { fill: var(--accent) } .curve .hit { fill: transparent } .curve .hit:hover { fill: var(--accent) }
.scans { display: grid; grid-template-columns: repeat(auto-fill, minmax(5.6rem, 1fr)); gap: .8rem }
.scan { text-align: center; border-radius: .5rem; padding: .5rem; background: var(--right) }
.scan.wrong { background: var(--wrong) } .scan img { width: 4.4rem; image-rendering: pixelated; border-radius: .25rem }
.scan .is { color: var(--bad); white-space: nowrap }
.scan .was { color: var(--soft); text-decoration: line-through; font-size: .85rem }
"""


def write_report(path: pathlib.Path, history: History, held_out: list[Scan], result: dict[str, float]) -> None:
    """Writes the page as one self-contained file."""
    figures = [
        (f"{result['accuracy_before']:.1%}", "read right before"),
        (f"{result['accuracy_after']:.1%}", f"read right after, of {len(held_out)} held-out scans"),
        *([(f"{result['ready_s']:.0f} s", "until all services were ready")] if result["ready_s"] else []),
        (f"{result['total_s']:.0f} s", "start to report"),
    ]
    told = list(zip(held_out, history.first_answers, history.answers, strict=True))
    wrong_first = sorted(told, key=lambda row: row[2] == str(row[0].digit))
    cells = "".join(_cell(*row) for row in wrong_first[:GRID_COUNT])
    boxes = "".join(f'<div class="figure"><b>{value}</b><span>{name}</span></div>' for value, name in figures)
    path.write_text(
        f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Fovea: the main job</title>
<style>{STYLE}</style>
<h1>A vision-language model learns real digits</h1>
<p class="sub">LoRA through the official Tinker SDK, trained by FSDP2, pushed live into vLLM after every epoch, asked
“{html.escape(QUESTION)}”</p>
<div class="figures">{boxes}</div>
<div class="curves">{_curves(history)}</div>
<h2>What it says of scans it never saw</h2>
<p class="sub">Its answer now, and struck through its answer before training. The wrong ones come first, in red, with
the right digit.</p>
<div class="scans">{cells}</div></html>
"""
    )


def _cell(scan: Scan, first: str, last: str) -> str:
    picture = base64.b64encode(scan.png).decode()
    is_right = last == str(scan.digit)
    right = "" if is_right else f'<span class="is">is {scan.digit}</span> '
    return (
        f'<div class="{"scan" if is_right else "scan wrong"}">'
        f'<img alt="a scan of {scan.digit}" src="data:image/png;base64,{picture}"><br>'
        f'<b>{html.escape(last) or "∅"}</b> {right}<span class="was">{html.escape(first[:8]) or "∅"}</span></div>'
    )


def _curves(history: History) -> str:
    measured = dict(history.accuracies)
    accuracies = [measured.get(step, math.nan) for step in range(max(measured) + 1)]
    loss = line_chart("Loss of an answer token", [math.nan, *history.losses])
    return loss + line_chart("Held-out accuracy (chance: 0.1)", accuracies)
