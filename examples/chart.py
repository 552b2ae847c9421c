"""Reward curves of the examples as PNG files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WINDOW = 9


def draw_curves(runs: Sequence[pathlib.Path], path: pathlib.Path) -> None:
    """Mean reward per turn of each step's rollouts, one line per run, smoothed by a centred mean over nine steps.

    Args:
        runs: Files that `Experiment.write` wrote, all of one example.
        path: Of the PNG.
    """
    found = [json.loads(run.read_text()) for run in runs]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run in found:
        rewards = np.array(run["rewards"], dtype=np.float64)
        (line,) = axes.plot(rewards, alpha=0.2, linewidth=0.8)
        share = f"held out {run['before']:.2f} → {run['after']:.2f} (cloned {run['cloned']:.2f})"
        axes.plot(smoothed(rewards), color=line.get_color(), label=f"seed {run['seed']}: {share}")
    axes.set(title=found[0]["example"], xlabel="step", ylabel="mean reward per turn", ylim=(None, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred means, over what there is at the ends."""
    kernel = np.ones(WINDOW)
    return np.asarray(np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same"))
