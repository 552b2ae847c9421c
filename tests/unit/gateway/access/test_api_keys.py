"""Keys from settings, the published key, and overlapping reads of keys and owners."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fovea.wire.errors import InvalidInput, PermissionDenied
from fovea_gateway.access.api_keys import GivenKey, KeyRing, Scope, parse_given
from fovea_gateway.access.owners import Owner, Owners
from fovea_gateway.database.database import Database, Job
from fovea_gateway.settings import GatewaySettings

OTHERS = {"model_name": "n", "model": "/m", "renderer": ["r:1"], "sampler": ["s:1"], "trainer": "t:1"}


def settings(**values: object) -> GatewaySettings:
    return GatewaySettings(**(OTHERS | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("tml-abc", GivenKey("", "tml-abc")),
        ("tml-a=b", GivenKey("", "tml-a=b")),
        ("alice=tml-abc", GivenKey("alice", "tml-abc")),
        ("a.b-c@d=tml-ab=c", GivenKey("a.b-c@d", "tml-ab=c")),
    ],
)
def test_a_key_may_name_its_owner(text: str, given: GivenKey) -> None:
    assert parse_given(text) == given


@pytest.mark.parametrize("text", ["", "x", "tml-", "abc-tml-secret", "alice=secret", "=tml-secret", "a b=tml-secret"])
def test_what_is_no_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ValidationError, match=r"api_key\n.*tml-") as refused:
        settings(api_key=[text])
    assert "secret" not in refused.value.errors()[0]["msg"]


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice=tml-one\n\nbob=tml-two\n")
    given = settings(api_key=["tml-three"], api_key_file=file).given_keys
    assert given == [GivenKey("", "tml-three"), GivenKey("alice", "tml-one"), GivenKey("bob", "tml-two")]
    file.write_text("nothing")
    with pytest.raises(ValidationError, match="api_key_file"):
        settings(api_key_file=file)
    with pytest.raises(ValidationError, match="cannot be read: No such file"):
        settings(api_key_file=tmp_path / "none")


async def test_the_published_key_is_for_this_machine_alone(database_url: str) -> None:
    with pytest.raises(ValidationError, match=r"api_key\n.*tml-local is a published key"):
        settings(host="0.0.0.0", api_key=["tml-own", "alice=tml-local"])
    database = Database(database_url)
    await database.open()
    for host in ("0.0.0.0", "::", "192.0.2.7", "my.host"):
        with pytest.raises(InvalidInput, match=f"host is {host}.* no API key: .*--api-key-file"):
            await KeyRing(database, settings(host=host).given_keys, host).load()
    for host in ("127.0.0.1", "::1", "localhost"):
        ring = KeyRing(database, settings(host=host).given_keys, host)
        await ring.load()
        assert ring.identify("tml-local").owner.startswith("key-")
    await KeyRing(database, settings(host="0.0.0.0", api_key=["tml-own"]).given_keys, "0.0.0.0").load()
    await database.close()


@pytest.mark.parametrize(
    ("addresses", "is_taken"),
    [
        ([], True),
        (["127.0.0.1:8000"], True),
        (["[::1]:8000"], True),
        (["LOCALHOST:8000", "http://localhost:3000"], True),
        (["gpu7.lan:8000", "http://GPU7.lan:8000"], True),
        (["evil.example:8000"], False),
        (["127.0.0.1:8000", "http://evil.example"], False),
        (["127.0.0.1:8000", "evil.example"], False),
        (["127.0.0.1:8000", "null"], False),
        (["localhost.evil.example"], False),
        (["127.0.0.1.evil.example"], False),
        (["192.0.2.7"], False),
        (["[oops"], False),
    ],
)
async def test_the_published_key_works_under_loopback_names_alone(
    database_url: str, addresses: list[str], is_taken: bool
) -> None:
    """A page of any site can send it by DNS rebinding, but not a key that it does not know."""
    database = Database(database_url)
    await database.open()
    ring = KeyRing(database, [GivenKey("", "tml-local"), GivenKey("bob", "tml-own")], "127.0.0.1", ["gpu7.lan"])
    await ring.load()
    assert ring.identify("tml-own", addresses).owner == "bob"
    if is_taken:
        assert ring.identify("tml-local", addresses).owner.startswith("key-")
    else:
        with pytest.raises(PermissionDenied, match="allowed_host"):
            ring.identify("tml-local", addresses)
    await database.close()


class SlowDatabase(Database):
    """A database with one read that returns late, with the rows from its start."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.held: asyncio.Event | None = None
        self.has_read = asyncio.Event()

    async def read(self, job: Job[Any]) -> Any:
        held, self.held = self.held, None
        rows = await super().read(job)
        if held is not None:
            self.has_read.set()
            await held.wait()
        return rows


async def test_a_read_that_returns_late_does_not_undo_a_change(database_url: str) -> None:
    database = SlowDatabase(database_url)
    await database.open()
    ring, owners = KeyRing(database, [], "127.0.0.1"), Owners(database)
    await ring.load()
    _, key = await ring.create("carol", "", Scope.TRAIN, None)
    for read, change in ((ring._read, ring.revoke(key.key_id)), (owners.read, owners.put(Owner("carol", weight=3)))):
        held = database.held = asyncio.Event()
        database.has_read.clear()
        late = asyncio.create_task(read())
        await database.has_read.wait()
        changing = asyncio.create_task(change)
        await asyncio.wait([changing], timeout=0.5)
        held.set()
        await asyncio.gather(late, changing)
    assert not ring.is_valid(key.key_id)
    assert owners.weight("carol") == 3
    await database.close()
