"""Limits of owners, refused with a reason, and their usage by key and day."""

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from fovea.api.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2_grpc
from fovea_gateway.access.api_keys import PUBLISHED, Scope, hash_key, nameless
from fovea_gateway.access.owners import Owner, Usage, Used, add_usage
from tests.contract.gateway.conftest import Stand
from tests.contract.gateway.requests import Rest, text_datum
from tests.contract.gateway.test_tenants import base_session, keyed, sample_request
from tests.waiting import eventually


class Keys:
    """Keys of two owners: alice has two, and bob is an administrator."""

    def __init__(self, stand: Stand) -> None:
        assert stand.gateway is not None
        self.ring, self.owners = stand.gateway.components.keys, stand.gateway.components.owners

    async def make(self) -> None:
        self.alice, first = await self.ring.create("alice", "", Scope.TRAIN, None)
        self.other, second = await self.ring.create("alice", "", Scope.SAMPLE, None)
        self.admin, _ = await self.ring.create("bob", "", Scope.ADMIN, None)
        self.ids = [first.key_id, second.key_id]


@pytest.fixture
async def keys(stand: Stand) -> Keys:
    keys = Keys(stand)
    await keys.make()
    return keys


@pytest.fixture
async def alice(stand: Stand, keys: Keys) -> AsyncIterator[Rest]:
    async with stand.http(keys.alice) as http:
        client = Rest(http)
        await client.open_session()
        yield client


async def test_a_record_is_written_over_rest_grpc_and_command(stand: Stand, keys: Keys) -> None:
    assert stand.gateway is not None
    async with stand.http(keys.admin) as http:
        answer = await http.put("owners/alice", json={"weight": 2.5, "max_models": 3})
        assert answer.json()["owner"]["max_models"] == 3
        assert keys.owners.weight("alice") == 2.5
        refused = await http.put("owners/alice", json={"weight": 0})
        assert (refused.status_code, refused.json()["field"]) == (400, "weight")
        refused = await http.put("owners/alice", json={"max_models": -1})
        assert (refused.status_code, refused.json()["field"]) == (400, "max_models")
    async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        record = admin_pb2.Owner(owner="carol", max_requests_per_s=4)
        await stub.PutOwner(admin_pb2.PutOwnerRequest(owner=record), metadata=keyed(keys.admin))
        listed = await stub.ListOwners(admin_pb2.ListOwnersRequest(), metadata=keyed(keys.admin))
    assert [(owner.owner, owner.weight) for owner in listed.owners] == [("alice", 2.5), ("carol", 1.0)]
    await command(stand, "owners", "set", "alice", "--max-stored-bytes", "1000")
    await eventually(lambda: keys.owners.of("alice") == Owner("alice", 2.5, max_models=3, max_stored_bytes=1000))
    listed = [line.split() for line in (await command(stand, "owners", "list")).splitlines()[1:]]
    assert ["alice", "2.5", "3", "1000", "default", "default"] in listed
    assert ["bob", "1", *["default"] * 4] in listed, "it has only a key"
    async with stand.http(keys.admin) as http:
        entries = (await http.get("audit", params={"event": "owner_set", "outcome": "ok"})).json()["entries"]
        of_carol = (await http.get("audit", params={"object_id": "carol"})).json()["entries"]
    values = {"weight": 1.0, "max_models": 0, "max_stored_bytes": 0, "max_tokens_in_flight": 0, "max_requests_per_s": 0}
    of_each = [(entry["event_details"]["object_id"], entry["event_details"]["new_values"]) for entry in entries]
    assert of_each == [
        ("alice", values | {"weight": 2.5, "max_models": 3}),
        ("carol", values | {"max_requests_per_s": 4}),
        ("alice", values | {"weight": 2.5, "max_models": 3, "max_stored_bytes": 1000}),
    ]
    assert of_carol == [entries[1]]


async def test_a_mistyped_owner_is_refused_with_the_name_that_was_meant(stand: Stand, keys: Keys) -> None:
    for words in (("owners", "set", "alcie", "--max-models", "1"), ("usage", "--owner", "alcie")):
        refused = await command(stand, *words, code=1)
        assert "there is no owner 'alcie'; did you mean 'alice'?" in refused
        assert ("to set limits before the first key, add --create" in refused) is (words[0] == "owners")
    assert "alcie" not in await command(stand, "owners", "list")
    await command(stand, "owners", "set", "dora", "--max-models", "1", "--create")
    await command(stand, "owners", "set", "dora", "--max-models", "2")
    assert re.search(r"^dora +1 +2 +default", await command(stand, "owners", "list"), re.MULTILINE)


async def test_the_published_key_is_found_by_the_name_that_fovea_up_prints(stand: Stand, keys: Keys) -> None:
    assert stand.gateway is not None
    used = [Used(nameless(hash_key(PUBLISHED)), "k", Usage(trained_tokens=24, gpu_seconds=463.7054889))]
    await stand.gateway.components.database.write(lambda connection: add_usage(connection, used, time.time()))
    for words in ((), ("--owner", PUBLISHED)):
        row = (await command(stand, "usage", *words)).splitlines()[1].split()
        assert (row[1], row[3], row[-1]) == (PUBLISHED, "24", "463.7")
    await command(stand, "owners", "set", PUBLISHED, "--max-models", "2")
    assert re.search(rf"^{PUBLISHED} +1 +2 +default", await command(stand, "owners", "list"), re.MULTILINE)
    refused = await command(stand, "owners", "set", PUBLISHED, "--max-models", "-3", code=1)
    assert "max_models is -3; it must be 0 (the gateway's default limit) or more" in refused


async def test_work_on_the_cpu_is_no_usage_of_gpus(stand: Stand, keys: Keys) -> None:
    stand.trainer.devices = {"memory_used_bytes": 60, "memory_total_bytes": 80, "memory_kind": "host"}
    await stand.stop()
    await stand.start()
    async with stand.http(keys.alice) as http:
        client = Rest(http)
        await client.open_session()
        answer = await client.forward_backward(await client.create_model(), 1, data=[text_datum(5)])
        assert "metrics" in await client.result(answer.json()["request_id"])
        rows = (await http.get("usage")).json()["usage"]
    assert [(row["trained_tokens"], row["gpu_seconds"]) for row in rows] == [(5, 0)]


async def command(stand: Stand, *arguments: str, code: int = 0) -> str:
    """Runs `fovea owners` or `fovea usage` beside the running gateway; returns its output or its error."""
    environment = dict(os.environ)
    if url := stand.overrides.get("database_url"):
        environment["FOVEA_GATEWAY_DATABASE_URL"] = url
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fovea_gateway.access.access_command", *arguments, "--state-dir", str(stand.state_dir),
        env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, told = await process.communicate()
    assert process.returncode == code, told.decode()
    return told.decode() if code else out.decode()


async def test_requests_above_an_owners_rate_are_refused_by_name(keys: Keys, alice: Rest) -> None:
    await keys.owners.put(Owner("alice", max_requests_per_s=5))
    answers = [await alice.http.get("sessions") for _ in range(8)]
    assert [answer.status_code for answer in answers[:5]] == [200] * 5
    assert answers[-1].status_code == 429
    assert answers[-1].json()["detail"].startswith("this owner's max_requests_per_s is 5")
    for _ in range(20):  # requests that the SDK sends by itself
        assert (await alice.post("session_heartbeat", session_id=alice.session_id)).status_code == 200
    pages = [page.status_code for page in await asyncio.gather(*(alice.http.get("live/samples") for _ in range(40)))]
    assert pages.count(200) >= 5, "the page must not use up the limit of training"
    assert 429 in pages, "the page has the same limit"


async def test_default_limits_hold_where_a_record_names_none(stand: Stand, keys: Keys, alice: Rest) -> None:
    await stand.stop()
    await stand.start(default_limits={"max_requests_per_s": 5, "max_models": 2})
    assert stand.gateway is not None
    owners = stand.gateway.components.owners
    assert (owners.of("alice").max_requests_per_s, owners.of("alice").max_models) == (5, 2)
    answers = await asyncio.gather(*(alice.http.get("sessions") for _ in range(40)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused[0].json()["detail"].startswith("this owner's max_requests_per_s is 5")
    await owners.put(Owner("alice", max_requests_per_s=1000))
    assert (owners.of("alice").max_requests_per_s, owners.of("alice").max_models) == (1000, 2)
    assert owners.listed() == [Owner("alice", max_requests_per_s=1000)]


async def test_tokens_in_flight_are_limited_by_name(stand: Stand, keys: Keys, alice: Rest) -> None:
    session = await base_session(alice)
    await keys.owners.put(Owner("alice", max_tokens_in_flight=20))
    stand.sampler.open.clear()
    answers = [await alice.sample(session, seq_id) for seq_id in range(4)]  # 3 + 4 tokens
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert "max_tokens_in_flight is 20" in answers[-1].json()["detail"]
    stand.sampler.open.set()
    for answer in answers[:2]:
        await alice.result(answer.json()["request_id"])
    large = {"sampling_params": {"max_tokens": 400}}
    assert (await alice.sample(session, 9, **large)).status_code == 200, (
        "a request above the limit runs alone, or it could never run"
    )


async def test_models_and_stored_bytes_are_limited_by_name(keys: Keys, alice: Rest) -> None:
    await keys.owners.put(Owner("alice", max_models=1, max_stored_bytes=150))
    model_id = await alice.create_model()
    lora = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}
    answer = await alice.ok(
        "create_model", session_id=alice.session_id, model_seq_id=1, base_model="fovea/fake-vl", lora_config=lora
    )
    assert "max_models is 1" in (await alice.result(answer["request_id"]))["error"]
    results = []
    for seq_id in range(1, 4):  # 100 bytes each
        saved = await alice.ok("save_weights", model_id=model_id, seq_id=seq_id, path=f"a{seq_id}")
        results.append(await alice.result(saved["request_id"]))
    assert ["path" in result for result in results] == [True, True, False]
    assert "max_stored_bytes is 150, and its checkpoints with their texts" in results[-1]["error"]


async def test_usage_is_counted_by_key_and_day_in_one_transaction_with_outcomes(
    stand: Stand, keys: Keys, alice: Rest
) -> None:
    model_id = await alice.create_model()
    for seq_id in (1, 2):
        answer = await alice.forward_backward(model_id, seq_id, data=[text_datum(5), text_datum(7)])
        assert "metrics" in await alice.result(answer.json()["request_id"])
    await alice.result((await alice.optim_step(model_id, 3))["request_id"])
    saved = await alice.ok("save_weights", model_id=model_id, seq_id=4, path="a")
    await alice.result(saved["request_id"])
    session = await base_session(alice)
    assert stand.gateway is not None
    async with stand.http(keys.other) as http:
        other = Rest(http)
        for seq_id in range(3):
            await other.result((await other.sample(session, seq_id)).json()["request_id"])
        async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            _ = [event async for event in stub.SampleTokens(sample_request(session), metadata=keyed(keys.other))]
        refused = await http.get("usage?owner=bob")
        assert (refused.status_code, refused.json()["reason"]) == (403, "PERMISSION_DENIED")
    await stand.stop()
    await stand.start()
    async with stand.http(keys.alice) as http:
        found = (await http.get("usage")).json()
    async with stand.http(keys.admin) as http:
        assert (await http.get("usage?owner=*&days=1")).json()["usage"] == found["usage"]
        assert (await http.get("usage")).json() == {"usage": [], "stored_bytes": {}}
    assert found["stored_bytes"] == {"alice": 100}
    rows: dict[str, dict[str, Any]] = {row["key_id"]: row for row in found["usage"]}
    trained, sampled = (rows[key_id] for key_id in keys.ids)
    counted = ("trained_tokens", "scored_tokens", "prompt_tokens", "cached_tokens", "sampled_tokens")
    assert [trained[name] for name in counted] == [24, 0, 0, 0, 0]
    assert [sampled[name] for name in counted] == [0, 0, 12, 12, 14]
    assert trained["gpu_seconds"] > 0
    assert sampled["gpu_seconds"] > 0
    printed = await command(stand, "usage", "--owner", "alice")
    assert any(line.split()[2:4] == [keys.ids[0], "24"] for line in printed.splitlines())
    assert "alice has 100 bytes of checkpoints" in printed
