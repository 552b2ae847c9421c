"""The gallery keeps the newest samples within its bytes, isolates owners, and drops pictures."""

from itertools import pairwise

import numpy as np
import pytest

from fovea_gateway.live import sample_gallery
from fovea_gateway.live.sample_gallery import Drawn, Group, Picture, SampleGallery

PICTURE = Picture("digest", "image/png", b"x" * 1000)


def _group(owner: str = "alice", source: str = "model", step: int = 1, prompt: str = "p") -> Group:
    return Group(owner, source, step, prompt, "base", [np.arange(4, dtype=np.int32), PICTURE])


def _drawn(name: str) -> Drawn:
    return Drawn(name, np.arange(3, dtype=np.int32), np.zeros(3, np.float32), "stop", 0.0)


def test_samples_of_one_prompt_are_grouped() -> None:
    gallery = SampleGallery()
    gallery.add(_group(), [_drawn("a:0"), _drawn("a:1")])
    gallery.add(_group(), [_drawn("b:0")])
    gallery.add(_group(prompt="q"), [_drawn("c:0")])
    found = gallery.groups("alice", "model", 1)
    assert [[one.sequence_id for one in group.drawn] for group in found] == [["c:0"], ["a:0", "a:1", "b:0"]]


def test_an_owner_sees_only_its_own_samples() -> None:
    gallery = SampleGallery()
    gallery.add(_group(), [_drawn("a:0")])
    assert list(gallery.sources("bob")) == []
    assert gallery.groups("bob", "model", 1) == []
    assert gallery.picture("bob", "digest") is None
    assert gallery.picture("alice", "digest") == PICTURE == gallery.picture(None, "digest")
    assert not gallery.judge("bob", "a:0", 1.0, "x")
    assert gallery.judge("alice", "a:0", 1.0, "seven")
    (group,) = gallery.groups("alice", "model", None)
    assert (group.truth, group.drawn[0].reward) == ("seven", 1.0)


def test_a_picture_that_a_page_wtranslate_of_can_still_be_fetched_a_moment_after_others_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gallery = SampleGallery()
    told = Picture("told", "image/png", b"x" * 5000)
    gallery.add(Group("alice", "model", 1, "first", "base", [told]), [_drawn("first:0")])
    for number in range(20):
        gallery.add(_group(prompt=f"{number}"), [_drawn(f"{number}:0")])
    assert "first" not in [group.prompt for group in gallery.groups("alice", "model", 1)]
    assert gallery.picture("alice", "told") == told
    assert gallery.picture("bob", "told") is None
    monkeypatch.setattr(sample_gallery, "_LINGER_S", 0.0)
    gallery.add(_group(prompt="last"), [_drawn("last:0")])
    assert gallery.picture("alice", "told") is None
    assert gallery.picture("alice", "digest") == PICTURE


def test_steps_stay_spread_over_the_training_and_end_with_the_newest() -> None:
    gallery = SampleGallery()
    for step in range(1000):
        gallery.add(_group(step=step), [_drawn(f"{step}:0")])
    ((_, _, steps, _),) = gallery.sources("alice")
    assert len(steps) == 64
    assert (steps[0], steps[-1]) == (0, 999)
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 64


def test_pictures_and_samples_take_no_more_than_their_room() -> None:
    gallery = SampleGallery(most_bytes=40_000)
    for number in range(100):
        picture = Picture(f"digest {number}", "image/png", b"x" * 5000)
        group = Group("alice", f"model {number}", 1, "p", "base", [picture])
        gallery.add(group, [_drawn(f"{number}:0")])
    kept = [source for _, source, _, _ in gallery.sources(None)]
    assert kept == [f"model {number}" for number in range(99, 99 - len(kept), -1)]
    assert 4 <= len(kept) <= 7
    assert gallery.picture(None, "digest 0") is None
    assert gallery.picture(None, "digest 99") is not None


def test_a_sequence_waits_for_the_trainers_values_only_while_it_is_kept() -> None:
    gallery = SampleGallery()
    for number in range(40):  # more than a prompt keeps
        one = _drawn(f"{number}:0")
        one.place = bytes([number])
        gallery.add(_group(), [one])
    assert gallery.awaits_losses("alice", "model")
    assert not gallery.awaits_losses("bob", "model")
    values = np.array([-9, -1, -2, -3], np.float32)
    gallery.note_losses("bob", "model", {bytes([39]): values})
    gallery.note_losses("alice", "model", {bytes([number]): values for number in (0, 38, 39)})
    (group,) = gallery.groups("alice", "model", 1)
    known = {one.sequence_id: one.trained.tolist() for one in group.drawn if len(one.trained)}
    assert known == {"38:0": [-1, -2, -3], "39:0": [-1, -2, -3]}
    gallery.note_losses("alice", "model", {bytes([number]): values for number in range(40)})
    assert not gallery.awaits_losses("alice", "model"), "samples that are dropped must be forgotten"
