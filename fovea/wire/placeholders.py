"""One rule, held at every hop: a placeholder in the place of an image that is not there is a lost image."""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt


def find_lost_image(
    ids: npt.NDArray, opener_id: int | None, reserved_ids: Collection[int], previous_id: int = -1
) -> int | None:
    """Index of the first placeholder that follows the token which opens an image, or None.

    A placeholder by itself is a token like any other, since a model may sample one.

    Args:
        ids: Token ids [N] without those of images that are there (or with -1 in their places).
        opener_id: The id that an image follows, as `<|vision_start|>`; None if the model has none.
        reserved_ids: Ids that stand for a piece of an image.
        previous_id: The id before `ids`.
    """
    if opener_id is None or not len(ids):
        return None
    opened = np.concatenate(([previous_id], ids[:-1])) == opener_id
    lost = np.flatnonzero(opened & np.isin(ids, list(reserved_ids)))
    return int(lost[0]) if lost.size else None
