"""Isolation of owners: calls every REST route and every gRPC method with the owner's key, another owner's key, a
revoked key, no key and a key with a lower scope.

The cases are generated from the routes, so a new route without a declared answer fails.
"""

import base64
import hashlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from starlette.routing import Route

from fovea.api.v1 import admin_pb2, gateway_pb2
from fovea.wire.errors import from_rpc_error
from fovea_gateway.access.api_keys import Scope
from fovea_gateway.fronts.rest_app import build_api
from fovea_gateway.http.endpoint import Readiness
from tests.contract.gateway import valid_messages
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.keeping import KeepingTrainer
from tests.contract.gateway.requests import PROTOBUF, Rest, forward_backward_body
from tests.contract.gateway.valid_bodies import Bodies

READ, SAMPLE, TRAIN, ADMIN = Scope
OPEN = None
"""The scope of routes that need no key."""


@dataclass(frozen=True)
class Answer:
    """The expected answers of a REST route.

    Attributes:
        scope: The lowest sufficient scope; every lower one is refused.
        own: Status for the owner of the objects in the request.
        other: Status for another owner with the same request: 404 as for an unknown object, or 200 about its own
            objects.
        body: The key of the body in `Bodies`; `{}` if there is none.
    """

    scope: Scope | None
    own: int = 200
    other: int = 404
    body: str = ""


PNG = b"\x89PNG of alice"
CHECKPOINT = "training_runs/{run}/checkpoints/{segment}/{name}"
NAMED = "training_runs/{run}/checkpoints/{name}"
REST: dict[tuple[str, str], Answer] = {
    ("GET", "healthz"): Answer(OPEN, other=200),
    # It runs first because its answer contains the errors of earlier requests, which repeat their input.
    ("GET", "live/events"): Answer(READ, other=200),
    ("GET", "exports/{run}/{segment}/{name}/{file:path}"): Answer(OPEN, own=400, other=400),  # no signature
    ("POST", "retrieve_future"): Answer(READ, body="retrieve_future"),
    ("POST", "cancel_future"): Answer(SAMPLE, other=200, body="cancel_future"),  # returns and changes nothing
    ("POST", "retrieve_futures"): Answer(SAMPLE, body="retrieve_futures"),
    ("POST", "create_sampling_session"): Answer(SAMPLE, body="create_sampling_session"),
    ("POST", "join_sampling_session"): Answer(SAMPLE, body="join_sampling_session"),
    ("GET", "samplers/{sampling_session_id}"): Answer(READ),
    ("POST", "asample"): Answer(SAMPLE, body="asample"),
    ("GET", "routed_experts/{sequence_id}"): Answer(READ, own=404),  # a sample without experts
    ("GET", "weight_versions/{sequence_id}"): Answer(READ),
    ("POST", "client/config"): Answer(READ, other=200),
    ("POST", "client/dynamic_config"): Answer(READ, other=200),
    ("GET", "get_server_capabilities"): Answer(READ, other=200),
    ("POST", "telemetry"): Answer(READ, other=200),
    ("GET", "auth/apikey/me"): Answer(READ, other=200),
    **{
        refused: Answer(READ, own=404)
        for refused in [
            ("POST", "auth/token"),  # this gateway has no provider
            ("DELETE", "auth/apikey/me"),
        ]
    },
    ("GET", "auth/methods"): Answer(OPEN, other=200),
    ("GET", "auth/login"): Answer(OPEN, own=400, other=400),  # no provider
    ("GET", "auth/callback"): Answer(OPEN, own=400, other=400),
    ("POST", "auth/logout"): Answer(READ, own=400, other=400),  # an API key does not sign in
    ("POST", "create_session"): Answer(READ, other=200, body="create_session"),
    ("POST", "session_heartbeat"): Answer(READ, body="session_heartbeat"),
    ("POST", "sessions/search"): Answer(READ, other=200, body="sessions/search"),
    ("PUT", "sessions/{session_id}/project"): Answer(READ, body="project"),
    ("GET", "sessions/{session_id}/trace_export"): Answer(READ),
    ("GET", "sessions/{session_id}/trace"): Answer(OPEN, own=400, other=400),  # no signature
    ("GET", "audit"): Answer(ADMIN, other=403),
    ("GET", "billing/usage/checkpoints/current"): Answer(ADMIN, other=403),
    ("GET", "billing/usage/events"): Answer(ADMIN, own=400, other=403),  # without dates
    ("GET", "sessions"): Answer(READ, other=200),
    ("GET", "sessions/{session_id}"): Answer(READ),
    ("GET", "parked_sessions"): Answer(READ, other=200),
    ("POST", "get_info"): Answer(READ, body="get_info"),
    **{
        ("POST", path): Answer(TRAIN, body=path)
        for path in [
            "create_model", "optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external",
            "create_custom_loss", "load_weights",
        ]
    },
    ("POST", "forward_backward"): Answer(TRAIN, body="forward_backward"),
    ("GET", "training_runs"): Answer(READ, other=200),
    ("GET", "training_runs/{run}"): Answer(READ),
    ("GET", "training_runs/{run}/checkpoints"): Answer(READ),
    ("POST", "copy_weights"): Answer(TRAIN, body="copy_weights"),
    ("POST", "weights_info"): Answer(READ, body="weights_info"),
    ("GET", "checkpoints"): Answer(READ, other=200),
    ("POST", "checkpoints/search"): Answer(READ, other=200, body="checkpoints/search"),
    ("POST", "external_weights_upload_start"): Answer(TRAIN, other=200, body="external_weights_upload_start"),  # theirs
    ("PUT", "uploads/{upload}/{file}"): Answer(OPEN, own=400, other=400),  # no signature
    ("POST", "external_weights_upload_finish"): Answer(TRAIN, own=404, body="external_weights_upload_finish"),
    ("PUT", f"{CHECKPOINT}/ttl"): Answer(TRAIN, body="ttl"),
    # Unpublished before another owner asks.
    ("POST", f"{CHECKPOINT}/publish"): Answer(TRAIN),
    ("DELETE", f"{CHECKPOINT}/publish"): Answer(TRAIN),
    ("GET", f"{CHECKPOINT}/external_weights_urls"): Answer(READ, own=400),  # a training checkpoint
    ("DELETE", NAMED): Answer(TRAIN, own=400, other=400),  # names only the missing kind
    ("PUT", f"{NAMED}/ttl"): Answer(TRAIN, own=400, other=400),
    ("POST", f"{NAMED}/publish"): Answer(TRAIN, own=400, other=400),
    ("DELETE", CHECKPOINT): Answer(TRAIN),
    ("GET", "keys"): Answer(ADMIN, other=403),
    ("POST", "keys"): Answer(ADMIN, other=403, body="key"),
    ("PUT", "keys/{key_id}/expiry"): Answer(ADMIN, other=403, body="expiry"),
    ("DELETE", "keys/{key_id}"): Answer(ADMIN, other=403),
    ("GET", "owners"): Answer(ADMIN, other=403),
    ("PUT", "owners/{owner}"): Answer(ADMIN, other=403, body="owner"),
    ("GET", "usage"): Answer(READ, other=200),
    ("GET", "/v1/models"): Answer(SAMPLE, other=200),
    ("GET", "/v1/models/{model:path}"): Answer(SAMPLE),  # one of the owner's checkpoints
    ("POST", "/v1/chat/completions"): Answer(SAMPLE, body="chat"),
    ("POST", "/v1/completions"): Answer(SAMPLE, body="completion"),
    ("POST", "/v1/responses"): Answer(SAMPLE, body="response"),
    ("POST", "/v1/messages"): Answer(SAMPLE, body="message"),
    ("GET", "/"): Answer(OPEN, other=200),  # the page belongs to no owner
    ("GET", "/page/{file}"): Answer(OPEN, own=404, other=404),  # no such file
    ("GET", "live/curves/{run}"): Answer(READ),
    ("GET", "live/samples"): Answer(READ, other=200),
    ("GET", "live/logs"): Answer(ADMIN, other=403),
    ("GET", "live/datums"): Answer(READ, other=200),
    ("GET", "live/system"): Answer(ADMIN, other=403),
    ("GET", "live/pictures/{digest}"): Answer(READ),
    ("POST", "live/reports"): Answer(TRAIN, body="report"),
    ("PUT", "live/runs/{run}"): Answer(TRAIN, body="label"),
    ("POST", "sessions/{session_id}/finish"): Answer(READ, body="sessions/sess-none/finish"),
}  # fmt: skip
"""Ordered so that each request finds the objects that it refers to."""

GRPC: dict[str, tuple[Scope, str]] = {
    "GatewayService/GetCapabilities": (READ, "OK"),
    "GatewayService/CreateSession": (READ, "OK"),
    "GatewayService/Heartbeat": (READ, "NOT_FOUND"),
    "GatewayService/SubmitCreateModel": (TRAIN, "NOT_FOUND"),
    "GatewayService/GetModel": (READ, "NOT_FOUND"),
    "GatewayService/UploadImage": (SAMPLE, "OK"),  # into the caller's own project
    "GatewayService/SubmitForwardBackward": (TRAIN, "NOT_FOUND"),
    "GatewayService/CreateCustomLoss": (TRAIN, "NOT_FOUND"),
    "GatewayService/SubmitOptimStep": (TRAIN, "NOT_FOUND"),
    "GatewayService/SubmitSaveState": (TRAIN, "NOT_FOUND"),
    "GatewayService/SubmitLoadState": (TRAIN, "NOT_FOUND"),
    "GatewayService/SubmitSaveForSampler": (TRAIN, "NOT_FOUND"),
    "GatewayService/SubmitSaveExternal": (TRAIN, "NOT_FOUND"),
    "GatewayService/CreateSamplingSession": (SAMPLE, "NOT_FOUND"),
    "GatewayService/SampleTokens": (SAMPLE, "NOT_FOUND"),
    "GatewayService/WaitFuture": (READ, "NOT_FOUND"),
    "GatewayService/FinishSession": (READ, "NOT_FOUND"),
    "AdminService/GetUsage": (READ, "OK"),
    "AdminService/ListParkedSessions": (READ, "OK"),
    "AdminService/PutOwner": (ADMIN, "PERMISSION_DENIED"),
    "AdminService/ListOwners": (ADMIN, "PERMISSION_DENIED"),
    "AdminService/CreateKey": (ADMIN, "PERMISSION_DENIED"),
    "AdminService/ListKeys": (ADMIN, "PERMISSION_DENIED"),
    "AdminService/ExpireKey": (ADMIN, "PERMISSION_DENIED"),
    "AdminService/RevokeKey": (ADMIN, "PERMISSION_DENIED"),
}
"""The lowest sufficient scope, and the status for another owner with the same request. The owner's own call succeeds.
"""


@dataclass
class World:
    """The objects of alice, and the keys of all users."""

    stand: Stand
    keys: dict[str, str]
    made: Bodies
    values: dict[str, str]

    def lower(self, scope: Scope | None) -> list[str]:
        """Returns alice's keys with a scope below the given one."""
        return [] if scope is None else [self.keys[each] for each in Scope if not each.includes(scope)]

    def names_of_hers(self) -> list[str]:
        """Names of alice's objects, which must not reach others."""
        return [self.made.session_id, self.made.model_id, self.made.sampling_id, self.values["key_id"]]


@pytest.fixture
async def stand(tmp_path: Path, database_url: str) -> AsyncIterator[Stand]:
    """A stand with a trainer that writes real files, for exports."""
    stand = Stand(tmp_path)
    stand.trainer = KeepingTrainer(lambda: stand.samplers)
    async with running(stand, database_url=database_url):
        yield stand


@pytest.fixture
async def world(stand: Stand) -> World:
    assert stand.gateway is not None
    ring = stand.gateway.components.keys
    keys = {scope.value: (await ring.create("alice", "", scope, None))[0] for scope in Scope}
    keys["other"], _ = await ring.create("bob", "", TRAIN, None)
    keys["revoked"], revoked = await ring.create("alice", "", ADMIN, None)
    await ring.revoke(revoked.key_id)
    _, spare = await ring.create("alice", "", READ, None)
    async with stand.http(keys[TRAIN]) as http:
        rest = Rest(http)
        await rest.open_session()
        opened = await rest.ok(
            "create_sampling_session", session_id=rest.session_id, sampling_session_seq_id=900, base_model=MODEL
        )
        made = Bodies(rest.session_id, await rest.create_model(), opened["sampling_session_id"])
        picture = {"type": "image", "data": base64.b64encode(PNG).decode(), "format": "png"}
        prompt = {"chunks": [picture, {"type": "encoded_text", "tokens": [1, 2, 3]}]}
        sample = (await rest.sample(made.sampling_id, 900, prompt=prompt)).json()["request_id"]
        await rest.result(sample)
        for seq_id, path in ((1, "save_weights"), (2, "save_weights_external")):
            answer = await rest.ok(path, model_id=made.model_id, seq_id=seq_id, path="a")
            assert "path" in await rest.result(answer["request_id"])
        answer = await rest.ok("save_weights_for_sampler", model_id=made.model_id, seq_id=3, path="s")
        path = (await rest.result(answer["request_id"]))["path"]
        other = Rest(http)
        await other.open_session()
    values = {
        "session_id": other.session_id, "run": made.model_id, "segment": "weights", "name": "a", "file": "a",
        "upload": "upload-1-a",
        "sampling_session_id": made.sampling_id, "sequence_id": f"{sample}:0", "key_id": spare.key_id,
        "owner": "alice", "model": path, "digest": hashlib.sha256(PNG).hexdigest(),
    }  # fmt: skip
    await stand.gateway.components.live_state.tick()
    return World(stand, keys, made, values)


def _request(world: World, method: str, path: str, body: str) -> dict[str, Any]:
    url = path.replace(":path}", "}").format(**world.values)
    if path.startswith("/"):
        url = world.stand.url + url
    if body == "forward_backward":
        content = forward_backward_body(world.made.model_id, 50)
        return {"method": method, "url": url, "content": content}
    ours: dict[str, dict[str, Any]] = {
        "ttl": {"ttl_seconds": 7200},
        "key": {"owner": "carol", "scope": "read"},
        "owner": {"weight": 2.0},
        "expiry": {"expires_at": time.time() + 9},
        "chat": {"model": world.values["model"], "messages": [{"role": "user", "content": "hi"}]},
        "completion": {"model": world.values["model"], "prompt": "hi"},
        "response": {"model": world.values["model"], "input": "hi"},
        "project": {"project_id": "p"},
        "message": {"model": world.values["model"], "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]},
        "label": {"name": "n", "notes": "a", "tags": ["t"]},
        "report": {"model_id": world.made.model_id, "metrics": {"reward": 0.5}},
    }
    return {"method": method, "url": url, "json": ours.get(body) or (world.made.of(body) if body else {})}


def _headers(key: str | None, body: str) -> dict[str, str]:
    kind = {"Content-Type": PROTOBUF} if body == "forward_backward" else {}
    return kind | ({"X-API-Key": key} if key else {})


_REASONS = {
    "invalid_api_key": "UNAUTHENTICATED", "authentication_error": "UNAUTHENTICATED",
    "permission_denied": "PERMISSION_DENIED", "permission_error": "PERMISSION_DENIED",
}  # fmt: skip
"""The reason for each error code of OpenAI and each error type of Anthropic."""


def _reason(response: httpx.Response) -> str:
    body = response.json() if response.status_code >= 400 else {"reason": "OK"}
    reason = str(body.get("reason") or _REASONS[body["error"].get("code") or body["error"]["type"]])
    assert response.status_code == {"UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403}.get(reason, response.status_code)
    return reason


async def _answer(http: httpx.AsyncClient, request: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    """Returns the answer; for an event stream, the part that arrives at once."""
    async with http.stream(**request, headers=headers) as response:
        if not response.headers["content-type"].startswith("text/event-stream"):
            await response.aread()
            return response
        told = ""
        async for part in response.aiter_text():
            told += part
            if "event: models" in told:
                break
        return httpx.Response(response.status_code, text=told)


async def test_every_rest_route_answers_each_key_as_declared(world: World) -> None:
    assert world.stand.gateway is not None
    api = build_api(world.stand.gateway.components, world.stand.gateway.settings, Readiness())
    routes = {
        (method, route.path.removeprefix("/api/v1/"))
        for route in api.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert routes == set(REST), "each route needs an expected answer"
    found, expected, http = {}, {}, world.stand.http(None)
    for (method, path), answer in REST.items():
        request = _request(world, method, path, answer.body)
        tries: list[tuple[str, str | None, object]] = []
        if answer.scope is not OPEN:
            tries += [("no key", None, "UNAUTHENTICATED"), ("revoked key", world.keys["revoked"], "UNAUTHENTICATED")]
            tries += [(f"lower {n}", key, "PERMISSION_DENIED") for n, key in enumerate(world.lower(answer.scope))]
        tries += [("another owner", world.keys["other"], answer.other)]
        tries += [("the owner", world.keys[answer.scope or READ], answer.own)]
        for who, key, told in tries:
            response = await _answer(http, request, _headers(key, answer.body))
            expected[method, path, who] = told
            found[method, path, who] = _reason(response) if isinstance(told, str) else response.status_code
            if who == "another owner" and response.status_code == 200:
                assert [name for name in world.names_of_hers() if name in response.text] == [], path
    await http.aclose()
    assert found == expected


def _methods() -> dict[str, MethodDescriptor]:
    services = [
        *gateway_pb2.DESCRIPTOR.services_by_name.values(),
        *admin_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    return {f"{service.name}/{method.name}": method for service in services for method in service.methods}


def _messages(world: World) -> dict[str, list[Message]]:
    """Returns a valid request for each call by input name; for a loss, the header and a datum."""
    found: dict[str, list[Message]] = {
        "GetCapabilitiesRequest": [gateway_pb2.GetCapabilitiesRequest()],
        "CreateKeyRequest": [admin_pb2.CreateKeyRequest(owner="carol", scope="read")],
        "GetUsageRequest": [admin_pb2.GetUsageRequest()],
        "ListParkedSessionsRequest": [admin_pb2.ListParkedSessionsRequest()],
        "PutOwnerRequest": [admin_pb2.PutOwnerRequest(owner=admin_pb2.Owner(owner="alice", weight=2.0))],
        "ListOwnersRequest": [admin_pb2.ListOwnersRequest()],
        "ListKeysRequest": [admin_pb2.ListKeysRequest()],
        "RevokeKeyRequest": [admin_pb2.RevokeKeyRequest(key_id=world.values["key_id"])],
        "ExpireKeyRequest": [admin_pb2.ExpireKeyRequest(key_id=world.values["key_id"])],
    }
    for message in valid_messages.calls(world.made):
        found.setdefault(message.DESCRIPTOR.name, []).append(message)
    found["FinishSessionRequest"] = [gateway_pb2.FinishSessionRequest(session_id=world.values["session_id"])]
    sha256 = "a591a6d40bf420404a011733cfb7b190d62c65bf0bcda32b57b277d9ad9f146e"
    found["UploadImageRequest"] = [gateway_pb2.UploadImageRequest(sha256=sha256, data=b"Hello World")]
    for number, message in enumerate(message for messages in found.values() for message in messages):
        if "seq_id" in message.DESCRIPTOR.fields_by_name:
            message.seq_id = 100 + number  # type: ignore[attr-defined]
        if "sample_count" in message.DESCRIPTOR.fields_by_name:
            message.ClearField("target_table")
    return found


async def _call(channel: grpc.aio.Channel, method: MethodDescriptor, messages: list[Message], key: str) -> str:
    """Returns the reason of the error that ends a call, or OK."""

    async def stream() -> AsyncIterator[Message]:
        for message in messages:
            yield message

    ways: dict[tuple[bool, bool], Any] = {
        (False, False): channel.unary_unary, (True, False): channel.stream_unary,
        (False, True): channel.unary_stream, (True, True): channel.stream_stream,
    }  # fmt: skip
    call = ways[method.client_streaming, method.server_streaming](
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    begun = call(stream() if method.client_streaming else messages[0], metadata=(("x-api-key", key),) if key else ())
    try:
        if method.server_streaming:
            async for _ in begun:
                pass
        else:
            await begun
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return "OK"


async def test_every_grpc_method_answers_each_key_as_declared(world: World) -> None:
    assert world.stand.gateway is not None
    methods, messages = _methods(), _messages(world)
    assert set(methods) == set(GRPC), "each method needs an expected answer"
    found, expected = {}, {}
    async with grpc.aio.insecure_channel(world.stand.gateway.grpc.address) as channel:
        for name, (scope, other) in GRPC.items():
            method = methods[name]
            tries = [("no key", "", "UNAUTHENTICATED"), ("revoked", world.keys["revoked"], "UNAUTHENTICATED")]
            tries += [(f"lower {n}", key, "PERMISSION_DENIED") for n, key in enumerate(world.lower(scope))]
            tries += [("another owner", world.keys["other"], other), ("the owner", world.keys[scope], "OK")]
            for who, key, reason in tries:
                expected[name, who] = reason
                found[name, who] = await _call(channel, method, messages[method.input_type.name], key)
    assert found == expected


async def test_a_session_ends_by_a_key_that_could_have_made_what_ends_with_it(world: World) -> None:
    body = {"reason": {"type": "success"}}
    for scope in (READ, SAMPLE):
        async with world.stand.http(world.keys[scope]) as http:
            response = await http.post(f"sessions/{world.made.session_id}/finish", json=body)
        assert (response.status_code, response.json()["reason"]) == (403, "PERMISSION_DENIED")
    async with world.stand.http(world.keys[TRAIN]) as http:
        assert (await http.post(f"sessions/{world.made.session_id}/finish", json=body)).status_code == 200
