"""Gateways with shards divide samplers and owners' limits by their load."""

import time

import pytest

from fovea_gateway.access.owners import Owner
from fovea_gateway.database.ownership import ShardOwner, Shards
from fovea_gateway.health import Shares

WEIGHTS = {"heavy": 3.0}


def shares(number: int, count: int = 2) -> Shares:
    """Returns the division as a shard's gateway computes it."""
    shards = Shards(count)
    shards.number = number
    return Shares(shards, lambda owner: WEIGHTS.get(owner, 1.0))


def report(shard: int, *owners: str, age_s: float = 0.0, **models: int) -> ShardOwner:
    """Returns the report of a gateway."""
    return ShardOwner(shard, "", "", {"owners": list(owners), "models": models}, time.time() - age_s)


@pytest.mark.parametrize(
    ("here", "there", "part"),
    [
        (["a"], ["b"], 1 / 2),
        (["a", "b", "c"], ["d"], 3 / 4),
        (["heavy"], ["b"], 3 / 4),
        (["a", "b"], ["b"], 3 / 4),
        (["a"], [], 1.0),
        ([], ["b"], 1 / 2),
    ],
)
def test_places_follow_the_weights_of_owners_with_work(here: list[str], there: list[str], part: float) -> None:
    seen = shares(0)
    seen.note_work(here)
    seen.note_reports([report(0, *here), report(1, *there)])
    assert seen.part() == pytest.approx(part)


def test_the_parts_of_all_gateways_with_work_are_the_whole() -> None:
    working = [["a", "b", "heavy"], ["b"], ["c", "a"]]
    reports = [report(number, *owners) for number, owners in enumerate(working)]
    parts = []
    for number, owners in enumerate(working):
        seen = shares(number, 3)
        seen.note_work(owners)
        seen.note_reports(reports)
        parts.append(seen.part())
    assert sum(parts) == pytest.approx(1)


def test_an_owner_in_two_shards_has_half_its_weight_and_limits_in_each() -> None:
    seen = shares(0)
    seen.note_work(["heavy", "b"])
    seen.note_reports([report(0, "heavy", "b"), report(1, "heavy", heavy=2)])
    assert (seen.weight("heavy"), seen.weight("b")) == (1.5, 1.0)
    assert (seen.models_elsewhere("heavy"), seen.models_elsewhere("b")) == (2, 0)
    part = Owner("heavy", weight=3.0, max_models=4, max_tokens_in_flight=5, max_requests_per_s=9.0).part(2)
    assert part == Owner("heavy", weight=3.0, max_models=4, max_tokens_in_flight=3, max_requests_per_s=4.5)


def test_a_gateway_that_reports_no_more_takes_nothing() -> None:
    seen = shares(0)
    seen.note_work(["a"])
    seen.note_reports([report(1, "b", age_s=60)])
    assert seen.part() == 1.0


def test_without_shards_all_is_one_gateways() -> None:
    assert shares(0, 1).part() == 1.0
    assert shares(0, 1).weight("a") == 1.0
