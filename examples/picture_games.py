"""Two games with VisGym's methods, registered with gymnasium: a maze with walls, and tiles to put in order by swapping.

Their pictures suit a tiny model: a cell is 32 pixels wide, which is one token of the model, and a wall is drawn on the
edge between two cells.
"""

from __future__ import annotations

import ast
from collections import deque
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

CELL = 32
"""Pixels of the side of a cell."""
_WALL = 7
"""Half the width of a wall in pixels. With 4 the tiny model's clone did not see walls (docs/lab/learning.md)."""
_FLOOR, _DARK, _BLUE, _RED = (235, 235, 235), (40, 40, 40), (40, 60, 220), (220, 30, 30)
WAYS = {0: (0, 1), 1: (-1, 0), 2: (0, -1), 3: (1, 0)}
"""Values of 'move' as steps in rows and columns: right, up, left and down."""
COLOURS = {"red": _RED, "green": (30, 170, 50), "blue": _BLUE, "yellow": (240, 220, 40)}
"""Colours of the tiles, in the right order."""

Cell = tuple[int, int]
"""Row and column."""
Pixels = npt.NDArray[np.uint8]


class PictureGame(gymnasium.Env[Pixels, str]):
    """Base of both games. Actions are Python pairs as text. `stop` ends the episode and is the only rewarded one."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012  (gymnasium's own declaration)
    render_mode = "rgb_array"
    observation_space = gymnasium.spaces.Box(0, 255, (CELL, CELL, 3), np.uint8)
    action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Pixels, dict[str, Any]]:
        """Draws a new game."""
        super().reset(seed=seed)
        self._draw_game()
        return self.render(), {}

    def step(self, action: str) -> tuple[Pixels, float, bool, bool, dict[str, Any]]:
        """Takes an action; `info["env_feedback"]` describes the result."""
        try:
            name, value = ast.literal_eval(action)
        except (ValueError, SyntaxError, TypeError) as error:
            return self.render(), 0.0, False, False, {"env_feedback": f"The action cannot be read: {error}"}
        if name == "stop":
            return self.render(), float(self._is_solved()), True, False, {"env_feedback": "Stopped."}
        return self.render(), 0.0, False, False, {"env_feedback": self._act(name, value)}

    def get_prompt(self) -> str:
        """Returns the task in words."""
        raise NotImplementedError

    def render(self) -> Pixels:  # type: ignore[override]
        """Returns the frame, uint8 [height, width, 3]."""
        raise NotImplementedError

    def _draw_game(self) -> None:
        raise NotImplementedError

    def _act(self, name: Any, value: Any) -> str:
        raise NotImplementedError

    def _is_solved(self) -> bool:
        raise NotImplementedError


class Maze(PictureGame):
    """A blue disc must go to the red square. It cannot walk through walls.

    Args:
        size: Cells of the maze's side.
        longest: The most moves of the shortest way.
        gaps: Number of walls to remove from a maze with exactly one way between any two cells.
    """

    def __init__(self, size: int = 3, longest: int = 4, gaps: int = 2) -> None:
        self._size, self._longest, self._gaps = size, longest, gaps
        self._openings: set[frozenset[Cell]] = set()
        self.agent: Cell = (0, 0)
        self.goal: Cell = (0, 0)

    @classmethod
    def seen_in(cls, pixels: Pixels) -> Maze:
        """Returns the maze in a frame."""
        maze = cls(len(pixels) // CELL)
        half = CELL // 2
        for cell in np.ndindex(maze._size, maze._size):
            row, column = cell[0] * CELL, cell[1] * CELL
            if tuple(pixels[row + half, column + half]) == _BLUE:
                maze.agent = (cell[0], cell[1])
            if tuple(pixels[row + 9, column + 9]) == _RED:  # a pixel that neither walls nor the disc cover
                maze.goal = (cell[0], cell[1])
            for down, right in WAYS.values():
                edge = pixels[row + half + down * (half - 1), column + half + right * (half - 1)]
                if tuple(edge) != _DARK:
                    maze._openings.add(frozenset((cell, (cell[0] + down, cell[1] + right))))
        return maze

    def get_prompt(self) -> str:
        """See `PictureGame`."""
        return (
            "Go to the red square. ('move', 0) is right, ('move', 1) is up, ('move', 2) is left, ('move', 3) is down; "
            "('stop', 'stop') when you are there."
        )

    def render(self) -> Pixels:  # type: ignore[override]
        """See `PictureGame`."""
        pixels = np.full((self._size * CELL, self._size * CELL, 3), _FLOOR, np.uint8)
        row, column = (place * CELL for place in self.goal)
        pixels[row + 5 : row + CELL - 5, column + 5 : column + CELL - 5] = _RED
        rows, columns = np.ogrid[: len(pixels), : len(pixels)]
        centre = [place * CELL + CELL / 2 - 0.5 for place in self.agent]
        pixels[(rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < (CELL / 4) ** 2] = _BLUE
        for cell in np.ndindex(self._size, self._size):
            for way, (down, right) in WAYS.items():
                if not self.is_open((cell[0], cell[1]), way):
                    # The cell's edge on that side, in rows and columns of the picture.
                    spans = [
                        (place * CELL, place * CELL + CELL)
                        if not step
                        else ((place + (step > 0)) * CELL - _WALL, (place + (step > 0)) * CELL + _WALL)
                        for place, step in zip(cell, (down, right), strict=True)
                    ]
                    (top, bottom), (left, end) = ((max(0, low), high) for low, high in spans)
                    pixels[top:bottom, left:end] = _DARK
        return pixels

    def is_open(self, cell: Cell, way: int) -> bool:
        """Returns whether there is no wall on a side of a cell."""
        other = (cell[0] + WAYS[way][0], cell[1] + WAYS[way][1])
        return frozenset((cell, other)) in self._openings

    def best_way(self) -> int | None:
        """Returns the first move of a shortest way to the goal; None at the goal."""
        distances = self._distances(self.goal)
        if not distances[self.agent]:
            return None
        return min(
            (way for way in WAYS if self.is_open(self.agent, way)),
            key=lambda way: distances[self._beside(way)],
        )

    def _beside(self, way: int) -> Cell:
        return self.agent[0] + WAYS[way][0], self.agent[1] + WAYS[way][1]

    def _draw_game(self) -> None:
        cells = [(int(row), int(column)) for row, column in np.ndindex(self._size, self._size)]
        walls = [
            frozenset((cell, other))
            for cell in cells
            for other in ((cell[0], cell[1] + 1), (cell[0] + 1, cell[1]))
            if other in cells
        ]
        # A spanning tree by Kruskal's algorithm, with some more gaps.
        part = {cell: cell for cell in cells}
        self._openings = set()
        kept = []
        for index in self.np_random.permutation(len(walls)):
            one, other = walls[index]
            if part[one] == part[other]:
                kept.append(walls[index])
                continue
            self._openings.add(walls[index])
            joined = part[other]
            part = {cell: part[one] if root == joined else root for cell, root in part.items()}
        self._openings.update(kept[: self._gaps])
        self.goal = cells[int(self.np_random.integers(len(cells)))]
        near = [cell for cell, distance in self._distances(self.goal).items() if 0 < distance <= self._longest]
        self.agent = near[int(self.np_random.integers(len(near)))]

    def _distances(self, start: Cell) -> dict[Cell, int]:
        distances, seen = {start: 0}, deque([start])
        while seen:
            cell = seen.popleft()
            for way, (down, right) in WAYS.items():
                other = (cell[0] + down, cell[1] + right)
                if other not in distances and self.is_open(cell, way):
                    distances[other] = distances[cell] + 1
                    seen.append(other)
        return distances

    def _act(self, name: Any, value: Any) -> str:
        if name != "move" or value not in list(WAYS):
            return f"There is no action {(name, value)!r}."
        if not self.is_open(self.agent, value):
            return "There is a wall."
        self.agent = self._beside(value)
        return "You moved."

    def _is_solved(self) -> bool:
        return self.agent == self.goal


class Tiles(PictureGame):
    """Four coloured tiles, two by two, after random swaps.

    Args:
        swaps: The most swaps; there is at least one.
    """

    def __init__(self, swaps: int = 2) -> None:
        self._swaps = swaps
        self.tiles = list(COLOURS)

    @classmethod
    def seen_in(cls, pixels: Pixels) -> Tiles:
        """Returns the tiles in a frame."""
        tiles, names = cls(), {colour: name for name, colour in COLOURS.items()}
        tiles.tiles = [names[tuple(pixels[row * CELL, column * CELL])] for row, column in np.ndindex(2, 2)]
        return tiles

    def get_prompt(self) -> str:
        """See `PictureGame`."""
        return (
            f"Put the tiles in the order {', '.join(COLOURS)}. ('swap', ((0, 0), (1, 1))) swaps two; "
            "('stop', 'stop') when they are."
        )

    def render(self) -> Pixels:  # type: ignore[override]
        """See `PictureGame`."""
        colours = np.array([COLOURS[name] for name in self.tiles], np.uint8).reshape(2, 2, 3)
        return colours.repeat(CELL, axis=0).repeat(CELL, axis=1)

    def best_swap(self) -> tuple[Cell, Cell] | None:
        """Returns the swap that puts the first wrong tile into its place; None if all are right."""
        for place, (seen, wanted) in enumerate(zip(self.tiles, COLOURS, strict=True)):
            if seen != wanted:
                return divmod(place, 2), divmod(self.tiles.index(wanted), 2)
        return None

    def _draw_game(self) -> None:
        self.tiles = list(COLOURS)
        while self._is_solved():
            for _ in range(int(self.np_random.integers(1, self._swaps + 1))):
                one, other = (int(place) for place in self.np_random.choice(4, 2, replace=False))
                self._swap(one, other)

    def _act(self, name: Any, value: Any) -> str:
        places = [(row, column) for row in range(2) for column in range(2)]
        if name != "swap" or not isinstance(value, tuple) or len(value) != 2 or any(one not in places for one in value):
            return f"There is no action {(name, value)!r}."
        self._swap(*(row * 2 + column for row, column in value))
        return "Swapped."

    def _swap(self, one: int, other: int) -> None:
        self.tiles[one], self.tiles[other] = self.tiles[other], self.tiles[one]

    def _is_solved(self) -> bool:
        return self.tiles == list(COLOURS)


gymnasium.register("fovea/maze", f"{__name__}:Maze")
gymnasium.register("fovea/tiles", f"{__name__}:Tiles")
MAZE, TILES = f"{__name__}:fovea/maze", f"{__name__}:fovea/tiles"
"""Values of `visgym_env_id`."""
