"""The audit log: one entry per change, over REST and gRPC, searched through AdminClient."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Any

import grpc
import httpx
import pytest
import tinker
from starlette.routing import Route

from fovea.api.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from fovea.wire.errors import Internal
from fovea_gateway.access import audit_log
from fovea_gateway.access.api_keys import Scope
from fovea_gateway.access.audit_log import EVENTS, UNLOGGED, Action, AuditLog
from fovea_gateway.fronts.grpc_interceptors import SCOPES
from fovea_gateway.http.endpoint import Endpoints
from tests.contract.gateway.conftest import Stand
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest
from tests.contract.gateway.test_checkpoints import below, save
from tests.contract.gateway.test_tenants import keyed, sample_request


def today() -> date:
    return datetime.now(UTC).date()


@pytest.fixture
async def admin(stand: Stand) -> str:
    assert stand.gateway is not None
    text, _ = await stand.gateway.components.keys.create("root", "", Scope.ADMIN, None)
    return text


@pytest.fixture
async def log(stand: Stand, admin: str) -> AsyncIterator[httpx.AsyncClient]:
    async with stand.http(admin) as http:
        yield http


async def entries(log: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    answer = await log.get("audit", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["entries"]
    return found


async def test_the_sdk_reads_who_did_what_to_which_checkpoint(stand: Stand, rest: Rest, admin: str) -> None:
    assert stand.gateway is not None
    (own, _) = stand.gateway.components.keys.listed()
    path = await save(rest, await rest.create_model(), 1, "state")
    began = datetime.now(UTC)
    await rest.http.post(f"{below(path)}/publish")
    await rest.http.delete(below(path))
    client = await asyncio.to_thread(tinker.AdminClient, base_url=stand.url, api_key=admin)
    found = (await client.get_audit_log("checkpoints", today())).entries
    published, deleted = [each for each in found if each.event in ("checkpoint_publish", "checkpoint_delete")]
    assert (published.event, deleted.event) == ("checkpoint_publish", "checkpoint_delete")
    assert began <= published.timestamp <= deleted.timestamp
    details = deleted.event_details
    assert (details["owner"], details["key_id"], details["outcome"]) == (own.owner, own.key_id, "ok")
    assert details["route"] == "DELETE training_runs/{run}/checkpoints/{segment}/{name}"
    assert str(details["object_id"]).endswith("/weights/state")
    quiet: list[tuple[Any, date]] = [("projects", today()), ("teams", today()), ("all", today() - timedelta(1))]
    for event_type, day in quiet:
        assert (await client.get_audit_log(event_type, day)).entries == []


async def test_a_change_is_recorded_with_the_values_that_the_object_has_now(
    stand: Stand, rest: Rest, log: httpx.AsyncClient
) -> None:
    model = await rest.create_model()
    path = await save(rest, model, 1, "state")
    await rest.http.put(f"{below(path)}/ttl", json={"ttl_seconds": 3600})
    await rest.http.put(f"sessions/{rest.session_id}/project", json={"project_id": "birds"})
    label = {"name": "n" * 120, "notes": "a\nb", "tags": ["one", "two"]}
    assert (await rest.http.put(f"live/runs/{model}", json=label)).status_code == 200
    unchanged = {"name": "other", "only_if_none": True}
    assert (await rest.http.put(f"live/runs/{model}", json=unchanged)).status_code == 200
    assert (await rest.http.put(f"live/runs/{model}", json={"tags": ["a,b"]})).status_code == 400
    made = (await log.post("keys", json={"owner": "carol", "name": "of carol", "scope": "read"})).json()["key"]
    await log.put(f"keys/{made['key_id']}/expiry", json={"expires_at": 4e9})
    found = {(each["event"], each["event_details"]["object_id"]): each for each in await entries(log, outcome="ok")}
    of_carol = {"owner": "carol", "name": "of carol", "scope": "read"}
    expected = {
        ("checkpoint_ttl_set", path.removeprefix("tinker://")): {"ttl_seconds": 3600},
        ("project_assign", rest.session_id): {"project_id": "birds"},
        ("run_label_set", model): {"name": "n" * 100, "notes": "a\nb", "tags": "one, two"},
        ("key_create", made["key_id"]): of_carol | {"expires_at": None},
        ("key_expiry_set", made["key_id"]): of_carol | {"expires_at": 4e9},
    }
    assert {name: found[name]["event_details"]["new_values"] for name in expected} == expected
    of_run = await entries(log, object_id=model)
    assert {each["event"] for each in of_run} >= {"run_label_set", "checkpoint_ttl_set"}, "what lies below the run"
    assert stand.gateway is not None
    await stand.gateway.components.audit.flush()
    (refused,) = await entries(log, event="run_label_set", outcome="INVALID_INPUT")
    assert "new_values" not in refused["event_details"]


async def test_work_is_counted_by_the_hour(stand: Stand, rest: Rest, log: httpx.AsyncClient) -> None:
    assert stand.gateway is not None
    model = await rest.create_model()
    for seq_id in range(1, 6):
        await rest.result((await rest.ok("optim_step", model_id=model, seq_id=seq_id, adam_params={}))["request_id"])
    await rest.post("optim_step", model_id="no-model", seq_id=1, adam_params={})
    await stand.gateway.components.audit.flush()
    found = {
        (each["event_details"]["object_id"], each["event_details"]["outcome"]): each["event_details"]["count"]
        for each in await entries(log, event="model_optim_step")
    }
    assert found == {(model, "ok"): 5, ("no-model", "NOT_FOUND"): 1}
    (created,) = await entries(log, event="model_create")
    assert created["event_details"]["object_id"] == model


async def test_calls_over_grpc_have_entries(stand: Stand, log: httpx.AsyncClient, admin: str) -> None:
    assert stand.gateway is not None
    async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
        keys = admin_pb2_grpc.AdminServiceStub(channel)
        made = await keys.CreateKey(admin_pb2.CreateKeyRequest(owner="carol"), metadata=keyed(admin))
        gateway = gateway_pb2_grpc.GatewayServiceStub(channel)
        opened = await gateway.CreateSession(gateway_pb2.CreateSessionRequest(), metadata=keyed(made.text))
        asked = gateway_pb2.CreateSamplingSessionRequest(session_id=opened.session_id, base_model=MODEL)
        sampling = await gateway.CreateSamplingSession(asked, metadata=keyed(made.text))
        request = sample_request(sampling.sampling_session_id)
        async for _ in gateway.SampleTokens(request, metadata=keyed(made.text)):
            pass
        with pytest.raises(grpc.aio.AioRpcError):
            await gateway.FinishSession(gateway_pb2.FinishSessionRequest(session_id="none"), metadata=keyed(made.text))
    (key,) = await entries(log, event="key_create")
    assert key["event_details"]["object_id"] == made.key.key_id
    assert (key["event_details"]["owner"], key["event_details"]["route"]) == ("root", "CreateKey")
    await stand.gateway.components.audit.flush()
    found = {(one["event"], one["event_details"]["outcome"]) for one in await entries(log, owner="carol")}
    assert found == {
        ("session_create", "ok"), ("sampler_create", "ok"), ("sample_create", "ok"), ("session_finish", "NOT_FOUND"),
    }  # fmt: skip


async def test_entries_are_searched_in_pages(rest: Rest, log: httpx.AsyncClient, admin: str) -> None:
    sessions = [await rest.open_session() for _ in range(5)]
    whole = await entries(log, event="session_create")
    assert [each["event_details"]["object_id"] for each in whole][-5:] == sessions
    answer = (await log.get("audit", params={"event": "session_create", "limit": 2, "offset": 3})).json()
    assert answer["entries"] == whole[3:5]
    assert answer["cursor"] == {"offset": 3, "limit": 2, "total_count": len(whole)}
    (one,) = await entries(log, object_id=sessions[2], days=90)
    assert one in whole
    assert (
        await entries(log, key_id="none") == await entries(log, owner="none") == await entries(log, outcome="x") == []
    )


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"event_type": "users"}, "event_type"),
        ({"day": "2026-02-30"}, "day"),
        ({"day": "9999-12-31"}, "day"),
        ({"days": 0}, "days"),
        ({"days": 91}, "days"),
        ({"limit": "x"}, "limit"),
        ({"who": "me"}, "who"),
    ],
)
async def test_a_wrong_search_is_refused_with_its_field(
    log: httpx.AsyncClient, query: dict[str, Any], field: str
) -> None:
    refused = await log.get("audit", params=query)
    assert (refused.status_code, refused.json()["field"]) == (400, field)


async def test_the_log_is_for_administrators(rest: Rest) -> None:
    refused = await rest.http.get("audit")
    assert (refused.status_code, "needs admin" in refused.json()["detail"]) == (403, True)


async def test_entries_survive_a_restart_and_strangers_leave_none(stand: Stand, rest: Rest, admin: str) -> None:
    await rest.create_model()
    async with stand.http("tml-unknown") as http:
        assert (await http.post("create_session", json={})).status_code == 401
    await stand.stop()
    await stand.start()
    async with stand.http(admin) as http:
        assert Counter(each["event"] for each in await entries(http)) == {"session_create": 1, "model_create": 1}


async def test_the_log_is_bounded_in_size_and_age(
    stand: Stand, rest: Rest, log: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stand.gateway is not None
    audit = stand.gateway.components.audit
    small = AuditLog(stand.gateway.components.database, 20 * audit_log.ENTRY_BYTES, audit._clock)
    await small.write(Action("quiet", "", "session_create", "", "kept", audit_log.OK))
    for number in range(40):
        await small.write(Action("loud", "", "session_create", "", str(number), audit_log.OK))
    await small.sweep()
    loud = [each["event_details"]["object_id"] for each in await entries(log, owner="loud")]
    assert loud == [str(number) for number in range(40 - len(loud), 40)]
    assert 0 < len(loud) <= 10
    assert len(await entries(log, owner="quiet")) == 1
    monkeypatch.setattr(audit_log, "_TTL_S", -3600.0)
    await small.sweep()
    monkeypatch.undo()
    assert await entries(log) == []


async def test_a_full_database_delays_entries(stand: Stand, rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full database keeps new entries in memory: a bounded number of distinct entries, with exact counts."""
    assert stand.gateway is not None
    audit = AuditLog(stand.gateway.components.database, 2**20, stand.gateway.components.audit._clock)
    monkeypatch.setattr(audit_log, "_MOST_PENDING", 3)
    for number in range(9):
        audit.pending[Action("a", "", "model_optim_step", "r", f"model-{number}", audit_log.OK)] += 2
    with monkeypatch.context() as broken:
        broken.setattr(audit_log, "put_entries", lambda connection, rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await audit.flush()
    assert (len(audit.pending), audit.pending.total()) == (4, 18)
    await audit.flush()
    assert not audit.pending


def test_every_route_that_changes_something_has_an_event(stand_routes: dict[str, str]) -> None:
    changing = {route for route in stand_routes if not route.startswith("GET")}
    assert changing <= EVENTS.keys() | UNLOGGED
    methods = {method.rpartition("/")[2] for method in SCOPES}
    assert methods <= EVENTS.keys() | UNLOGGED
    assert EVENTS.keys() | UNLOGGED <= {*stand_routes, *methods}, "an event without a route"
    assert not EVENTS.keys() & UNLOGGED


_SIGNED = {"GET auth/callback", "PUT uploads/{upload}/{file}"}
"""Routes without a key: the address or a cookie is signed. Their entries: test_sign_in.py and test_uploads.py."""


async def test_every_route_and_method_leaves_an_entry_when_it_is_called(
    stand: Stand, admin: str, stand_routes: dict[str, str]
) -> None:
    """Even an empty request, which most of them refuse."""
    assert stand.gateway is not None
    async with stand.http(admin) as http:
        for name in EVENTS.keys() & stand_routes.keys():
            path = re.sub(r"\{[^}]*\}", "x", stand_routes[name])
            await http.request(name.partition(" ")[0], f"{stand.url}{path}", json={})
        async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
            for name in SCOPES:
                if name.rpartition("/")[2] in EVENTS:
                    call = channel.unary_stream(name, request_serializer=None, response_deserializer=None)
                    with suppress(grpc.aio.AioRpcError):
                        _ = [answer async for answer in call(b"", metadata=keyed(admin))]
        await stand.gateway.components.audit.flush()
        found = {each["event_details"]["route"] for each in await entries(http, limit=1000)}
    assert EVENTS.keys() - found == _SIGNED


@pytest.fixture
async def stand_routes(monkeypatch: pytest.MonkeyPatch, stand: Stand) -> dict[str, str]:
    """Returns the path of each route of a running gateway, by its name in `EVENTS`."""
    made: dict[str, str] = {}
    inner = Endpoints.keyless_route

    def noting(self: Endpoints, method: str, path: str, *rest: Any) -> Route:
        route = inner(self, method, path, *rest)
        made[f"{method} {path}"] = route.path
        return route

    monkeypatch.setattr(Endpoints, "keyless_route", noting)
    await stand.stop()
    await stand.start()
    return made


async def test_a_new_route_needs_an_event(stand: Stand) -> None:
    async def handle(request: Any) -> Any:
        raise AssertionError(request)

    endpoints = Endpoints.__new__(Endpoints)
    with pytest.raises(Internal, match="POST new_call has no event: add it to EVENTS"):
        endpoints.keyless_route("POST", "new_call", handle)


async def test_many_at_once(stand: Stand, log: httpx.AsyncClient) -> None:
    assert stand.gateway is not None
    key, _ = await stand.gateway.components.keys.create("busy", "", Scope.TRAIN, None)
    async with stand.http(key) as http:
        answers = await asyncio.gather(*(http.post("create_session", json={}) for _ in range(50)))
    ids = {answer.json()["session_id"] for answer in answers}
    assert {each["event_details"]["object_id"] for each in await entries(log, owner="busy")} == ids
