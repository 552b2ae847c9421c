"""The gateway's memory of prompts: blocks, pictures, weights, and the longest match."""

import pytest

from fovea.api.v1 import model_input_pb2
from fovea.wire.tensors import encode_tokens
from fovea_gateway.replicas.samplers import Affinity, prefix_keys


def prompt(length: int, first: int = 0, **pictures: int) -> model_input_pb2.RenderedInput:
    """Returns tokens that count up from `first`, and pictures by digest, each with its offset."""
    rendered = model_input_pb2.RenderedInput(tokens=encode_tokens(range(first, first + length)))
    for digest, offset in pictures.items():
        rendered.spans.add(offset=offset, length=4, feature=model_input_pb2.VisionFeature(digest=digest))
    return rendered


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (31, 0), (32, 1), (63, 1), (64, 2), (100, 3)])
def test_whole_blocks_count(length: int, blocks: int) -> None:
    assert len(prefix_keys("o", "s", prompt(length))) == blocks


def test_keys_agree_exactly_as_far_as_prompts_do() -> None:
    long, short = prefix_keys("o", "s", prompt(128)), prefix_keys("o", "s", prompt(70))
    assert long[:2] == short
    assert set(prefix_keys("o", "s", prompt(128, first=1))).isdisjoint(long)
    assert set(prefix_keys("o", "t", prompt(128))).isdisjoint(long), "caches of other weights are useless"
    assert set(prefix_keys("p", "s", prompt(128))).isdisjoint(long), "so are those of other owners"


def test_pictures_tell_equal_placeholders_apart() -> None:
    red, blue = prefix_keys("o", "s", prompt(128, red=40)), prefix_keys("o", "s", prompt(128, blue=40))
    assert red[0] == blue[0]
    assert red[1] != blue[1]
    assert red[3] != blue[3]


def test_the_longest_match_wins() -> None:
    affinity = Affinity()
    affinity.note(prefix_keys("o", "s", prompt(64)), "a")
    affinity.note(prefix_keys("o", "s", prompt(64)), "b")
    affinity.note(prefix_keys("o", "s", prompt(128)), "b")
    assert affinity.longest(prefix_keys("o", "s", prompt(64))) == {"a", "b"}
    assert affinity.longest(prefix_keys("o", "s", prompt(160))) == {"b"}
    assert affinity.longest(prefix_keys("o", "s", prompt(160, first=7))) == set()
    assert affinity.longest([]) == set()


def test_the_oldest_prompt_is_forgotten_from_its_end() -> None:
    old, new = prefix_keys("o", "s", prompt(128)), prefix_keys("o", "s", prompt(128, first=500))
    affinity, other = Affinity(capacity=6), Affinity(capacity=6)
    for one in (affinity, other):
        one.note(old, "a")
        one.note(new, "b")
    assert affinity.longest(new) == {"b"}
    assert affinity.longest(old) == {"a"}, "its prefix must still be known"
    other.note(new[:1], "a")
    other.note(prefix_keys("o", "s", prompt(96, first=900)), "c")
    assert other.longest(old) == set()
