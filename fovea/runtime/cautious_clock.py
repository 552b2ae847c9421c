"""What time it is for deleting what has expired: a wall clock that jumps ahead must delete nothing for good."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_JUMP_S = 60.0
_BELIEVED_AFTER_S = 86400.0


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps, and nobody can set it


class CautiousClock:
    """The wall's clock, unless it jumped ahead: then what it was, going on. A jump is believed if it lasts for a day.

    Args:
        wall: Seconds since the epoch; may jump.
        steady: Seconds since whenever; never jumps.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = _since_boot) -> None:
        self._wall, self._steady = wall, steady
        self._offset_s = wall() - steady()
        self._jumped_at: float | None = None

    def now(self) -> float:
        """Seconds since the epoch that have passed beyond doubt."""
        steady = self._steady()
        own, wall = self._offset_s + steady, self._wall()
        if wall - own <= _JUMP_S:
            self._jumped_at = None
            if own - wall <= _JUMP_S:  # the slow corrections that every clock gets
                self._offset_s = wall - steady
            return min(own, wall)
        if self._jumped_at is None:
            self._jumped_at = steady
            logger.error(
                "the clock jumped ahead by %.0f s: nothing expires by that for a day; set it right", wall - own
            )
        elif steady - self._jumped_at > _BELIEVED_AFTER_S:
            self._offset_s, self._jumped_at = wall - steady, None
            return wall
        return own
