"""Games in VisGym's format: the picture shows the whole state, and each game is solvable."""

import gymnasium
import numpy as np
import pytest

from examples.picture_games import COLOURS, MAZE, TILES, Maze, PictureGame, Tiles

SEEDS = range(40)


def made(name: str, seed: int) -> PictureGame:
    game = gymnasium.make(name, disable_env_checker=True).unwrapped
    assert isinstance(game, PictureGame)
    game.reset(seed=seed)
    return game


def test_a_maze_is_read_off_its_picture() -> None:
    for seed in SEEDS:
        maze = made(MAZE, seed)
        assert isinstance(maze, Maze)
        seen = Maze.seen_in(maze.render())
        assert (seen.agent, seen.goal, seen._openings) == (maze.agent, maze.goal, maze._openings)


def test_a_maze_is_solved_by_its_shortest_way_and_walls_stop() -> None:
    lengths = set()
    for seed in SEEDS:
        maze = made(MAZE, seed)
        assert isinstance(maze, Maze)
        for way in range(4):
            if not maze.is_open(maze.agent, way):
                before = maze.agent
                assert maze.step(f"('move', {way})")[4] == {"env_feedback": "There is a wall."}
                assert maze.agent == before
        count = 0
        while (way_on := maze.best_way()) is not None:
            assert maze.step(f"('move', {way_on})")[1:] == (0.0, False, False, {"env_feedback": "You moved."})
            count += 1
        lengths.add(count)
        assert maze.step("('stop', 'stop')")[1:3] == (1.0, True)
    assert lengths == {1, 2, 3, 4}


def test_tiles_are_read_and_put_in_order() -> None:
    for seed in SEEDS:
        game = made(TILES, seed)
        assert isinstance(game, Tiles)
        assert game.tiles != list(COLOURS)
        assert Tiles.seen_in(game.render()).tiles == game.tiles
        swaps = 0
        while (swap := game.best_swap()) is not None:
            game.step(repr(("swap", swap)))
            swaps += 1
        assert 1 <= swaps <= 3
        assert game.step("('stop', 'stop')")[1:3] == (1.0, True)


@pytest.mark.parametrize("name", [MAZE, TILES])
def test_stopping_too_early_earns_nothing(name: str) -> None:
    assert made(name, 0).step("('stop', 'stop')")[1:3] == (0.0, True)


@pytest.mark.parametrize("name", [MAZE, TILES])
@pytest.mark.parametrize(
    "action", ["left", "('fly', 0)", "('move', 7)", "('move', [0])", "('swap', ((0, 0), (0, 2)))", "('swap', 3)"]
)
def test_other_actions_change_nothing_and_are_named(name: str, action: str) -> None:
    game = made(name, 0)
    before = game.render()
    _, reward, is_over, _, info = game.step(action)
    assert (reward, is_over) == (0.0, False)
    assert info["env_feedback"].startswith(("There is no action", "The action cannot be read"))
    np.testing.assert_array_equal(game.render(), before)
