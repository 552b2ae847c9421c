"""The limit for stored results. An owner may use as many bytes as are still free."""

import logging
from collections import Counter
from functools import partial

from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.database.database import Database
from fovea_gateway.sessions import future_rows as rows

logger = logging.getLogger(__name__)


class ResultRoom:
    """The limit of stored results. If an owner exceeds its share, its oldest results expire early.

    No request is refused for this reason: waiting clients receive a result when it arrives, and older results have been
    fetched already, except those of clients that are away.

    Args:
        capacity_bytes: The limit for all stored results together.
    """

    def __init__(self, database: Database, capacity_bytes: int) -> None:
        self._database, self._capacity_bytes = database, capacity_bytes
        self._counted_bytes, self._counted_at = capacity_bytes, 0  # Assume a full store until the first count.

    async def bound(self, kept_bytes: int) -> list[str]:
        """Deletes results above the owners' shares and returns the ids of their futures.

        Counts the stored bytes only if enough results may have accumulated since the last count.

        Args:
            kept_bytes: The bytes of all results that this process has ever stored.
        """
        if self._counted_bytes + kept_bytes - self._counted_at <= self._capacity_bytes // 2:
            return []  # No owner can have more than is free.
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
                "owner %s stored %d bytes of results, more than were free of max_result_bytes, %d: its oldest %d are "
                "deleted",
                owner,
                size_bytes,
                self._capacity_bytes,
                len(found),
            )
        self._counted_bytes, self._counted_at = held.total(), kept_bytes
        metrics.RESULT_BYTES.set(held.total())
        return dropped
