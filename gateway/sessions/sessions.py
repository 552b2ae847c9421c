"""Sessions: opened, kept alive, ended once. The end of a session stops and frees everything that it owns."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fovea.wire.errors import NotFound, SessionEnded
from gateway.access.quotas import Shares
from gateway.database.database import Database
from gateway.identity import Caller, check_metadata, new_session_id
from gateway.sessions import session_rows as rows
from gateway.sessions.session_rows import Session
from gateway.training import model_rows

logger = logging.getLogger(__name__)


class Sessions:
    """Sessions by id.

    Args:
        ttl_s: Seconds without heartbeat after which a session ends.
        shares: Limits how many an owner may have open.

    Set `on_end` to what must be stopped with a session.
    """

    def __init__(self, database: Database, ttl_s: float, shares: Shares) -> None:
        self._database = database
        self._ttl_s = ttl_s
        self._shares = shares
        self._sessions: dict[str, Session] = {}
        self._alive_at: dict[str, float] = {}
        self.on_end: Callable[[Session], Awaitable[None]] = _nothing

    async def create(
        self,
        caller: Caller,
        tags: list[str],
        user_metadata: dict[str, Any],
        request_key: str | None,
        display_name: str | None = None,
    ) -> Session:
        """Opens a session, or answers the one that the same request key opened before.

        Raises ResourceExhausted above the owner's share, Unavailable while the disk is full.
        """
        self._database.check_room()
        self._shares.check(caller.owner)
        check_metadata({"tags": tags, "user_metadata": user_metadata}, "user_metadata with tags")
        session = Session(new_session_id(), caller.owner, request_key, tags, user_metadata, display_name)
        if not await self._database.write(lambda connection: rows.insert_session(connection, session)):
            known = await self._database.read(
                lambda connection: rows.find_session(connection, caller.owner, request_key or "")
            )
            assert known is not None, "an insert failed without a row in its way"
            return self._sessions.get(known.session_id, known)
        self._sessions[session.session_id] = session
        self._alive_at[session.session_id] = time.monotonic()
        self._shares.take(caller.owner)
        logger.info("session %s opened", session.session_id)
        return session

    async def get(self, caller: Caller, session_id: str) -> Session:
        """A session of the caller, over or not. Raises NotFound."""
        session = await self.load(session_id)
        if session.owner != caller.owner:
            raise NotFound(f"there is no session {session_id!r}", field="session_id")
        return session

    async def load(self, session_id: str) -> Session:
        """A session, whoever owns it: from memory while it is open, else from its row. Raises NotFound."""
        session = self._sessions.get(session_id)
        if session is None:
            session = await self._database.read(lambda connection: rows.get_session(connection, session_id))
            if session is None:
                raise NotFound(f"there is no session {session_id!r}", field="session_id")
        return session

    def cached(self, session_id: str) -> Session:
        """A session that is in use, so in memory."""
        return self._sessions[session_id]

    async def require(self, caller: Caller, session_id: str) -> Session:
        """A session that is not over. Raises NotFound, SessionEnded."""
        session = await self.get(caller, session_id)
        if session.ended_at is not None:
            raise SessionEnded(f"session {session_id} is over ({session.end_reason}): open a new one")
        self._alive_at[session_id] = time.monotonic()  # whoever uses a session is alive
        return session

    async def finish(self, caller: Caller, session_id: str, reason: str, detail: str | None) -> None:
        """Ends a session. The first reason stays."""
        await self._end(await self.get(caller, session_id), reason, detail)

    async def page(self, caller: Caller, limit: int, offset: int) -> list[str]:
        """Ids of the caller's sessions, newest first."""
        return await self._database.read(lambda connection: rows.list_sessions(connection, caller.owner, limit, offset))

    async def contents(self, session: Session) -> tuple[list[str], list[str]]:
        """Ids of a session's models and of its sampling sessions."""
        model_ids = await self._database.read(lambda connection: model_rows.of_session(connection, session.session_id))
        sampler_ids = await self._database.read(
            lambda connection: rows.list_sampling_sessions(connection, session.session_id)
        )
        return model_ids, sampler_ids

    def forget(self, session_id: str) -> None:
        """Drops from memory a session that is over."""
        self._sessions.pop(session_id, None)
        self._alive_at.pop(session_id, None)

    async def restore(self) -> None:
        """Reads open sessions after a restart; each gets its full time again, since it could not heartbeat."""
        for session in await self._database.read(rows.open_sessions):
            self._alive_at[session.session_id] = time.monotonic()
            self._sessions[session.session_id] = session
            self._shares.take(session.owner)

    async def sweep(self) -> None:
        """Ends sessions without heartbeat."""
        now = time.monotonic()  # the wall's clock may jump, which would end the sessions of clients that are well
        for session in list(self._sessions.values()):
            if session.ended_at is None and now - self._alive_at.get(session.session_id, now) > self._ttl_s:
                await self._end(session, "expired", f"no heartbeat for {self._ttl_s:.0f} s")

    async def _end(self, session: Session, reason: str, detail: str | None) -> None:
        if session.ended_at is not None:
            return
        session.ended_at, session.end_reason, session.end_detail = time.time(), reason, detail
        self._shares.give(session.owner)
        values = {"ended_at": session.ended_at, "end_reason": reason, "end_detail": detail}
        await self._database.write(lambda connection: rows.update_session(connection, session.session_id, **values))
        logger.info("session %s is over: %s", session.session_id, reason)
        await self.on_end(session)


async def _nothing(session: Session) -> None:
    pass
