"""API keys from the settings and created ones: revocation, rotation and storage."""

import asyncio
import json
import os
import pwd
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
import tinker

from fovea.api.v1 import gateway_pb2, gateway_pb2_grpc
from fovea.wire.errors import PermissionDenied
from fovea_gateway.access.api_keys import PUBLISHED, Caller, Scope, hash_key, nameless
from fovea_gateway.database.database import Database
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.waiting import eventually

OTHER_KEY = "tml-other"


async def sessions(stand: Stand, key: str) -> list[str] | str:
    """Returns the sessions that a key sees, or the reason that it sees none."""
    async with stand.http(key) as http:
        response = await http.get("sessions")
    answer = response.json()
    if response.status_code != 200:
        assert (response.status_code, answer["category"]) == (401, "user")
        return str(answer["detail"])
    seen: list[str] = answer["sessions"]
    return seen


async def open_session(stand: Stand, key: str) -> str:
    """Opens a session with a key."""
    async with stand.http(key) as http:
        response = await http.post("create_session", json={"tags": [], "sdk_version": "0.38.0"})
    assert response.status_code == 200, response.text
    return str(response.json()["session_id"])


async def command(stand: Stand, *arguments: str, program: str = "keys") -> str:
    """Runs `fovea keys`, or another program, beside the running gateway; returns its output."""
    environment = dict(os.environ)
    if url := stand.overrides.get("database_url"):
        environment["FOVEA_GATEWAY_DATABASE_URL"] = url
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fovea_gateway.access.access_command", program, *arguments,
        "--state-dir", str(stand.state_dir),
        env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, told = await process.communicate()
    assert process.returncode == 0, told.decode()
    return out.decode()


async def rows(stand: Stand) -> dict[str, list[str]]:
    """Returns the lines of `fovea keys list` by owner."""
    _, *lines = (await command(stand, "list")).splitlines()
    return {line.split()[1]: line.split() for line in lines}


async def test_a_key_that_the_settings_no_longer_name_is_not_valid(stand: Stand) -> None:
    await stand.stop()
    await stand.start(api_key=[KEY, OTHER_KEY])
    opened = await open_session(stand, OTHER_KEY)
    await stand.stop()
    await stand.start(api_key=["tml-third"])
    for key in (KEY, OTHER_KEY):
        assert await sessions(stand, key) == (
            "this API key is no longer among the keys of the gateway's settings"
        )  # including the published one
    await stand.stop()
    await stand.start(api_key=[OTHER_KEY])
    assert await sessions(stand, OTHER_KEY) == [opened], "the rotated key must keep access to its owner's data"


async def test_an_owner_named_in_the_settings_rotates_its_key(stand: Stand) -> None:
    await stand.stop()
    await stand.start(api_key=["alice=tml-first", "bob=tml-bob"])
    opened = await open_session(stand, "tml-first")
    await stand.stop()
    await stand.start(api_key=["alice=tml-second", "bob=tml-bob"])
    assert await sessions(stand, "tml-second") == [opened]
    assert await sessions(stand, "tml-bob") == []
    assert isinstance(await sessions(stand, "tml-first"), str)


async def test_keys_are_created_and_revoked_while_the_gateway_runs(stand: Stand) -> None:
    first = (await command(stand, "create", "--owner", "alice", "--name", "laptop")).strip()
    assert first.startswith("tml-")
    assert len(first) >= 4 + 64, "256 bits"

    async def is_let_in() -> bool:
        return isinstance(await sessions(stand, first), list)

    await eventually(is_let_in)
    opened = await open_session(stand, first)
    assert opened not in await sessions(stand, KEY)
    before = await rows(stand)
    second = (await command(stand, "create", "--owner", "alice")).strip()
    await command(stand, "revoke", before["alice"][0])

    async def is_refused() -> bool:
        return await sessions(stand, first) == "this API key has been revoked"

    await eventually(is_refused)
    assert await sessions(stand, second) == [opened], "a rotation must lose nothing"
    assert isinstance(await sessions(stand, KEY), list), "the keys of the settings stay valid"
    # The same over gRPC, in the open session.
    assert stand.gateway is not None
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stand.gateway.grpc.port}") as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        beat = gateway_pb2.HeartbeatRequest(session_id=opened)
        await stub.Heartbeat(beat, metadata=(("x-api-key", second),))
        with pytest.raises(grpc.aio.AioRpcError, match="this API key has been revoked"):
            await stub.Heartbeat(beat, metadata=(("x-api-key", first),))


async def test_a_revoked_key_of_the_settings_stays_revoked(stand: Stand) -> None:
    await stand.stop()
    await stand.start(api_key=["alice=tml-first", KEY])
    await command(stand, "revoke", (await rows(stand))["alice"][0])
    await stand.stop()
    await stand.start()
    assert await sessions(stand, "tml-first") == "this API key has been revoked"


async def test_a_key_expires(stand: Stand) -> None:
    key = (await command(stand, "create", "--owner", "guest", "--days", "1e-6")).strip()

    async def is_expired() -> bool:
        return await sessions(stand, key) == "this API key has expired"

    await eventually(is_expired)


async def test_only_hashes_are_kept(tmp_path: Path) -> None:
    secret = "tml-not-to-be-found-on-any-disk"
    async with running(Stand(tmp_path), api_key=[secret]) as stand:
        created = (await command(stand, "create", "--owner", "alice")).strip()
        await open_session(stand, secret)
    kept = await asyncio.to_thread(lambda: [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()])
    assert kept
    for content in kept:
        assert secret.encode() not in content
        assert created.encode() not in content


async def test_files_on_disk_are_readable_by_their_user_only(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir()  # created by another program before the gateway
    old = state_dir / "gateway.db"
    await asyncio.to_thread(_make, old)
    old.chmod(0o644)
    async with running(Stand(state_dir)) as stand:
        await open_session(stand, KEY)
        modes = {path.name: stat.filemode(path.stat().st_mode) for path in state_dir.iterdir()}
    kept = [mode for name, mode in modes.items() if name.startswith("gateway.db") and not name.endswith(".lock")]
    assert kept == ["-rw-------"] * 4, modes  # with -wal, -shm and .reserve
    assert modes["checkpoints"] == "drwx------"


@pytest.mark.parametrize("mode", [None, 0o750], ids=["new", "of the operator"])
async def test_a_folder_for_checkpoints_is_its_users_alone_unless_the_operator_made_it(
    tmp_path: Path, mode: int | None
) -> None:
    place = tmp_path / "checkpoints of all"
    if mode is not None:
        place.mkdir()
        place.chmod(mode)
    async with running(Stand(tmp_path / "state"), checkpoint_dir=str(place)):
        assert stat.S_IMODE(place.stat().st_mode) == (mode or 0o700)


def _make(database: Path) -> None:
    async def make() -> None:
        opened = Database(f"sqlite:///{database}")
        await opened.open()
        await opened.close()

    asyncio.run(make())


async def test_an_administrator_makes_expires_and_revokes_keys_over_rest(stand: Stand) -> None:
    admin = (await command(stand, "create", "--owner", "root", "--scope", "admin")).strip()

    async def is_let_in() -> bool:
        return isinstance(await sessions(stand, admin), list)

    await eventually(is_let_in)
    async with stand.http(admin) as http:
        made = (await http.post("keys", json={"owner": "alice", "scope": "read", "name": "board"})).json()
        key_id = made["key"]["key_id"]
        assert await sessions(stand, made["text"]) == [], "the key is valid at once"
        await http.put(f"keys/{key_id}/expiry", json={"expires_at": 1.0})
        assert await sessions(stand, made["text"]) == "this API key has expired"
        await http.put(f"keys/{key_id}/expiry", json={"expires_at": None})
        assert await sessions(stand, made["text"]) == []
        assert (await http.delete(f"keys/{key_id}")).json()["key"]["problem"] == "has been revoked"
        assert await sessions(stand, made["text"]) == "this API key has been revoked"
        listed = (await http.get("keys")).json()["keys"]
        assert [key["owner"] for key in listed if key["problem"] == ""] == [listed[0]["owner"], "root"]
        assert not any(made["text"] in str(key) for key in listed)
        for body, field in (({"owner": "a b"}, "owner"), ({"owner": "a", "scope": "all"}, "scope")):
            refused = await http.post("keys", json=body)
            assert (refused.status_code, refused.json()["field"]) == (400, field)
        assert (await http.delete("keys/none")).status_code == 404


async def test_a_key_of_a_narrow_scope_is_refused_in_words_that_the_sdk_prints(stand: Stand) -> None:
    key = (await command(stand, "create", "--owner", "alice", "--scope", "read")).strip()

    async def is_let_in() -> bool:
        return isinstance(await sessions(stand, key), list)

    await eventually(is_let_in)

    def use(client: tinker.ServiceClient) -> None:
        client.create_lora_training_client(base_model=MODEL, rank=8).result()

    with pytest.raises(tinker.PermissionDeniedError, match="has scope read, and POST create_model needs train"):
        await stand.sdk(use, key)
    await command(stand, "expire", (await rows(stand))["alice"][0], "--days", "1e-6")

    async def is_expired() -> bool:
        return await sessions(stand, key) == "this API key has expired"

    await eventually(is_expired)


@pytest.mark.parametrize(
    ("owner", "advised"), [("alice", "alice"), (nameless(hash_key(PUBLISHED)), "NAME")], ids=["owner", "published"]
)
def test_a_narrow_scope_is_told_which_key_to_create(owner: str, advised: str) -> None:
    with pytest.raises(PermissionDenied, match=rf"`fovea keys create --owner {advised} --scope admin`"):
        Caller(owner, "k").require(Scope.ADMIN, "GET audit")


async def test_commands_on_the_database_are_in_the_audit_log(stand: Stand) -> None:
    """As changes over REST are, although no gateway takes part; the entry names the user of the machine."""
    admin = (await command(stand, "create", "--owner", "root", "--scope", "admin")).strip()
    await command(stand, "create", "--owner", "alice")
    alice = (await rows(stand))["alice"][0]
    await command(stand, "expire", alice, "--days", "2")
    await command(stand, "revoke", alice)
    await command(stand, "set", "alice", "--weight", "2", program="owners")
    await command(stand, "host:1", program="drain")
    await command(stand, "host:1", "--undo", program="drain")

    async with stand.http(admin) as http:
        answer = await http.get("audit", params={"owner": "the command line"})
        wrong = await http.get("audit", params={"event": "keys.create"})
    found = [(each["event"], each["event_details"]) for each in answer.json()["entries"]]
    assert [(event, details["route"], details["object_id"]) for event, details in found[1:]] == [
        ("key_create", "fovea keys create", alice),
        ("key_expiry_set", "fovea keys expire", alice),
        ("key_revoke", "fovea keys revoke", alice),
        ("owner_set", "fovea owners set", "alice"),
        ("trainer_drain", "fovea drain", "host:1"),
        ("trainer_drain", "fovea drain --undo", "host:1"),
    ]
    user = pwd.getpwuid(os.getuid()).pw_name
    assert {details["key_id"] for _, details in found} == {f"{user}@{socket.gethostname()}"}
    made, expiring, revoked, owner = (details["new_values"] for _, details in found[1:5])
    assert made == {"owner": "alice", "name": "", "scope": "train", "expires_at": None}
    assert revoked == expiring == made | {"expires_at": pytest.approx(time.time() + 2 * 86400, abs=600)}
    assert (owner["weight"], owner["max_models"]) == (2.0, 0)
    assert "new_values" not in found[5][1], "a drained trainer has none"
    assert wrong.status_code == 400
    assert wrong.json()["detail"].startswith("there is no event 'keys.create'; did you mean 'key_create' or ")

    shown = (await command(stand, "--event", "key_create", "--most", "1", program="audit")).splitlines()
    assert len(shown) == 2
    assert shown[1].split()[-5:] == ["ok", "1", "fovea", "keys", "create"]
    assert f'{alice}  owner="alice", name="", scope="train", expires_at=null' in shown[1]
    exported = (await command(stand, "--owner", "the command line", "--json", program="audit")).splitlines()
    assert [json.loads(line) for line in exported] == answer.json()["entries"]


async def test_the_last_key_of_an_administrator_is_not_revoked_silently(stand: Stand, tmp_path: Path) -> None:
    folder = str(tmp_path / "fresh")

    def keys(*arguments: str) -> str:
        command = [
            sys.executable,
            "-m",
            "fovea_gateway.access.access_command",
            "keys",
            *arguments,
            "--state-dir",
            folder,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

    ids = [keys("create", "--owner", "root", "--scope", "admin").split("key ")[1].split()[0] for _ in range(2)]
    assert "is left" not in keys("revoke", ids[0])
    assert "no valid key of scope admin is left" in keys("revoke", ids[1])


async def test_a_new_key_is_not_expired(stand: Stand) -> None:
    async with stand.http((await command(stand, "create", "--owner", "root", "--scope", "admin")).strip()) as http:

        async def is_known() -> bool:  # the gateway reads new keys every second
            return (await http.get("keys")).status_code == 200

        await eventually(is_known)
        past = await http.post("keys", json={"owner": "eve", "expires_at": 1e9})
        misspelt = await http.put("owners/eve", json={"max_model": 3})
    assert past.status_code == misspelt.status_code == 400
    assert (past.json()["field"], "in the past" in past.json()["detail"]) == ("expires_at", True)
    assert misspelt.json()["detail"] == "max_model: there is no such field; did you mean 'max_models'?"


def test_a_database_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fovea_gateway.access.access_command", "keys", "list"]
    url = "postgresql://fovea:s3cret@127.0.0.1:1/state"
    environment = os.environ | {"FOVEA_GATEWAY_DATABASE_URL": url}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert lines[-1].startswith("fovea keys: PostgreSQL state at 127.0.0.1:1 cannot be reached: ")
    assert "Traceback" not in ended.stderr
    assert "s3cret" not in ended.stderr


def test_a_scope_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fovea_gateway.access.access_command", "keys", "create", "--owner", "alice"]
    command += ["--scope", "trian", "--state-dir", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "invalid choice: 'trian' (choose from 'read', 'sample', 'train', 'admin')" in " ".join(ended.stderr.split())
