"""URLs of databases."""

import pytest

from fovea.wire.errors import InvalidInput, Unavailable
from fovea_gateway.database.database import Database
from fovea_gateway.database.sql_engine import describe, parse_url
from tests.postgresql import PASSWORD, Server

WRONG = [
    "postgresql://fovea:s3cret@host:port/db",
    "s3cret",
    "mysql://fovea:s3cret@host/db",
    "postgresql://fovea:pass@s3cret@host/db",
    "postgresql://fovea:pass@host1/s3cret@host/db",
    "postgresql://fovea:pass@host1?s3cret@host/db",
]


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_postgresql_means_psycopg_3(scheme: str) -> None:
    url = parse_url(f"{scheme}://fovea:s3cret@db.example:5433/state")
    assert url.drivername == "postgresql+psycopg"
    assert describe(url) == "PostgreSQL state at db.example:5433"


@pytest.mark.parametrize("url", WRONG)
def test_a_wrong_url_is_reported_without_its_password(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"database_url .*postgresql://USER:PASSWORD@HOST") as caught:
        parse_url(url)
    assert "s3cret" not in str(caught.value)
    assert caught.value.field == "database_url"


async def test_a_rejected_connection_is_reported_without_the_password(postgresql: Server) -> None:
    good = postgresql.url()
    refused = {
        good.replace("fovea:se", "fovea:xse"): "password authentication failed",
        good.replace("/postgres", "/nothing"): 'database "nothing" does not exist',
        f"{good}?colour=red": 'invalid connection option "colour"',
        f"{good}?options=-csearch_path%3Dmissing": "no schema has been selected to create in",
    }
    for url, reason in refused.items():
        database = Database(url, patience_s=0)
        with pytest.raises(Unavailable, match=reason) as caught:
            await database.open()
        assert PASSWORD not in str(caught.value)
        await database.close()
