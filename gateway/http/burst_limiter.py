"""A turnstile for what clients send by the thousand, so that everything else is answered in between.

The event loop runs all that is ready before it looks at the network again: two thousand polls that come or end together
would keep an unrelated request waiting for a second. Through the turnstile a few go in each turn of the loop.
"""

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

_PER_TURN = 8
_BULK = ("/retrieve_future", "/retrieve_futures", "/asample")


class Turnstile:
    """Lets a few tasks pass in each turn of the event loop, first come first served."""

    def __init__(self, per_turn: int = _PER_TURN) -> None:
        self._per_turn = per_turn
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Returns when it is the caller's turn: at once unless others are many."""
        loop = asyncio.get_running_loop()
        if self._waiting or self._passed >= self._per_turn:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
        elif not self._passed:
            loop.call_soon(self._next_turn)
            self._passed = 1
        else:
            self._passed += 1

    def _next_turn(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < self._per_turn:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._passed += 1
        if self._passed:
            asyncio.get_running_loop().call_soon(self._next_turn)


class BulkMiddleware:
    """Sends bulk requests through a turnstile, before anything is done for them."""

    def __init__(self, app: ASGIApp, turnstile: Turnstile) -> None:
        self._app, self._turnstile = app, turnstile

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] == "http" and scope["path"].endswith(_BULK):
            await self._turnstile.enter()
        await self._app(scope, receive, send)
