"""Reinforcement learning with Geometry-3K's protocol on drawn problems: thinking, a scoring tool, `\\boxed{}`.

The example writes rows in the format of the recipe, with JPEG pictures, and reads them like a real dataset.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import pathlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from examples.experiment import Experiment, read_arguments
from fovea_rollout import Chunk, LoopSettings, Picture, RolloutSettings, SamplingSettings, load_records, run
from fovea_rollout.environments.geometry3k_environment import MAX_TURNS, Geometry3kEnvironment, geometry3k_environment
from fovea_rollout.environments.records import Record

SIDE, UNIT, WIDEST = 64, 16, 3
QUESTION = "How long is the diagonal, in squares?"
TOOL_SHARE = 0.5
"""Share of answers that the cloned player scores with the tool first."""
BAR = 0.75
"""Mean reward that the model should reach. A blind model can at best try the three likeliest of the six answers, which
gives 0.67."""
INK, PAPER, LINE = (40, 60, 220), (250, 250, 250), (150, 150, 150)

Pixels = npt.NDArray[np.uint8]


def draw_rectangle(width: int, height: int, column: int, row: int) -> Pixels:
    """Draws a filled rectangle on squared paper, uint8 [64, 64, 3]."""
    pixels = np.full((SIDE, SIDE, 3), PAPER, np.uint8)
    pixels[row * UNIT : (row + height) * UNIT, column * UNIT : (column + width) * UNIT] = INK
    pixels[::UNIT] = pixels[:, ::UNIT] = LINE
    return pixels


def read_rectangle(pixels: Pixels) -> tuple[int, int]:
    """Returns width and height in squares of a picture of `draw_rectangle`, also after JPEG compression."""
    centres = pixels[UNIT // 2 :: UNIT, UNIT // 2 :: UNIT].astype(int)
    is_inked = np.abs(centres - INK).sum(axis=2) < np.abs(centres - PAPER).sum(axis=2)
    return int(is_inked.any(axis=0).sum()), int(is_inked.any(axis=1).sum())


def diagonal(width: int, height: int) -> str:
    """Returns the length of the diagonal in the dataset's notation: `2 \\sqrt { 2 }`."""
    square = width**2 + height**2
    factor = max(one for one in (1, 2, 3) if square % one**2 == 0)
    root = f"\\sqrt {{ {square // factor**2} }}"
    return root if factor == 1 else f"{factor} {root}"


def draw_row(rng: np.random.Generator, split: str, index: int) -> dict[str, Any]:
    """Draws a row in the format of the recipe. All widths and heights are equally likely."""
    width, height = (int(side) for side in rng.integers(1, WIDEST + 1, size=2))
    column, row = (int(rng.integers(SIDE // UNIT - side + 1)) for side in (width, height))
    file = io.BytesIO()
    Image.fromarray(draw_rectangle(width, height, column, row)).save(file, "JPEG", quality=90)
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    answer = diagonal(width, height)
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    return {
        "prompt": [{"role": "user", "content": content}],
        "env_class": "geometry3k",
        "reward_spec": {"method": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "problem": f"<image>{QUESTION}", "answer": answer},
    }


def write_rows(path: pathlib.Path, rng: np.random.Generator, count: int) -> list[Record]:
    """Writes problems to a file of JSON lines, and reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps(draw_row(rng, path.stem, index)) for index in range(count))
    path.write_text("".join(f"{row}\n" for row in rows))
    return load_records(path)


class Player:
    """Describes its picture in its thinking, and then answers at random, in half of the cases with the tool."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def answer(self, prompt: Sequence[Chunk]) -> str:
        """Returns an answer to a prompt."""
        pictures = [chunk for chunk in prompt if isinstance(chunk, Picture)]
        width, height = read_rectangle(pictures[-1].pixels)
        guess = diagonal(*(int(side) for side in self._rng.integers(1, WIDEST + 1, size=2))).replace(" ", "")
        thought = f"<think>\n{width} by {height}\n</think>\n\n"
        if self._rng.random() > TOOL_SHARE:
            return f"{thought}\\boxed{{{guess}}}"
        call = json.dumps({"name": "calc_score", "arguments": {"answer": guess}})
        return f"{thought}<tool_call>{call}</tool_call>"


def sources_of(records: Sequence[Record]) -> list[partial[Geometry3kEnvironment]]:
    """Returns one source of rollouts per record."""
    return [partial(geometry3k_environment, record.columns) for record in records]


async def main(arguments: argparse.Namespace) -> None:
    """Runs the example."""
    rng = np.random.default_rng(arguments.seed)
    folder = arguments.out / f"geometry3k-{arguments.seed}"
    held_out = sources_of(write_rows(folder / "test.jsonl", rng, arguments.held_out))
    train = sources_of(write_rows(folder / "train.jsonl", rng, 400))
    rollout = RolloutSettings(SamplingSettings(max_tokens=64, seed=arguments.seed), max_turns=MAX_TURNS)
    experiment = await Experiment.begin("rl_geometry3k", arguments, rollout)
    settings = LoopSettings(arguments.steps, arguments.groups, rollout=rollout, seed=arguments.seed)
    await experiment.run(train, held_out, Player(rng).answer, settings, BAR)


if __name__ == "__main__":
    run(main(read_arguments(__doc__, steps=90, warm_up=600)))
