"""Pauses between attempts at something that may soon work again."""

import asyncio
import math
import time


class Backoff:
    """Pauses that double from one attempt to the next, until a deadline.

        backoff = Backoff(deadline_s=60.0)
        while True:
            try:
                return await attempt()
            except Unavailable:
                if backoff.is_over:
                    raise
                await backoff.pause()

    Args:
        deadline_s: Seconds from now until `is_over`.
        first_s: Length of the first pause.
        longest_s: Length that pauses do not pass.
    """

    def __init__(self, deadline_s: float = math.inf, first_s: float = 0.1, longest_s: float = 2.0) -> None:
        self._ends_at = time.monotonic() + deadline_s
        self._first_s, self._longest_s = first_s, longest_s
        self.next_s = first_s
        """Length of the next pause, if the deadline does not cut it short."""

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(self._ends_at - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.left_s == 0.0

    def reset(self) -> None:
        """Begins anew with a short pause, after an attempt that went well. The deadline stays."""
        self.next_s = self._first_s

    async def pause(self) -> None:
        """Waits before the next attempt, not beyond the deadline."""
        await asyncio.sleep(min(self.next_s, self.left_s))
        self.next_s = min(2 * self.next_s, self._longest_s)
