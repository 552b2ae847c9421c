"""Line charts as inline SVG for the page of `viewer.py` and for pages of their own, without matplotlib.

The charts use the page's colours, light and dark, and show the value of a point under the pointer.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 336, 132, 44, 8, 18

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #5b6470; --line: #e1e5ea; --accent: #0b6bcb }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #101418; --ink: #e4e8ed; --soft: #9aa5b1; --line: #2b323b; --accent: #62aef7 }}
}}
body {{ margin: 1.5rem; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }}
h1 {{ margin: 0; font-size: 1.35rem; overflow-wrap: anywhere }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 0 2rem }}
.curve {{ margin: 1.2rem 0 0; max-width: 40rem }} .curve svg {{ display: block; width: 100%; height: auto }}
.curve figcaption {{ display: flex; justify-content: space-between; color: var(--soft) }}
.curve b {{ color: var(--ink) }}
.grid {{ stroke: var(--line) }} text {{ fill: var(--soft); font-size: 10px }}
.area {{ fill: var(--accent); opacity: .1 }}
.path {{ fill: none; stroke: var(--accent); stroke-width: 1.8 }}
.dot {{ fill: var(--accent) }} .hit {{ fill: transparent }} .hit:hover {{ fill: var(--accent) }}
</style>
<h1>{title}</h1>
<main>{charts}</main>
"""


def write_charts(path: Path, title: str, curves: Mapping[str, Sequence[float]]) -> None:
    """Writes charts as one static page that fetches nothing.

    Args:
        path: The file to write.
        title: Title of the page.
        curves: One number per step for each named curve; NaN for steps without a number.
    """
    charts = "".join(line_chart(name, values) for name, values in curves.items())
    path.write_text(_PAGE.format(title=html.escape(title), charts=charts), encoding="utf-8")


def line_chart(name: str, values: Sequence[float]) -> str:
    """Returns an HTML figure of one number per step. Steps without a finite number are skipped."""
    points = [(step, value) for step, value in enumerate(values) if math.isfinite(value)]
    label = html.escape(name)
    if not points:
        return f'<figure class="curve"><figcaption><span>{label}</span><b>–</b></figcaption></figure>'
    first, latest = _short(points[0][1]), _short(points[-1][1])
    low, high = _range([value for _, value in points])
    last = max(len(values) - 1, 1)

    def place(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + step / last * (_WIDTH - _LEFT - 6)
        y = _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    places = [place(step, value) for step, value in points]
    path = " L".join(f"{x} {y}" for x, y in places)
    floor = _HEIGHT - _BOTTOM
    area = f"M{places[0][0]} {floor} L{path} L{places[-1][0]} {floor} Z"
    grid = "".join(_grid_line(place(0, value)[1], value) for value in (low, (low + high) / 2, high))
    hits = "".join(
        f'<circle class="hit" cx="{x}" cy="{y}" r="5"><title>step {step}: {value:.4g}</title></circle>'
        for (x, y), (step, value) in zip(places, points, strict=True)
    )
    dot = f'<circle class="dot" cx="{places[-1][0]}" cy="{places[-1][1]}" r="3"/>'
    steps = f'<text x="{_LEFT}" y="{_HEIGHT - 4}">0</text>'
    steps += f'<text x="{_WIDTH - 6}" y="{_HEIGHT - 4}" text-anchor="end">step {len(values) - 1}</text>'
    return (
        f'<figure class="curve"><figcaption><span>{label}</span><b>{first} → {latest}</b></figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}, from {first} to {latest}">{grid}'
        f'<path class="area" d="{area}"/><path class="path" d="M{path}"/>{dot}{hits}{steps}</svg></figure>'
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Returns the range of the axis. It begins at 0 if that is near, so that a curve does not look too steep."""
    low, high = min(values), max(values)
    if low > 0 and low < 0.7 * high:
        low = 0.0
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    return low, high


def _grid_line(y: float, value: float) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 6}" y1="{y}" y2="{y}"/>'
        f'<text x="{_LEFT - 5}" y="{y + 3.5}" text-anchor="end">{_short(value)}</text>'
    )


def _short(value: float) -> str:
    """Writes a number with three digits: 0.982, 12.5, 2.1e-8."""
    if value != 0 and not 1e-3 <= abs(value) < 1e4:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.3g}"
