"""The byte-limited mapping against the plainest model of itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.runtime.byte_lru import ByteLru

LIMIT = 10
KEYS = st.sampled_from("abcde")
STEPS = st.lists(st.one_of(st.tuples(KEYS), st.tuples(KEYS, st.integers(0, LIMIT))), max_size=40)


@given(STEPS)
def test_holds_the_most_recently_used_that_fit(steps: list[tuple[str, ...] | tuple[str, int]]) -> None:
    lru: ByteLru[int] = ByteLru(LIMIT)
    model: list[tuple[str, int]] = []  # Oldest first.
    for key, *put in steps:
        found = next((entry for entry in model if entry[0] == key), None)
        if put:
            lru.put(key, put[0], put[0])
            model = [entry for entry in model if entry[0] != key] + [(key, put[0])]
            while sum(size for _, size in model) > LIMIT:
                model.pop(0)
        else:
            assert lru.get(key) == (found[1] if found else None)
            if found:
                model = [entry for entry in model if entry != found] + [found]
        assert lru.used_bytes == sum(size for _, size in model) <= LIMIT
        assert len(lru) == len(model)


def test_a_value_above_the_limit_evicts_nothing() -> None:
    lru: ByteLru[str] = ByteLru(LIMIT)
    lru.put("a", "held", 9)
    with pytest.raises(ValueError, match="11 bytes do not fit into 10"):
        lru.put("b", "too large", 11)
    assert lru.get("a") == "held"
