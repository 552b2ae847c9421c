"""Draws the README's animation: walks of `rl_gridworld` before and after training, seen from above.

    python -m examples rl_gridworld
    python -m examples.walk_animation examples/out/rl_gridworld-0.html docs/pictures/walk.gif

The model's words come from the page of the run. They are replayed in the same rooms, because the pictures of the page
show the agent's view.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import gymnasium
import minigrid  # noqa: F401  (registers its environments)
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from examples.rl_gridworld import MAX_STEPS, RULES

TILE, COLUMNS, ROWS, GAP, HEAD = 18, 4, 3, 10, 34
"""Pixels of a square of a room; columns and rows of rooms; pixels between the rooms; pixels of the title."""
SIDE = 5 * TILE
GROUND, INK, GOOD, BAD = (250, 250, 250), (30, 34, 40), (26, 127, 55), (190, 60, 50)
FRAME_MS, LAST_MS = 550, 2200


def walk(seed: int, words: Sequence[str]) -> tuple[list[Image.Image], bool]:
    """Returns the pictures before and after each word, and whether the goal was reached."""
    room: Any = gymnasium.make(
        "MiniGrid-Empty-Random-5x5-v0", render_mode="rgb_array", max_steps=MAX_STEPS, highlight=False, tile_size=TILE
    )
    room.reset(seed=seed)
    pictures, is_there = [Image.fromarray(room.render())], False
    for word in words:
        if word in RULES.actions and not is_there:
            _, reward, *_ = room.step(RULES.actions[word])
            is_there = float(reward) > 0
        pictures.append(Image.fromarray(room.render()))
    room.close()
    return pictures, is_there


def words_of(page: pathlib.Path, moment: str) -> list[list[str]]:
    """Returns the model's words in each walk of the evaluation with this name."""
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert data is not None, f"{page} is not a page of rollouts"
    trajectories = json.loads(data[1])["trajectories"]
    return [
        [turn["text"].strip().lower() for turn in one["turns"]]
        for one in trajectories
        if one["conversation"].startswith(moment)
    ]


def draw(page: pathlib.Path, seeds: Sequence[int]) -> list[Image.Image]:
    """Draws the frames."""
    width = COLUMNS * SIDE + (COLUMNS - 1) * GAP
    frames = [
        Image.new("RGB", (2 * width + 5 * GAP, HEAD + ROWS * (SIDE + GAP) + GAP), GROUND) for _ in range(MAX_STEPS + 1)
    ]
    font = ImageFont.load_default(size=17)
    for half, moment in enumerate(("before", "after")):
        left, reached = GAP + half * (width + 3 * GAP), 0
        for place, (seed, words) in enumerate(zip(seeds, words_of(page, moment)[: COLUMNS * ROWS], strict=False)):
            pictures, is_there = walk(seed, words)
            reached += is_there
            x = left + place % COLUMNS * (SIDE + GAP)
            y = HEAD + place // COLUMNS * (SIDE + GAP)
            for step, frame in enumerate(frames):
                frame.paste(pictures[min(step, len(pictures) - 1)], (x, y))
                if step >= len(pictures) - 1:
                    outline = GOOD if is_there else BAD
                    ImageDraw.Draw(frame).rectangle(
                        (x - 3, y - 3, x + SIDE + 2, y + SIDE + 2), outline=outline, width=3
                    )
        for frame in frames:
            title = f"{moment} training: {reached} of {COLUMNS * ROWS} reach the goal"
            ImageDraw.Draw(frame).text((left, 7), title, INK, font)
    return frames


def main() -> None:
    """Writes the GIF."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("gif", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=200, help="held-out episodes of the run (default: %(default)s)")
    arguments = parser.parse_args()
    # The run draws its seeds in the same way.
    seeds = np.random.default_rng(arguments.seed).integers(2**31, size=arguments.held_out)
    frames = [frame.quantize(64) for frame in draw(arguments.page, [int(seed) for seed in seeds])]
    times = [FRAME_MS] * (len(frames) - 1) + [LAST_MS]
    frames[0].save(arguments.gif, save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)


if __name__ == "__main__":
    main()
