"""Batched rows of futures."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import sqlalchemy as sa

from fovea_gateway.database import schema
from fovea_gateway.database.database import Batched, Database
from fovea_gateway.database.sql_engine import make_engine, parse_url
from fovea_gateway.sessions import future_rows as rows
from fovea_gateway.sessions.future import Kind, Outcome, State, Submission


def submission(number: int) -> rows.Accepted:
    submitted = Submission(f"s:{number}", Kind.SAMPLE, "owner", "sess", "s", number)
    return rows.Accepted(submitted, State.QUEUED, f"request {number}".encode())


def finished(number: int) -> rows.Finished:
    return rows.Finished(f"s:{number}", Outcome(Kind.SAMPLE, f"result {number}".encode()), 1.0, number)


def submitting(number: int) -> Batched[rows.Accepted, bool]:
    return Batched(rows.insert, submission(number))


def finishing(number: int) -> Batched[rows.Finished, None]:
    return Batched(rows.finish, finished(number))


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(database_url)
    await opened.open()
    yield opened
    await opened.close()


async def test_each_of_many_submissions_learns_whether_it_is_new(database: Database) -> None:
    known = range(0, 600, 7)
    await asyncio.gather(*(database.write(submitting(number)) for number in known))
    news = await asyncio.gather(*(database.write(submitting(number)) for number in range(600)))
    assert news == [number not in known for number in range(600)]
    kept = await database.read(rows.unfinished)
    assert {pending.submission.seq_id for pending in kept} == set(range(600))
    assert await database.read(lambda connection: rows.get_request(connection, "s:8")) == b"request 8"


async def test_an_outcome_behind_its_submission_in_one_group_counts(database: Database) -> None:
    jobs = [job(number) for number in range(100) for job in (submitting, finishing)]
    await asyncio.gather(
        *(database.write(submitting(number)) for number in range(100, 200)), *map(database.write, jobs)
    )
    stored = await database.read(lambda connection: rows.get(connection, "s:99"))
    assert stored is not None
    assert stored.outcome is not None
    assert stored.outcome.result == b"result 99"
    assert {pending.submission.seq_id for pending in await database.read(rows.unfinished)} == set(range(100, 200))


async def test_a_bad_one_among_many_fails_alone(database: Database) -> None:
    bad = submission(5)
    bad = bad._replace(submission=replace(bad.submission, owner=None))  # type: ignore[arg-type]
    jobs = [submitting(number) if number != 5 else Batched(rows.insert, bad) for number in range(50)]
    results = await asyncio.gather(*map(database.write, jobs), return_exceptions=True)
    assert [isinstance(result, sa.exc.IntegrityError) for result in results] == [number == 5 for number in range(50)]
    assert len(await database.read(rows.unfinished)) == 49


def test_many_take_as_many_statements_as_one(database_url: str) -> None:
    engine = make_engine(parse_url(database_url), 1)
    statements: list[str] = []
    with engine.begin() as connection:
        schema.metadata.create_all(connection)
        sa.event.listen(engine, "before_cursor_execute", lambda *call: statements.append(call[2]))
        rows.insert(connection, [submission(number) for number in range(200)])
        rows.finish(connection, [finished(number) for number in range(200)])
    engine.dispose()
    assert len(statements) == 5
