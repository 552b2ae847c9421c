"""Places in a replica, given to owners by turns: whoever has a thousand requests waiting delays another's by one."""

import asyncio
from collections import OrderedDict, deque


class Places:
    """A semaphore that is fair among owners. Requests of one owner go in their order.

    Args:
        count: Places that are free now.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        # Whose turn comes first stands first; whoever was let in goes to the end.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, owner: str) -> None:
        """Waits for a place and takes it."""
        if self._free and not self._waiting:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # let in and cancelled in the same moment
                self.release()
            raise

    def release(self) -> None:
        """Gives a place back, or makes one more."""
        self._free += 1
        while self._free and self._waiting:
            owner, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():
                turn.set_result(None)
                self._free -= 1
