"""Limits of one owner on shared resources."""

from contextlib import suppress

import pytest

from fovea.wire.errors import ResourceExhausted
from fovea_gateway.access.owners import Quota


def fill(quota: Quota, owner: str) -> int:
    """Takes until refused; returns the number."""
    taken = 0
    with suppress(ResourceExhausted):
        while True:
            quota.check(owner)
            quota.take(owner)
            taken += 1
    with pytest.raises(ResourceExhausted, match="of max_things "):
        quota.check(owner)
    return taken


def test_no_owner_gets_everything_and_newcomers_find_room() -> None:
    quota = Quota("max_things", 1024, "things")
    assert [fill(quota, owner) for owner in "abcd"] == [512, 256, 128, 64]
    for _ in range(512):
        quota.give("a")
    assert fill(quota, "e") == 288, "a returned share must be free for all owners"


@pytest.mark.parametrize("capacity", [1, 2, 3, 6, 7])
def test_one_owner_takes_half_but_never_nothing(capacity: int) -> None:
    assert fill(Quota("max_things", capacity, "things"), "a") == (capacity + 1) // 2


def test_forced_takes_count() -> None:
    quota = Quota("max_things", 4, "things")
    for _ in range(5):
        quota.take("a")
    assert fill(quota, "b") == 0
    for _ in range(5):
        quota.give("a")
    assert fill(quota, "b") == 2
