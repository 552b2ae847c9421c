"""Room for kept results: of what all owners may have together, one may have as much as is free."""

import logging
from collections import Counter
from functools import partial

from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.database.database import Database
from fovea_gateway.futures import future_rows as rows

logger = logging.getLogger(__name__)


class ResultRoom:
    """Counts, if they may be many, what the database keeps of results; above an owner's share its oldest expire early.

    Nobody is refused for it: those who wait for a result are given it when it comes, and results that are old have been
    fetched, but for those of clients that are away.

    Args:
        capacity_bytes: Of all results.
    """

    def __init__(self, database: Database, capacity_bytes: int) -> None:
        self._database, self._capacity_bytes = database, capacity_bytes
        self._counted_bytes, self._counted_at = capacity_bytes, 0  # until the first count anything may be there

    async def bound(self, kept_bytes: int) -> list[str]:
        """Drops what is above shares; returns whose results, by future id.

        Args:
            kept_bytes: Of all results that this process ever kept.
        """
        if self._counted_bytes + kept_bytes - self._counted_at <= self._capacity_bytes // 2:
            return []  # no owner can have more than is free
        held = Counter(await self._database.read(rows.result_bytes))
        dropped: list[str] = []
        for owner, size_bytes in held.most_common():
            surplus = (size_bytes + held.total() - self._capacity_bytes + 1) // 2
            if surplus <= 0:
                break
            found = await self._database.write(partial(rows.drop_oldest, owner=owner, least_bytes=surplus))
            held[owner] -= sum(found.values())
            dropped += found
            logger.warning(
                "owner %s kept %d bytes of results, more than was free of max_result_bytes, %d: its oldest %d are gone",
                owner,
                size_bytes,
                self._capacity_bytes,
                len(found),
            )
        self._counted_bytes, self._counted_at = held.total(), kept_bytes
        metrics.RESULT_BYTES.set(held.total())
        return dropped
