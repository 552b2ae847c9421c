"""Checks all rows before the first step, by encoding them as training does.

Broken rows are found before training costs anything, and the content of the rows gets a fingerprint.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fovea.wire.errors import InvalidInput
from fovea_data.conversation import Asking, Conversation, naming_row
from fovea_data.dataset import Dataset
from fovea_data.encoder import Encoder
from fovea_data.served_limits import ServedLimits
from fovea_rollout.late_sdk import tinker

logger = logging.getLogger(__name__)

BrokenRows = Literal["refuse", "skip"]


@dataclass(frozen=True)
class RowEncoder:
    """An encoder of rows for one served model.

    Attributes:
        encoder: Encoder of the model.
        limits: Limits of the server.
    """

    encoder: Encoder
    limits: ServedLimits

    def encoded(self, rows: Dataset, index: int) -> tuple[Conversation, list[tinker.Datum]]:
        """Returns a row and its datums.

        Raises:
            InvalidInput: The row is broken, or the server would refuse it. The error names the row.
            tinker.TinkerError: The server must count the tokens of a picture, and does not respond.
        """
        with naming_row(rows.where(index), passing=(tinker.APIConnectionError, tinker.InternalServerError)):
            row = rows[index]
            self.limits.check_pictures([picture for message in row.messages for picture in message.pictures])
            return row, self.encoder.datums(row)


@dataclass(frozen=True)
class CheckedRows:
    """Rows that can be learnt.

    Attributes:
        rows: The rows without broken ones.
        left_out: The number of broken rows.
        fingerprint: A text that depends on the content of the rows, and on which rows are broken.
        asking: The texts that ask about the picture, if each row has one picture and the same texts.
    """

    rows: Dataset
    left_out: int
    fingerprint: str
    asking: Asking | None


def check_rows(
    rows: Dataset, encoder: RowEncoder, name: str, broken: BrokenRows, on_row: Callable[[], None]
) -> CheckedRows:
    """Encodes each row once. Holds one row at a time, and 8 bytes for each row that is right.

    Args:
        rows: The rows.
        encoder: Encodes a row.
        name: Name of the rows in errors.
        broken: `refuse` raises an error at the first broken row; `skip` logs each and leaves it out.
        on_row: Called after each row.

    Raises:
        InvalidInput: A row is broken and `broken` is `refuse`, or all rows are broken. The error names the first one.
    """
    digest, places, first = hashlib.sha256(), array("q"), ""
    askings: set[Asking | None] = set()
    for index in range(len(rows)):
        try:
            row, data = encoder.encoded(rows, index)
        except InvalidInput as error:
            if broken == "refuse":
                raise
            logger.warning("skipped a broken row: %s", error.message)
            first = first or error.message
            digest.update(b"broken")
        else:
            places.append(index)
            digest.update(_digest(data))
            if len(askings) < 2:
                askings.add(row.asking)
        on_row()
    if not places:
        raise InvalidInput(f"all {len(rows)} rows of {name} are broken; the first: {first}", field=name)
    right = rows if len(places) == len(rows) else rows.part(rows.indices[np.array(places, np.int64)])
    asking = askings.pop() if len(askings) == 1 else None
    return CheckedRows(right, len(rows) - len(places), f"{len(rows)} rows, {digest.hexdigest()[:16]}", asking)


def _digest(data: list[tinker.Datum]) -> bytes:
    """Returns a digest of a row's datums: tokens, files of pictures, targets and weights."""
    digest = hashlib.sha256()
    for datum in data:
        for chunk in datum.model_input.chunks:
            if isinstance(chunk, tinker.types.ImageChunk):
                digest.update(b"picture" + hashlib.sha256(chunk.data).digest())
            elif isinstance(chunk, tinker.EncodedTextChunk):
                digest.update(b"tokens" + np.asarray(chunk.tokens, np.int64).tobytes())
        for name in ("target_tokens", "weights"):
            digest.update(name.encode() + datum.loss_fn_inputs[name].to_numpy().tobytes())
    return digest.digest()
