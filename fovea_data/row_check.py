"""All rows of a run, encoded before its first step as training encodes them: what is broken is found before it costs
anything, and the content has a fingerprint."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import tinker
from tinker.types import ImageChunk

from fovea.wire.errors import InvalidInput
from fovea_data.conversation import Conversation, naming_row
from fovea_data.dataset import Dataset
from fovea_data.encoder import Encoder
from fovea_data.served_limits import ServedLimits

logger = logging.getLogger(__name__)

BrokenRows = Literal["refuse", "skip"]


@dataclass(frozen=True)
class RowEncoder:
    """Encodes rows for one served model.

    Attributes:
        encoder: Of the model.
        limits: Of the server.
    """

    encoder: Encoder
    limits: ServedLimits

    def encoded(self, rows: Dataset, index: int) -> tuple[Conversation, list[tinker.Datum]]:
        """A row, and what training has of it.

        Raises:
            InvalidInput: Naming the row: it is broken in any way, or the server would refuse it.
            tinker.TinkerError: The server, which is asked about pictures of some families, does not answer.
        """
        with naming_row(rows.where(index), passing=(tinker.APIConnectionError, tinker.InternalServerError)):
            row = rows[index]
            self.limits.check_pictures([picture for message in row.messages for picture in message.pictures])
            return row, self.encoder.datums(row)


@dataclass(frozen=True)
class CheckedRows:
    """Rows that can be learnt.

    Attributes:
        rows: Without those that are broken.
        left_out: The number of broken rows.
        fingerprint: Changes with the content of the rows, and with which of them are broken.
    """

    rows: Dataset
    left_out: int
    fingerprint: str


def check_rows(
    rows: Dataset, encoder: RowEncoder, name: str, broken: BrokenRows, on_row: Callable[[], None]
) -> CheckedRows:
    """Encodes each row once. Holds one row at a time, and 8 bytes for each that is right.

    Args:
        name: Of the rows, for errors.
        broken: `refuse` raises at the first broken row; `skip` logs it and leaves it out.
        on_row: Called after each row.

    Raises:
        InvalidInput: A row is broken and `broken` is `refuse`, or all rows are broken. It names the first one.
    """
    digest, places, first = hashlib.sha256(), array("q"), ""
    for index in range(len(rows)):
        try:
            _, data = encoder.encoded(rows, index)
        except InvalidInput as error:
            if broken == "refuse":
                raise
            logger.warning("skipped: %s", error.message)
            first = first or error.message
            digest.update(b"broken")
        else:
            places.append(index)
            digest.update(_digest(data))
        on_row()
    if not places:
        raise InvalidInput(f"all {len(rows)} rows of {name} are broken; the first: {first}", field=name)
    right = rows if len(places) == len(rows) else rows.part(rows.indices[np.array(places, np.int64)])
    return CheckedRows(right, len(rows) - len(places), f"{len(rows)} rows, {digest.hexdigest()[:16]}")


def _digest(data: list[tinker.Datum]) -> bytes:
    """Returns a digest of a row as training has it: tokens, files of pictures, targets and weights."""
    digest = hashlib.sha256()
    for datum in data:
        for chunk in datum.model_input.chunks:
            if isinstance(chunk, ImageChunk):
                digest.update(b"picture" + hashlib.sha256(chunk.data).digest())
            elif isinstance(chunk, tinker.EncodedTextChunk):
                digest.update(b"tokens" + np.asarray(chunk.tokens, np.int64).tobytes())
        for name in ("target_tokens", "weights"):
            digest.update(name.encode() + datum.loss_fn_inputs[name].to_numpy().tobytes())
    return digest.digest()
