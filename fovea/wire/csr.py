"""Compressed sparse rows (CSR): one list of values, and offsets that say where in it each row begins.

Row i is `values[offsets[i]:offsets[i + 1]]`; where rows have columns, `columns[j]` is that of `values[j]`.
"""

import numpy as np
import numpy.typing as npt

from fovea.wire.errors import InvalidInput


def check_offsets(offsets: npt.NDArray, value_count: int, row_count: int | None, field: str) -> None:
    """Raises InvalidInput naming `field` unless `offsets` cuts `value_count` values into rows.

    Args:
        offsets: What must be whole numbers [row_count + 1], rising from 0 to `value_count`.
        row_count: None if any number of rows will do.
    """
    is_list = offsets.ndim == 1 and offsets.dtype.kind in "iu" and offsets.size > 0
    if not is_list or (row_count is not None and offsets.size != row_count + 1):
        needed = "at least 1" if row_count is None else row_count + 1
        raise InvalidInput(
            f"{field} is {offsets.dtype.name} {list(offsets.shape)}; it must be a list of {needed} whole numbers, "
            "one more than there are rows",
            field=field,
        )
    if offsets[0] != 0 or offsets[-1] != value_count or np.any(offsets[1:] < offsets[:-1]):
        raise InvalidInput(f"{field} must rise from 0 to {value_count}, the number of values", field=field)


def check_columns(columns: npt.NDArray, value_count: int, column_count: int, field: str) -> None:
    """Raises InvalidInput naming `field` unless `columns` has, for each value, a whole number below `column_count`."""
    if columns.shape != (value_count,):
        raise InvalidInput(f"{field} has shape {list(columns.shape)}, but there are {value_count} values", field=field)
    if not columns.size:
        return
    if columns.dtype.kind not in "iu" or columns.min() < 0 or columns.max() >= column_count:
        raise InvalidInput(f"{field} must hold whole numbers in 0 .. {column_count - 1}", field=field)
