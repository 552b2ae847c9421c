"""Writes a static page in the demo's style: the model's answers before and after, in words, and the curves."""

import html
import math
import pathlib
from collections.abc import Iterable, Sequence

from fovea_demo.report import STYLE as DEMO_STYLE
from fovea_real.job import OWN_QUESTIONS, Reinforced, Told
from fovea_real.lessons import says, speaks_like_a_pirate
from fovea_rollout.line_chart import line_chart

STYLE = (
    DEMO_STYLE
    + """
.figure b { font-size: 1.7rem; white-space: nowrap }
.said { width: 100%; border-collapse: collapse; table-layout: fixed } .said td, .said th { text-align: left;
  vertical-align: top; padding: .5rem .6rem; border-bottom: 1px solid var(--line); overflow-wrap: anywhere }
.said th { color: var(--soft); font-weight: 400 } .said th:first-child { width: 26% }
.said .yes { background: var(--right) } .said .no { background: var(--wrong) } .said .was { color: var(--soft) }
@media (max-width: 40rem) { .said thead { display: none } .said tr { display: block; padding: .5rem 0;
  border-bottom: 1px solid var(--line) } .said td { display: block; border: 0; padding: .2rem .5rem }
  .said td:first-child { font-weight: 600 } }
"""
)
Row = tuple[str, str, str, bool]
"""A question, the answers before and after, and whether the later one is right."""


def write_report(path: pathlib.Path, model: str, told: Told, runs: Sequence[Reinforced], total_s: float) -> None:
    """Writes the page as one self-contained file."""
    run = runs[0]
    figures = [
        (f"{told.style(told.first):.0%} → {told.style(told.last):.0%}", "answer like a pirate"),
        (f"{told.right(told.first):.0%} → {told.right(told.last):.0%}", "of these facts are right"),
        (f"{run.score(run.first):.0%} → {run.score(run.last):.0%}", "of held-out sums are right, in a box"),
        (f"{told.equal} of {len(told.held_out)}", "answers of plain transformers equal, token by token"),
        (f"{total_s:.0f} s", "start to report"),
    ]
    boxes = "".join(f'<div class="figure"><b>{value}</b><span>{name}</span></div>' for value, name in figures)
    facts = [
        (fact.question, first, last, speaks_like_a_pirate(last) and says(last, fact.word))
        for fact, first, last in zip(told.held_out, told.first, told.last, strict=True)
    ]
    own = [
        (question, first, last, speaks_like_a_pirate(last))
        for question, first, last in zip(OWN_QUESTIONS, told.own_first, told.own_last, strict=True)
    ]
    sums = [
        (one.question, first, last, one.is_right(last))
        for one, first, last in zip(run.held_out, run.first, run.last, strict=True)
    ]
    rewards = "".join(line_chart(f"Reward of the samples, seed {one.seed}", [math.nan, *one.rewards]) for one in runs)
    path.write_text(
        f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Fovea: a really pretrained model</title>
<style>{STYLE}</style>
<h1>A pretrained model learns to speak, and to calculate</h1>
<p class="sub">{html.escape(model)}, which others have trained. A LoRA fine-tune teaches it the words of a
pirate; a second LoRA learns sums by reinforcement, from rewards alone. Nothing that is shown here was trained on.</p>
<div class="figures">{boxes}</div>
<div class="curves">{line_chart("Loss of the fine-tune", [math.nan, *told.losses])}{rewards}</div>
<h2>Facts that it was not taught</h2>
{_table(facts)}
<h2>Other questions</h2>
<p class="sub">The fine-tune has no questions of these kinds.</p>
{_table(own)}
<h2>Sums that it did not practise</h2>
<p class="sub">The reward is 1 for the right result in \\boxed{{}}, and 0 for all else.</p>
{_table(sums)}</html>
"""
    )


def _table(rows: Iterable[Row]) -> str:
    lines = "".join(
        f'<tr><td>{html.escape(question)}</td><td class="was">{html.escape(first)}</td>'
        f'<td class="{"yes" if is_right else "no"}">{html.escape(last)}</td></tr>'
        for question, first, last, is_right in rows
    )
    head = "<thead><tr><th>Question</th><th>Before</th><th>After</th></tr></thead>"
    return f'<table class="said">{head}{lines}</table>'
