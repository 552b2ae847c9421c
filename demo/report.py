"""One static page: the loss curve, the accuracy over steps, and held-out pictures with what the model said."""

import base64
import html
import io
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from demo.digits import QUESTION, Scan
from demo.job import History

GRID_COUNT = 60
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
h1 { margin-bottom: 0 } .sub { color: #57606a; margin-top: .2rem }
.figures { display: flex; gap: 2.5rem; margin: 1.5rem 0; flex-wrap: wrap }
.figure b { display: block; font-size: 2rem; line-height: 1.1 } .figure span { color: #57606a }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(5.6rem, 1fr)); gap: .8rem }
.scan { text-align: center; border-radius: .5rem; padding: .5rem; background: #eaf6ec }
.scan.wrong { background: #fdebe9 } .scan img { width: 4.4rem; image-rendering: pixelated; border-radius: .25rem }
.scan .was { color: #8b949e; text-decoration: line-through; font-size: .85rem }
.plot { width: 100% }
"""


def write_report(path: pathlib.Path, history: History, held_out: list[Scan], result: dict[str, float]) -> None:
    """Writes the page, with everything inside it."""
    figures = [
        (f"{result['accuracy_before']:.1%}", "read right before"),
        (f"{result['accuracy_after']:.1%}", f"read right after, of {len(held_out)} held-out scans"),
        (f"{result['ready_s']:.0f} s", "until all services were ready"),
        (f"{result['total_s']:.0f} s", "start to report"),
    ]
    told = list(zip(held_out, history.first_answers, history.answers, strict=True))
    wrong_first = sorted(told, key=lambda row: row[2] == str(row[0].digit))
    cells = "".join(_cell(*row) for row in wrong_first[:GRID_COUNT])
    boxes = "".join(f'<div class="figure"><b>{value}</b><span>{name}</span></div>' for value, name in figures)
    path.write_text(
        f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Fovea: the main job</title>
<style>{STYLE}</style>
<h1>A vision-language model learns real digits</h1>
<p class="sub">LoRA through the official Tinker SDK, trained by FSDP2, pushed live into vLLM after every epoch, asked
“{html.escape(QUESTION)}”</p>
<div class="figures">{boxes}</div>
<img class="plot" alt="loss and accuracy over steps" src="data:image/svg+xml;base64,{_plot(history)}">
<h2>What it says of scans it never saw</h2>
<p class="sub">Its answer now, and struck through its answer before training. The wrong ones come first, in red.</p>
<div class="grid">{cells}</div></html>
"""
    )


def _cell(scan: Scan, first: str, last: str) -> str:
    picture = base64.b64encode(scan.png).decode()
    kind = "scan" if last == str(scan.digit) else "scan wrong"
    return (
        f'<div class="{kind}"><img alt="{scan.digit}" src="data:image/png;base64,{picture}"><br>'
        f'<b>{html.escape(last) or "∅"}</b> <span class="was">{html.escape(first[:8]) or "∅"}</span></div>'
    )


def _plot(history: History) -> str:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    left.plot(range(1, len(history.losses) + 1), history.losses, color="#0969da", linewidth=1.3)
    left.set(title="Loss of an answer token", xlabel="step", ylabel="negative log-probability", yscale="log")
    steps, shares = zip(*history.accuracies, strict=True)
    right.plot(steps, shares, marker="o", color="#1a7f37")
    right.axhline(0.1, color="#8b949e", linestyle=":", label="chance")
    right.axhline(0.9, color="#bf8700", linestyle=":", label="0.90")
    right.set(title="Held-out accuracy, sampled through vLLM", xlabel="step", ylim=(0, 1.02))
    right.legend(loc="lower right")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    plt.close(figure)
    return base64.b64encode(buffer.getvalue()).decode()
