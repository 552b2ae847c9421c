"""Draws the reward curves of the examples into one PNG file."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WINDOW = 9
_COLUMNS, _WIDTH, _HEIGHT = 3, 3.6, 2.5  # width and height of a panel in inches


def draw_curves(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws one panel per example: the mean reward per turn of each step, one line per seed, smoothed over nine steps.

    Args:
        rows: Results of `Experiment.write`, sorted by example. Results without a curve are left out.
        path: The PNG file to write.
    """
    drawn = [row for row in rows if row.get("rewards")]
    examples = [(name, list(runs)) for name, runs in groupby(drawn, key=lambda row: str(row["example"]))]
    lines = -(-len(examples) // _COLUMNS)
    figure, panels = plt.subplots(
        lines, _COLUMNS, figsize=(_COLUMNS * _WIDTH, lines * _HEIGHT), layout="constrained", squeeze=False
    )
    for panel in panels.flat[len(examples) :]:
        panel.axis("off")
    for panel, (name, runs) in zip(panels.flat, examples, strict=False):
        for run in runs:
            rewards = np.array(run["rewards"], dtype=np.float64)
            (line,) = panel.plot(rewards, alpha=0.2, linewidth=0.8)
            label = f"{run['seed']}: {run['before']:.2f} → {run['after']:.2f}"
            panel.plot(smoothed(rewards), color=line.get_color(), label=label)
        panel.set_title(name, fontsize=10)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(title="seed: held out before → after", title_fontsize=7, fontsize=7, frameon=False, loc="best")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("mean reward per turn", fontsize=9)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Returns centred moving means. At the ends they are over fewer values."""
    kernel = np.ones(WINDOW)
    return np.asarray(np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same"))
