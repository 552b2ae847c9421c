"""A sampling session: one choice of weights to sample from; and its row."""

import time
from dataclasses import dataclass, field

import sqlalchemy as sa

from fovea_gateway.database.schema import sampling_sessions
from fovea_gateway.database.sql_engine import insert_new


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


def insert_row(connection: sa.Connection, sampling: SamplingSession) -> bool:
    """Keeps a new sampling session; False if its (session, request_seq_id) is taken."""
    return insert_new(connection, sampling_sessions, vars(sampling))


def get_row(connection: sa.Connection, sampling_session_id: str) -> SamplingSession | None:
    """A sampling session by id."""
    query = sa.select(sampling_sessions).where(sampling_sessions.c.sampling_session_id == sampling_session_id)
    row = (connection.execute(query)).mappings().first()
    return SamplingSession(**row) if row else None


def find_row(connection: sa.Connection, session_id: str, request_seq_id: int) -> SamplingSession | None:
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


def update_followers(connection: sa.Connection, model_id: str, snapshot_id: str) -> None:
    """Points every sampling session that follows a model at its newest weights."""
    where = sampling_sessions.c.followed_model_id == model_id
    connection.execute(sa.update(sampling_sessions).where(where).values(snapshot_id=snapshot_id))


def id_of_sampling_session(session_id: str, number: int) -> str:
    """Id of a session's n-th sampling session."""
    return f"{session_id}:sample:{number}"
