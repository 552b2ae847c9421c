"""A clock for deleting expired data: if the wall clock jumps ahead, nothing is deleted permanently because of it."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_JUMP_S = 60.0
_BELIEVED_AFTER_S = 86400.0


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # includes time asleep and cannot be set


class CautiousClock:
    """A wall clock that ignores jumps ahead: after one, it continues from the old time until the jump has lasted a day.

    Args:
        wall: Returns seconds since the epoch; may jump.
        steady: Returns seconds since an arbitrary moment; never jumps.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = _since_boot) -> None:
        self._wall, self._steady = wall, steady
        self._offset_s = wall() - steady()
        self._jumped_at: float | None = None

    def now(self) -> float:
        """Returns seconds since the epoch, never later than what is known to be true."""
        steady = self._steady()
        own, wall = self._offset_s + steady, self._wall()
        if wall - own <= _JUMP_S:
            self._jumped_at = None
            if own - wall <= _JUMP_S:  # small corrections, such as those of NTP
                self._offset_s = wall - steady
            return min(own, wall)
        if self._jumped_at is None:
            self._jumped_at = steady
            logger.error(
                "the system clock jumped ahead by %.0f s; for one day nothing expires because of it; set "
                "the clock right",
                wall - own,
            )
        elif steady - self._jumped_at > _BELIEVED_AFTER_S:
            self._offset_s, self._jumped_at = wall - steady, None
            return wall
        return own
