"""The game of signals."""

import numpy as np

from examples.signals import LENGTH, WAYS, draw_signals, random_way, show


def test_games_have_every_colour_and_each_is_a_picture_of_its_own() -> None:
    rng = np.random.default_rng(0)
    games = [draw_signals(rng) for _ in range(50)]
    assert {len(game) for game in games} == {LENGTH}
    assert {colour for game in games for colour in game} == set(WAYS)
    assert len({show(colour) for colour in WAYS}) == len(set(WAYS.values())) == len(WAYS)
    assert {random_way(rng) for _ in range(100)} == set(WAYS.values())
