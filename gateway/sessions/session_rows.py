"""Rows of sessions and of sampling sessions."""

import time
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from gateway.database.schema import sampling_sessions, sessions
from gateway.database.sql_engine import insert_new


@dataclass(eq=False)
class Session:
    """What a client opened; owns models and sampling sessions."""

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


@dataclass(eq=False)
class SamplingSession:
    """One choice of weights to sample from. An empty `snapshot_id` means the base model.

    Attributes:
        followed_model_id: The model whose `inflight` saves move this session forward; None if its weights are fixed.
        client_count: Clients that have joined besides the first one.
    """

    sampling_session_id: str
    session_id: str
    owner: str
    base_model: str
    request_seq_id: int | None = None
    model_path: str | None = None
    snapshot_id: str = ""
    followed_model_id: str | None = None
    client_count: int = 0
    created_at: float = field(default_factory=time.time)


def insert_session(connection: sa.Connection, session: Session) -> bool:
    """Keeps a new session; False if its request key is taken."""
    return insert_new(connection, sessions, vars(session))


def find_session(connection: sa.Connection, owner: str, request_key: str) -> Session | None:
    """The session that an earlier request with the same key opened."""
    where = (sessions.c.owner == owner) & (sessions.c.request_key == request_key)
    row = (connection.execute(sa.select(sessions).where(where))).mappings().first()
    return Session(**row) if row else None


def get_session(connection: sa.Connection, session_id: str) -> Session | None:
    """A session by id."""
    query = sa.select(sessions).where(sessions.c.session_id == session_id)
    row = (connection.execute(query)).mappings().first()
    return Session(**row) if row else None


def open_sessions(connection: sa.Connection) -> list[Session]:
    """Sessions that have not ended."""
    query = sa.select(sessions).where(sessions.c.ended_at.is_(None))
    return [Session(**row) for row in (connection.execute(query)).mappings()]


def list_sessions(connection: sa.Connection, owner: str, limit: int, offset: int) -> list[str]:
    """Ids of an owner's sessions, newest first."""
    query = sa.select(sessions.c.session_id).where(sessions.c.owner == owner)
    query = query.order_by(sessions.c.created_at.desc()).limit(limit).offset(offset)
    return [row.session_id for row in connection.execute(query)]


def update_session(connection: sa.Connection, session_id: str, **values: Any) -> None:
    """Writes columns of one session."""
    connection.execute(sa.update(sessions).where(sessions.c.session_id == session_id).values(**values))


def insert_sampling_session(connection: sa.Connection, sampling: SamplingSession) -> bool:
    """Keeps a new sampling session; False if its (session, request_seq_id) is taken."""
    return insert_new(connection, sampling_sessions, vars(sampling))


def get_sampling_session(connection: sa.Connection, sampling_session_id: str) -> SamplingSession | None:
    """A sampling session by id."""
    query = sa.select(sampling_sessions).where(sampling_sessions.c.sampling_session_id == sampling_session_id)
    row = (connection.execute(query)).mappings().first()
    return SamplingSession(**row) if row else None


def find_sampling_session(connection: sa.Connection, session_id: str, request_seq_id: int) -> SamplingSession | None:
    """The sampling session that an earlier request with the same number opened."""
    where = (sampling_sessions.c.session_id == session_id) & (sampling_sessions.c.request_seq_id == request_seq_id)
    row = (connection.execute(sa.select(sampling_sessions).where(where))).mappings().first()
    return SamplingSession(**row) if row else None


def list_sampling_sessions(connection: sa.Connection, session_id: str) -> list[str]:
    """Ids of a session's sampling sessions."""
    query = sa.select(sampling_sessions.c.sampling_session_id).where(sampling_sessions.c.session_id == session_id)
    return [row.sampling_session_id for row in connection.execute(query)]


def add_client(connection: sa.Connection, sampling_session_id: str) -> int:
    """Counts one more client of a sampling session; returns its number, from 1, never given twice."""
    where = sampling_sessions.c.sampling_session_id == sampling_session_id
    count = sampling_sessions.c.client_count
    connection.execute(sa.update(sampling_sessions).where(where).values(client_count=count + 1))
    number: int = connection.execute(sa.select(count).where(where)).scalar_one()
    return number


def move_followers(connection: sa.Connection, model_id: str, snapshot_id: str) -> None:
    """Points every sampling session that follows a model at its newest weights."""
    where = sampling_sessions.c.followed_model_id == model_id
    connection.execute(sa.update(sampling_sessions).where(where).values(snapshot_id=snapshot_id))
