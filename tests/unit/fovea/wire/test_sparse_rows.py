"""The check of compressed sparse rows against its definition, in small cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.wire import tensors
from fovea.wire.errors import InvalidInput


@given(
    offsets=st.lists(st.integers(-1, 4), max_size=5),
    value_count=st.integers(0, 3),
    row_count=st.none() | st.integers(0, 4),
)
def test_only_rising_offsets_pass(offsets: list[int], value_count: int, row_count: int | None) -> None:
    is_sound = (
        bool(offsets)
        and (offsets[0], offsets[-1]) == (0, value_count)
        and sorted(offsets) == offsets
        and row_count in (None, len(offsets) - 1)
    )
    array = np.asarray(offsets, np.int64)
    if is_sound:
        tensors.check_row_offsets(array, value_count, row_count, "table.rows")
    else:
        with pytest.raises(InvalidInput, match=r"^table\.rows ") as caught:
            tensors.check_row_offsets(array, value_count, row_count, "table.rows")
        assert caught.value.field == "table.rows"


def test_falling_offsets_without_a_sign() -> None:
    with pytest.raises(InvalidInput, match="must rise from 0 to 2, the number of values"):
        tensors.check_row_offsets(np.array([0, 2, 1, 2], np.uint64), 2, 3, "rows")


@pytest.mark.parametrize("offsets", [np.array([0.0, 1.0]), np.array([[0, 1]]), np.array(0), np.array([0, 2**70])])
def test_offsets_are_a_list_of_whole_numbers(offsets: np.ndarray) -> None:
    with pytest.raises(InvalidInput, match="it must be a list of 2 integers"):
        tensors.check_row_offsets(offsets, 1, 1, "rows")


@given(columns=st.lists(st.integers(-2, 4), max_size=3), value_count=st.integers(0, 3))
def test_only_columns_of_the_table_pass(columns: list[int], value_count: int) -> None:
    if len(columns) == value_count and all(0 <= column < 3 for column in columns):
        tensors.check_column_indices(np.asarray(columns), value_count, 3, "table.columns")
    else:
        with pytest.raises(InvalidInput, match=r"^table\.columns ") as caught:
            tensors.check_column_indices(np.asarray(columns), value_count, 3, "table.columns")
        assert caught.value.field == "table.columns"
