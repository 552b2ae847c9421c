"""Sessions, which clients open, keep alive and end; and their database rows.

The end of a session frees everything that it owns. The consumer of `next_ended` does this work.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from fovea.wire.errors import NotFound, ResourceExhausted, SessionEnded, Unavailable
from fovea_gateway.access.api_keys import CALLER, SUBJECT, Scope, asked_owner
from fovea_gateway.access.audit_log import VALUES
from fovea_gateway.access.kept_rows import KeptRows, check_text
from fovea_gateway.access.owners import Quota, check_project, put_project
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import models, sampling_sessions, sessions
from fovea_gateway.database.sql_engine import insert_new

logger = logging.getLogger(__name__)

_Read = Callable[[Callable[[sa.Connection], "Session | None"]], Awaitable["Session | None"]]


@dataclass(eq=False)
class Session:
    """A client's session, which owns models and sampling sessions.

    Attributes:
        parked_at: The time at which its models moved to the trainer's storage because its client was silent, in seconds
            since the epoch. None while it is in use.
        parked_bytes: The bytes that its models use there.
    """

    session_id: str
    owner: str
    request_key: str | None = None
    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, Any] = field(default_factory=dict)
    display_name: str | None = None
    created_at: float = field(default_factory=time.time)
    heartbeat_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    end_reason: str | None = None
    end_detail: str | None = None
    next_sampling_number: int = 0
    parked_at: float | None = None
    parked_bytes: int = 0


class Sessions:
    """All sessions, by id.

    Args:
        ttl_s: Seconds without a heartbeat after which a session is silent.
        quota: Limits the number of open sessions per owner.
        rows: Limits the size of an owner's rows in the database.
        quiet_s: Seconds without a heartbeat or a poll after which a client may be gone.
    """

    def __init__(self, database: Database, ttl_s: float, quota: Quota, rows: KeptRows, quiet_s: float) -> None:
        self._database = database
        self._ttl_s, self._quiet_s = ttl_s, quiet_s
        self._quota, self._rows = quota, rows
        self._sessions: dict[str, Session] = {}
        self._alive_at: dict[str, float] = {}
        self._heard_at: dict[str, float] = {}
        self._ended: asyncio.Queue[Session] = asyncio.Queue()
        self._being_freed: dict[str, asyncio.Event] = {}

    async def create(
        self,
        owner: str,
        tags: list[str],
        user_metadata: dict[str, Any],
        request_key: str | None,
        display_name: str | None = None,
        project_id: str | None = None,
    ) -> Session:
        """Opens a session, or returns the one that a request with the same key has opened.

        Raises InvalidInput for too much text or the name of the project, ResourceExhausted above the owner's share, and
        Unavailable while the disk is full.
        """
        project = None if project_id is None else check_project(project_id)
        if known := await self._known(self._database.read, owner, request_key):
            return known
        texts = {"tags": tags, "user_metadata": user_metadata, "display_name": display_name}
        try:
            self._database.check_room()
            self._quota.check(owner)
            self._rows.take(owner, texts | {"x-idempotency-key": request_key, "project_id": project})
        except (ResourceExhausted, Unavailable):
            if known := await self._known(self._database.read_whole, owner, request_key):
                return known
            raise
        new_id = self._database.shards.new_session_id(secrets.token_hex(8))
        session = Session(new_id, owner, request_key, tags, user_metadata, display_name)
        SUBJECT.set(session.session_id)
        if not await self._database.write(lambda connection: self._insert(connection, session, project)):
            known = await self._known(self._database.read_whole, owner, request_key)
            assert known is not None, "an insert failed although no row was in its way"
            return known
        self._sessions[session.session_id] = session
        self._alive_at[session.session_id] = time.monotonic()
        self._quota.take(owner)
        logger.info("session %s opened", session.session_id)
        return session

    async def get(self, owner: str, session_id: str) -> Session:
        """Returns a session of the owner, open or ended. Raises NotFound."""
        session = await self.load(session_id)
        if session.owner != owner:
            raise NotFound(f"there is no session {session_id!r}", field="session_id")
        return session

    async def load(self, session_id: str) -> Session:
        """Returns a session of any owner, from memory if it is open, otherwise from its row. Raises NotFound."""
        session = self._sessions.get(session_id)
        if session is None:
            session = await self._database.read(lambda connection: get_session(connection, session_id))
            if session is None:
                raise NotFound(f"there is no session {session_id!r}", field="session_id")
        return session

    async def load_open(self, session_id: str) -> Session:
        """Returns a session of any owner that has not ended. Raises NotFound, SessionEnded."""
        session = await self.load(session_id)
        if session.ended_at is not None:
            raise SessionEnded.of(session_id, session.end_reason)
        return session

    def cached(self, session_id: str) -> Session:
        """Returns a session that is in use and therefore in memory."""
        return self._sessions[session_id]

    async def require(self, owner: str, session_id: str) -> Session:
        """Returns a session that has not ended, and resumes it if it was parked. Raises NotFound, SessionEnded."""
        session = await self.get(owner, session_id)
        if session.ended_at is not None:
            raise SessionEnded.of(session_id, session.end_reason)
        if session.parked_at is not None:
            session = await self._resume(session)
        self._alive_at[session_id] = time.monotonic()  # Any use of a session counts as a heartbeat.
        return session

    async def finish(self, owner: str, session_id: str, reason: str, detail: str | None) -> None:
        """Ends a session of the caller, or for the scope admin of any owner. If it has ended already, its first reason
        remains.

        Raises NotFound, InvalidInput for too long a detail, and PermissionDenied if the caller's key could not have
        created the session's contents.
        """
        check_text({"detail": detail})
        is_admin = CALLER.get().scope.includes(Scope.ADMIN)
        session = await (self.load(session_id) if is_admin else self.get(owner, session_id))
        await self._check_scope(session, "ending")
        await self._end(session, reason, detail)

    async def assign(self, owner: str, session_id: str, project_id: str) -> None:
        """Moves a session, with its models and checkpoints, into a project.

        Raises NotFound, InvalidInput for the name, ResourceExhausted above the owner's share, and PermissionDenied if
        the caller's key could not have created the session's contents.
        """
        VALUES.set({"project_id": check_project(project_id)})
        session = await self.get(owner, session_id)
        await self._check_scope(session, "moving")
        self._rows.take(owner, {"project_id": project_id})
        await self._database.write(lambda connection: put_project(connection, owner, session_id, project_id))

    async def _check_scope(self, session: Session, what: str) -> None:
        model_ids, sampling_ids = await self.contents(session)
        if model_ids or sampling_ids:
            needed = Scope.TRAIN if model_ids else Scope.SAMPLE
            CALLER.get().require(needed, f"{what} a session with {'models' if model_ids else 'samples'}")

    async def page(self, owner: str, limit: int, offset: int) -> list[str]:
        """Returns the ids of the caller's sessions, newest first."""
        return await self._database.read_whole(lambda connection: list_sessions(connection, owner, limit, offset))

    async def contents(self, session: Session) -> tuple[list[str], list[str]]:
        """Returns the ids of a session's models and of its sampling sessions."""
        return await self._database.read(lambda connection: owned_ids(connection, session.session_id))

    async def next_ended(self) -> Session:
        """Waits for a session that has ended. The caller must free what it owns and then call `forget`."""
        return await self._ended.get()

    async def wait_freed(self, but: str) -> None:
        """Waits until all sessions that have ended by now are freed, except `but`, which may wait for the caller."""
        for session_id, freed in list(self._being_freed.items()):
            if session_id != but:
                await freed.wait()

    def free(self, session: Session) -> None:
        """Queues an ended session so that everything it owns is freed."""
        self._being_freed[session.session_id] = asyncio.Event()
        self._ended.put_nowait(session)

    def forget(self, session_id: str) -> None:
        """Drops from memory an ended session that no longer owns anything."""
        self._drop(session_id)
        self._being_freed.pop(session_id).set()

    async def restore(self) -> None:
        """Reads open sessions after a restart. Each gets its full time again, since it could not send heartbeats."""
        for session in await self._database.read(open_sessions):
            self._alive_at[session.session_id] = time.monotonic()
            self._sessions[session.session_id] = session
            self._quota.take(session.owner)

    @property
    def open_count(self) -> int:
        """The number of open sessions, including those of silent clients."""
        return len(self._sessions)

    def silent(self) -> list[Session]:
        """Returns the open sessions without a heartbeat for `ttl_s`."""
        return [session for session in self._sessions.values() if self.is_silent(session)]

    def is_silent(self, session: Session, after_s: float | None = None) -> bool:
        """Returns whether an open session has had no heartbeat for `ttl_s`, or for `after_s` if that is given."""
        now = time.monotonic()  # A jump of the wall clock must not end the sessions of live clients.
        is_late = now - self._alive_at.get(session.session_id, now) > (self._ttl_s if after_s is None else after_s)
        return session.ended_at is None and session.parked_at is None and is_late

    def hear(self, session_id: str) -> None:
        """Records a request for a result. This is no heartbeat: a silent session still ends."""
        if session_id in self._alive_at:
            self._heard_at[session_id] = time.monotonic()

    def is_wanted(self, session_id: str) -> bool:
        """Returns whether a client may wait for a session's queued work, because it was heard from within `quiet_s`."""
        now = time.monotonic()
        last = max(self._alive_at.get(session_id, now), self._heard_at.get(session_id, 0.0))
        return now - last <= self._quiet_s

    async def expire(self, session: Session, detail: str = "") -> None:
        """Ends a session because its client is gone."""
        await self._end(session, "expired", detail or f"no heartbeat for {self._ttl_s:.0f} s")

    async def park(self, session: Session, size_bytes: int) -> None:
        """Marks a session as parked in storage and drops it from memory."""
        at = session.parked_at, session.parked_bytes = time.time(), size_bytes
        self._quota.give(session.owner)
        try:
            await self._save_parked(session)
        except BaseException:
            if (session.parked_at, session.parked_bytes) == at:
                session.parked_at, session.parked_bytes = None, 0
                self._quota.take(session.owner)
            raise
        if session.parked_at is not None:  # The client may have resumed it meanwhile.
            self._drop(session.session_id)
        logger.info("session %s is parked: %d bytes", session.session_id, size_bytes)

    async def parked(self, owner: str | None = None) -> list[Session]:
        """Returns parked sessions of this gateway, longest parked first, of one owner or of all."""
        return await self._database.read(lambda connection: parked_sessions(connection, owner))

    async def parked_for(self, asked: str) -> list[tuple[Session, list[str]]]:
        """Returns parked sessions and the ids of their models, for the owner that `asked_owner` determines from
        `asked`.
        """
        owner = asked_owner(asked, "sessions")

        def read(connection: sa.Connection) -> list[tuple[Session, list[str]]]:
            found = parked_sessions(connection, owner)
            return [(session, models_of(connection, session.session_id)) for session in found]

        return await self._database.read_whole(read)

    def _drop(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._alive_at.pop(session_id, None)
        self._heard_at.pop(session_id, None)

    async def _known(self, read: _Read, owner: str, request_key: str | None) -> Session | None:
        """Returns the session of an earlier request with the same key. A router may have led it to another shard."""
        if not request_key:
            return None
        known = await read(lambda connection: find_session(connection, owner, request_key))
        return known and self._sessions.get(known.session_id, known)

    def _insert(self, connection: sa.Connection, session: Session, project: str | None) -> bool:
        """Inserts a new session, unless a session of any shard has its request key. Returns whether it did."""
        if session.request_key:
            same = {"owner": session.owner, "request_key": session.request_key}
            if self._database.shards.is_elsewhere(connection, sessions.name, same):
                return False
        return insert_session(connection, session, project)

    async def _resume(self, session: Session) -> Session:
        session = self._sessions.setdefault(session.session_id, session)
        if session.parked_at is not None:
            was = session.parked_at, session.parked_bytes
            session.parked_at, session.parked_bytes = None, 0
            self._quota.take(session.owner)
            self._alive_at[session.session_id] = time.monotonic()
            try:
                await self._save_parked(session)
            except BaseException:
                session.parked_at, session.parked_bytes = was
                self._quota.give(session.owner)
                self._drop(session.session_id)
                raise
            logger.info("session %s is resumed", session.session_id)
        return session

    async def _save_parked(self, session: Session) -> None:
        values = {"parked_at": session.parked_at, "parked_bytes": session.parked_bytes}
        await self._database.write(lambda connection: update_session(connection, session.session_id, **values))

    async def _end(self, session: Session, reason: str, detail: str | None) -> None:
        session = self._sessions.get(session.session_id, session)
        if session.ended_at is not None:
            return
        session.ended_at, session.end_reason, session.end_detail = time.time(), reason, detail
        if session.parked_at is None:
            self._quota.give(session.owner)
        values = {"ended_at": session.ended_at, "end_reason": reason, "end_detail": detail}
        try:
            await self._database.write(lambda connection: update_session(connection, session.session_id, **values))
        except BaseException:
            session.ended_at = session.end_reason = session.end_detail = None
            if session.parked_at is None:
                self._quota.take(session.owner)
            raise
        logger.info("session %s has ended: %s", session.session_id, reason)
        self.free(session)


def insert_session(connection: sa.Connection, session: Session, project_id: str | None = None) -> bool:
    """Inserts a new session into a project. Returns False if its request key is in use."""
    is_new = insert_new(connection, sessions, vars(session))
    if is_new and project_id is not None:
        put_project(connection, session.owner, session.session_id, project_id)
    return is_new


def find_session(connection: sa.Connection, owner: str, request_key: str) -> Session | None:
    """Returns the session that an earlier request with the same key opened, or None."""
    where = (sessions.c.owner == owner) & (sessions.c.request_key == request_key)
    row = (connection.execute(sa.select(sessions).where(where))).mappings().first()
    return Session(**row) if row else None


def get_session(connection: sa.Connection, session_id: str) -> Session | None:
    """Returns a session by id, or None."""
    query = sa.select(sessions).where(sessions.c.session_id == session_id)
    row = (connection.execute(query)).mappings().first()
    return Session(**row) if row else None


def open_sessions(connection: sa.Connection) -> list[Session]:
    """Returns the sessions that are neither ended nor parked."""
    query = sa.select(sessions).where(sessions.c.ended_at.is_(None) & sessions.c.parked_at.is_(None))
    return [Session(**row) for row in (connection.execute(query)).mappings()]


def parked_sessions(connection: sa.Connection, owner: str | None) -> list[Session]:
    """Returns parked sessions, longest parked first, of one owner or of all."""
    where = sessions.c.ended_at.is_(None) & sessions.c.parked_at.is_not(None)
    if owner is not None:
        where &= sessions.c.owner == owner
    query = sa.select(sessions).where(where).order_by(sessions.c.parked_at)
    return [Session(**row) for row in connection.execute(query).mappings()]


def list_sessions(connection: sa.Connection, owner: str, limit: int, offset: int) -> list[str]:
    """Returns the ids of an owner's sessions, newest first."""
    query = sa.select(sessions.c.session_id).where(sessions.c.owner == owner)
    query = query.order_by(sessions.c.created_at.desc()).limit(limit).offset(offset)
    return [row.session_id for row in connection.execute(query)]


def update_session(connection: sa.Connection, session_id: str, **values: Any) -> None:
    """Updates columns of one session."""
    connection.execute(sa.update(sessions).where(sessions.c.session_id == session_id).values(**values))


def owned_ids(connection: sa.Connection, session_id: str) -> tuple[list[str], list[str]]:
    """Returns the ids of a session's models, oldest first, and of its sampling sessions."""
    id_column = sampling_sessions.c.sampling_session_id
    of_sampling_sessions = sa.select(id_column).where(sampling_sessions.c.session_id == session_id)
    return models_of(connection, session_id), list(connection.scalars(of_sampling_sessions))


def models_of(connection: sa.Connection, session_id: str) -> list[str]:
    """Returns the ids of a session's models, oldest first."""
    query = sa.select(models.c.model_id).where(models.c.session_id == session_id).order_by(models.c.created_at)
    return list(connection.scalars(query))
