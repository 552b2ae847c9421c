"""Rows of sampling sessions."""

import sqlalchemy as sa

from gateway.database.schema import sampling_sessions
from gateway.database.sql_engine import insert_new
from gateway.sampling.sampling_session import SamplingSession


def insert(connection: sa.Connection, sampling: SamplingSession) -> bool:
    """Keeps a new sampling session; False if its (session, request_seq_id) is taken."""
    return insert_new(connection, sampling_sessions, vars(sampling))


def get(connection: sa.Connection, sampling_session_id: str) -> SamplingSession | None:
    """A sampling session by id."""
    query = sa.select(sampling_sessions).where(sampling_sessions.c.sampling_session_id == sampling_session_id)
    row = (connection.execute(query)).mappings().first()
    return SamplingSession(**row) if row else None


def find(connection: sa.Connection, session_id: str, request_seq_id: int) -> SamplingSession | None:
    """The sampling session that an earlier request with the same number opened."""
    where = (sampling_sessions.c.session_id == session_id) & (sampling_sessions.c.request_seq_id == request_seq_id)
    row = (connection.execute(sa.select(sampling_sessions).where(where))).mappings().first()
    return SamplingSession(**row) if row else None


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
