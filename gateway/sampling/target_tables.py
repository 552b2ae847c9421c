"""Target tables: token ids to score at the prompt's positions, in the cells of a client's table.

A table has P - 1 rows for a prompt of P tokens; row i scores position i + 1. The id -1 asks for nothing: a sparse table
may list such cells, and gets 0.0 back in them.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import gateway_pb2, sampler_pb2, tensor_pb2
from fovea.wire import tensors
from fovea.wire.errors import Internal, InvalidInput
from fovea.wire.limits import MESSAGE_BYTES

FIELD = "target_prompt_logprobs"
NOTHING = -1
_MOST_IDS = MESSAGE_BYTES // 16
"""Ids and their scores travel in one message each, beside the prompt."""


class Cells(NamedTuple):
    """The listed cells of a table, row after row: ids int64 [M], columns int64 [M], offsets int64 [P] from 0 to M."""

    ids: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


def read(table: gateway_pb2.TargetTable) -> Cells:
    """The cells of a table. Raises InvalidInput if its parts do not belong together."""
    ids = _flat(table.tokens.token_ids, "tokens.token_ids")
    columns = _flat(table.column_indices, "column_indices")
    offsets = _flat(table.tokens.row_offsets, "tokens.row_offsets")
    if not offsets.size or offsets[0] != 0 or offsets[-1] != ids.size or (np.diff(offsets) < 0).any():
        raise _wrong(f"row offsets do not describe {ids.size} ids")
    if columns.size != ids.size:
        raise _wrong(f"{columns.size} columns are given for {ids.size} ids")
    if columns.size and not (columns.min() >= 0 and columns.max() < table.column_count):
        raise _wrong(f"a column lies outside 0 .. {table.column_count - 1}")
    return Cells(ids, columns, offsets)


def check(cells: Cells, token_count: int, vocabulary_size: int) -> None:
    """Raises InvalidInput for a table that does not fit a prompt of `token_count` tokens, or asks for nothing."""
    row_count = cells.offsets.size - 1
    if row_count != token_count - 1:
        raise _wrong(
            f"it has {row_count} rows; a prompt of {token_count} tokens needs {token_count - 1}, one for each token "
            "but the first"
        )
    wrong = np.flatnonzero((cells.ids < NOTHING) | (cells.ids >= vocabulary_size))
    if wrong.size:
        raise _wrong(
            f"it asks for token id {cells.ids[wrong[0]]}; ids lie in 0 .. {vocabulary_size - 1}, and -1 asks for none"
        )
    if not (cells.ids != NOTHING).any():
        raise _wrong("it names no token id; name at least one, or leave it out")
    if cells.ids.size > _MOST_IDS:
        raise _wrong(f"it lists {cells.ids.size} cells; at most {_MOST_IDS} fit into one request")


def to_score(cells: Cells) -> sampler_pb2.TargetTokens:
    """What a sampler is asked for: the ids without the cells that ask for nothing."""
    is_asked = cells.ids != NOTHING
    before = np.concatenate(([0], np.cumsum(is_asked)))
    return sampler_pb2.TargetTokens(
        token_ids=tensors.encode(cells.ids[is_asked].astype("<i4")),
        row_offsets=tensors.encode(before[cells.offsets].astype("<i8")),
    )


def spread(cells: Cells, logprobs: bytes) -> npt.NDArray[np.float32]:
    """float32 [M]: the sampler's answer in its cells, 0.0 where nothing was asked. Raises Internal if they differ."""
    values = np.zeros(cells.ids.size, np.float32)
    is_asked = cells.ids != NOTHING
    answer = tensors.decode_floats(logprobs)
    if answer.size != is_asked.sum():
        raise Internal(f"the sampler scored {answer.size} of {is_asked.sum()} target tokens")
    values[is_asked] = answer
    return values


def _flat(tensor: tensor_pb2.Tensor, name: str) -> npt.NDArray[np.int64]:
    array = tensors.decode(tensor, f"{FIELD}.{name}")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _wrong(f"{name} must be a list of whole numbers")
    return array.astype(np.int64)


def _wrong(message: str) -> InvalidInput:
    return InvalidInput(f"{FIELD}: {message}", field=FIELD)
