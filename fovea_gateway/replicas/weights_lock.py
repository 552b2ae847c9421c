"""Guards the full weights in a sampler, so that requests for different weights do not overlap.

A sampler holds one set of full parameters, or the base model, to which adapters are added. Requests for the current set
run side by side. A request for another set waits until they have ended; then the set is replaced, and all requests that
wait for the new set are admitted together. Later requests for the old set queue behind them, so neither side can starve
the other.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

BASE = ""


class WeightsLock:
    """The lock of one sampler.

    Args:
        change: Puts a set of weights in place. It is called while no request is inside.
    """

    def __init__(self, change: Callable[[str], Awaitable[None]]) -> None:
        self._change = change
        self._resident: str | None = BASE
        self._inside = 0
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._changing: asyncio.Task[None] | None = None

    @property
    def resident(self) -> str | None:
        """The current set; None if it is unknown, in which case the next request puts its own set in place."""
        return self._resident

    @property
    def inside(self) -> int:
        """The number of requests that use the current set."""
        return self._inside

    def reset(self, resident: str | None) -> None:
        """Records the current set after a restart or an unexpected change."""
        self._resident = resident
        self._advance()

    def dismiss(self, error: Exception) -> None:
        """Makes all waiting `hold` calls raise the error. Requests inside are not affected."""
        for _, turn in self._waiting:
            if not turn.done():
                turn.set_exception(error)
        self._waiting.clear()

    @asynccontextmanager
    async def hold(self, wanted: str) -> AsyncIterator[None]:
        """Waits until `wanted` is in place and holds it there. Raises the errors of `change`."""
        if self._waiting or self._changing or self._resident != wanted:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((wanted, turn))
            self._advance()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._leave()  # Admitted and cancelled at the same moment.
                raise
        else:
            self._inside += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._inside -= 1
        self._advance()

    def _advance(self) -> None:
        if self._changing:
            return
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()
        if not self._waiting:
            return
        wanted = self._waiting[0][0]
        if wanted == self._resident:
            self._admit(wanted)
            self._advance()
        elif self._inside == 0:
            self._changing = asyncio.create_task(self._put(wanted), name=f"put {wanted or 'base'}")

    def _admit(self, wanted: str) -> None:
        for _, turn in (entry for entry in self._waiting if entry[0] == wanted and not entry[1].done()):
            self._inside += 1
            turn.set_result(None)
        self._waiting = deque(entry for entry in self._waiting if not entry[1].done())

    async def _put(self, wanted: str) -> None:
        try:
            await self._change(wanted)
            self._resident = wanted
        except Exception as error:
            self._resident = None
            for _, turn in (entry for entry in self._waiting if entry[0] == wanted and not entry[1].done()):
                turn.set_exception(error)
        finally:
            self._changing = None
        self._advance()
