"""Packed supports of sampled tokens."""

import numpy as np
import pytest

from fovea.wire.errors import InvalidInput
from fovea.wire.tensors import FULL_ROW, MOST_SUPPORT, pack_support, split_support, unpack_support

_VOCABULARY = 151_936


def _random_rows(seed: int) -> list[list[int]]:
    draws = np.random.default_rng(seed)
    sizes = [0, 1, 2, 20, MOST_SUPPORT, 0, 0, 3]
    return [sorted(draws.choice(_VOCABULARY, size, replace=False).tolist()) for size in sizes]


def _pack(rows: list[list[int]]) -> bytes:
    return pack_support(np.array([i for row in rows for i in row], np.int32), np.cumsum([0, *map(len, rows)]))


@pytest.mark.parametrize("seed", range(5))
def test_rows_return_as_they_were(seed: int) -> None:
    rows = _random_rows(seed)
    ids, offsets = unpack_support(_pack(rows), "support")
    assert [part.tolist() for part in np.split(ids, offsets[1:-1])] == rows


def test_edges_of_the_varint() -> None:
    rows = [[0], [126], [127], [0, 127, 255], [0, 128], [16383], [16384], [2**31 - 1], [5, 2**31 - 1]]
    ids, offsets = unpack_support(_pack(rows), "support")
    assert [part.tolist() for part in np.split(ids, offsets[1:-1])] == rows
    assert _pack([[0]]) == b"\1\0"
    assert _pack([[127]]) == b"\x80\1\0"


def test_rows_are_joined_and_split_as_bytes() -> None:
    rows = _random_rows(1)
    packed = _pack(rows)
    assert packed.count(0) == len(rows)
    assert split_support(packed) == [_pack([row]) for row in rows]
    assert _pack([[], [], [3]]) == FULL_ROW * 2 + _pack([[3]])


def test_nothing_is_packed_as_nothing() -> None:
    ids, offsets = unpack_support(_pack([]), "support")
    assert not ids.size
    assert offsets.tolist() == [0]


def test_a_row_takes_about_two_bytes_an_id() -> None:
    row = sorted(np.random.default_rng(0).choice(_VOCABULARY, 20, replace=False).tolist())
    assert len(_pack([row])) <= 1 + 20 * 3


@pytest.mark.parametrize(
    "packed",
    [b"\1", b"\x80\0", b"\x81\0", b"\xff" * 9, b"\xff\xff\xff\xff\xff\1\0", b"\0\5"],
    ids=["no end", "long zero", "long one", "no last byte", "too long", "open last row"],
)
def test_other_bytes_are_refused(packed: bytes) -> None:
    with pytest.raises(InvalidInput, match="support is not a packed support"):
        unpack_support(packed, "support")


def test_a_row_above_the_bound_is_refused() -> None:
    with pytest.raises(InvalidInput, match="1025 ids in row 1; at most 1024"):
        unpack_support(_pack([[1], list(range(MOST_SUPPORT + 1))]), "support")


def test_ids_in_any_order_are_packed_once() -> None:
    packed = pack_support(np.array([9, 3, 9, 4, 4, 1]), np.array([0, 3, 3, 5, 6]))
    assert packed == _pack([[3, 9], [], [4], [1]])
