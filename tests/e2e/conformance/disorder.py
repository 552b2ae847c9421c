"""Faults of a server with sessions, futures and the order of requests, as proxy rules."""

import base64
import gzip
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from tinker.proto import tinker_public_pb2 as public

from fovea_conformance.proxy import Exchange
from tests.e2e.conformance.corruption import Wrong

_PROTOBUF = "application/x-protobuf"
_TRAINING = ("optim_step", "save_weights", "save_weights_for_sampler", "load_weights")


def reply(route: str, status: int, body: object) -> Wrong:
    """A server that gives the same answer on all routes with this prefix."""
    given = Response(json.dumps(body), status, media_type="application/json")
    return Wrong(before=lambda one: given if one.route.startswith(route) else None)


def claims(method: str, ending: str) -> Wrong:
    """A server that confirms a request and does nothing."""
    given = Response("{}", media_type="application/json")
    return Wrong(before=lambda one: given if one.method == method and one.route.endswith(ending) else None)


def never_ends() -> Wrong:
    """A server that confirms the end of a session without ending it."""
    given = Response("{}", media_type="application/json")
    return Wrong(before=lambda one: given if one.route.endswith("/finish") else None)


def uncompressed(one: Exchange) -> Response | None:
    """Makes clients accept uncompressed protobuf, which rules can parse."""
    if one.route != "client/config":
        return None
    flags = one.answer_json() | {"proto_compress_fwdbwd": False}
    return Response(json.dumps(flags), media_type="application/json")


def header(name: str, value: str | None, route: str = "") -> Wrong:
    """A server that reads another value of a request header; None means that it ignores the header."""

    def before(one: Exchange) -> None:
        if one.route.startswith(route):
            one.headers.pop(name, None)
            if value is not None:
                one.headers[name] = value

    return Wrong(before=before)


def slow(route: str, seconds: float) -> Wrong:
    """A server that accepts requests slowly."""

    def before(one: Exchange) -> None:
        if one.route == route:
            time.sleep(seconds)

    return Wrong(before=before)


def final(status: int, change: Callable[[Exchange], Response | None]) -> Wrong:
    """A server that changes the answers of polls with one status."""

    def after(one: Exchange) -> Response | None:
        return change(one) if one.route == "retrieve_future" and one.status == status else None

    return Wrong(after=after)


def as_protobuf(one: Exchange) -> Response:
    return Response(one.unpacked, media_type=_PROTOBUF)


def error_as_400(one: Exchange) -> Response | None:
    return Response(one.unpacked, 400, media_type="application/json") if b'"error"' in one.answer[:20] else None


def as_metadata(one: Exchange) -> Response | None:
    if one.answer.startswith(b"{"):
        return None
    body = {"status": "complete_metadata", "response_payload_size": len(one.answer)}
    return Response(json.dumps(body), media_type="application/json")


def one_byte_more(one: Exchange) -> Response | None:
    """Announces a size that is one byte too large."""
    if b"response_payload_size" not in one.answer[:200]:
        return None
    body = one.answer_json()
    body["response_payload_size"] += 1
    return Response(json.dumps(body), media_type="application/json")


def wrong_gzip(one: Exchange) -> Response | None:
    if one.headers.get("accept-encoding") != "gzip":
        return None
    packed = gzip.compress(one.unpacked[:-1])
    return Response(packed, headers={"Content-Encoding": "gzip"}, media_type=_PROTOBUF)


class Longer:
    """Adds one more space to each answer than to the one before."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, one: Exchange) -> Response | None:
        self.count += 1
        if not one.answer.startswith(b"{"):
            return None
        return Response(one.answer + b" " * self.count, media_type="application/json")


def late(one: Exchange) -> None:
    """A server that checks for results every half second."""
    if time.monotonic() - one.started_s > 0.15:
        time.sleep(0.5)


def impatient() -> Wrong:
    """A server that does not hold polls of losses."""
    given = Response('{"type": "try_again"}', 408, media_type="application/json")
    return Wrong(before=lambda one: given if one.headers.get("x-tinker-request-type") == "Forward" else None)


def silent_waiting() -> Wrong:
    """A server that does not say why a request waits."""
    given = Response('{"type": "try_again"}', 408, media_type="application/json")
    return Wrong(before=lambda one: given if one.route == "retrieve_future" and b":train:0:2" in one.body else None)


def empty_400() -> Wrong:
    """A server that refuses requests without a message."""
    return Wrong(after=lambda one: Response(b"", 400) if one.status == 400 else None)


def gone_for_unknown() -> Wrong:
    """A server that answers "unknown" instead of "gone"."""
    return Wrong(after=lambda one: Response('{"detail": ""}', 410) if one.status == 404 else None)


def few_polls(most: int) -> Wrong:
    """A server that accepts only a few concurrent polls."""
    lock, seen = threading.Lock(), [0]

    def before(one: Exchange) -> Response | None:
        with lock:
            seen[0] += one.route == "retrieve_future"
        return Response('{"detail": "too many"}', 503) if seen[0] > most else None

    return Wrong(before=before)


class Arrival:
    """A server that runs training requests in order of arrival: each gets the next number of its model."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def _next(self, model_id: str) -> int:
        self.seen[model_id] = self.seen.get(model_id, 0) + 1
        return self.seen[model_id]

    def __call__(self, one: Exchange) -> None:
        if one.route == "forward_backward":
            message = public.ForwardBackwardRequest.FromString(one.body)
            message.seq_id = self._next(message.model_id)
            one.body = message.SerializeToString()
        elif one.route in _TRAINING:
            body = one.json()
            if "seq_id" in body:
                body["seq_id"] = self._next(body["model_id"])
                one.body = json.dumps(body).encode()


def by_arrival() -> Wrong:
    """A server that runs training requests in order of arrival; see Arrival."""
    return Wrong(before=Arrival())


def steps_first() -> Wrong:
    """A server that runs steps of the first model before the losses that precede them."""

    def before(one: Exchange) -> None:
        if one.route == "forward_backward" and b":train:0" in one.body:
            message = public.ForwardBackwardRequest.FromString(one.body)
            message.seq_id += 0 if message.forward_only else 1
            one.body = message.SerializeToString()
        elif one.route == "optim_step" and b":train:0" in one.body:
            body = one.json() | {"seq_id": one.json()["seq_id"] - 1}
            one.body = json.dumps(body).encode()

    return Wrong(before, uncompressed)


def sticky_errors() -> Wrong:
    """A server on which one failed loss fails all later ones."""
    errors: list[bytes] = []

    def after(one: Exchange) -> Response | None:
        if one.headers.get("x-tinker-request-type") != "ForwardBackward" or one.status != 200:
            return None
        if b'"error"' in one.answer[:20]:
            errors.append(one.unpacked)
        return Response(errors[0], media_type="application/json") if errors else None

    return Wrong(after=after)


def swallow(route: str) -> Wrong:
    """A server that refuses wrong numbers but forgets the refused request's number."""
    given = Response('{"detail": "bad"}', 422, media_type="application/json")
    return Wrong(before=lambda one: given if one.route == route and b"fast" in one.body else None)


class Partial:
    """A server that reports a loss as failed and keeps the gradients of its valid half."""

    def __init__(self) -> None:
        self.failed: set[str] = set()

    def wrong(self) -> Wrong:
        return Wrong(self.before, self.after)

    def before(self, one: Exchange) -> None:
        if one.route == "forward_backward":
            message = public.ForwardBackwardRequest.FromString(one.body)
            if any(len(datum.loss_fn_inputs["weights"].dense) == 12 for datum in message.data):
                message.forward_only = True
                weights = message.data[0].loss_fn_inputs["weights"]
                count = len(message.data[0].loss_fn_inputs["target_tokens"].dense) // 8
                weights.dense, weights.shape[:] = b"\0\0\x80?" * count, [count]
                one.body = message.SerializeToString()
                one.headers["x-was-bad"] = "1"

    def after(self, one: Exchange) -> Response | None:
        if "x-was-bad" in one.headers:
            self.failed.add(one.answer_json()["request_id"])
        if one.route == "retrieve_future" and one.json()["request_id"] in self.failed and one.status == 200:
            return Response('{"error": "too short", "category": "user"}', media_type="application/json")
        return uncompressed(one)


def other_ids(body: dict[str, Any]) -> None:
    """A server that invents its own model ids."""
    if "model_id" in body:
        body["model_id"] += "x"


class NewId:
    """A server that returns a new id each time."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, body: dict[str, Any]) -> None:
        self.count += 1
        if self.count > 1:
            body["request_id"] += "again"


def as_double(body: dict[str, Any]) -> None:
    """A server that parses integers as doubles."""
    body["seq_id"] = min(int(float(body["seq_id"])), 2**63 - 1)


def first_only(body: dict[str, Any]) -> None:
    body["completions"] = body["completions"][:1]


def stuck_cursor(body: dict[str, Any]) -> None:
    body["cursor"] = 0


def all_finished(body: dict[str, Any]) -> None:
    for one in body["completions"]:
        one["state"] = "finished"


class Forgets:
    """A server that reports each completion only once."""

    def __init__(self) -> None:
        self.told: set[str] = set()

    def __call__(self, body: dict[str, Any]) -> None:
        body["completions"] = [one for one in body["completions"] if one["request_id"] not in self.told]
        self.told |= {one["request_id"] for one in body["completions"]}


def lost_datum() -> Wrong:
    """A server that loses half of a chunk that arrives early."""

    def before(one: Exchange) -> None:
        if one.route == "forward_backward":
            message = public.ForwardBackwardRequest.FromString(one.body)
            if message.seq_id == 2 and not message.forward_only and len(message.data) > 1:
                del message.data[1:]
                one.body = message.SerializeToString()

    return Wrong(before=before)


class Jwt:
    """A server in JWT mode: it exchanges the key for tokens and accepts nothing else."""

    def __init__(self, key: str, lifetime_s: float = 3600.0) -> None:
        self.key, self.lifetime_s, self.tokens = key, lifetime_s, list[str]()

    def wrong(self) -> Wrong:
        return Wrong(self.before, self.after)

    def before(self, one: Exchange) -> Response | None:
        if one.route == "auth/token":
            now = time.time() + len(self.tokens)
            claims = {"sub": "user-1", "org_id": "org-1", "email": "a@b.c", "iat": now, "exp": now + self.lifetime_s}
            middle = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
            self.tokens.append(f"eyJh.{middle}.x")
            return Response(json.dumps({"jwt": self.tokens[-1]}), media_type="application/json")
        if one.headers.get("x-api-key") in self.tokens:
            one.headers["x-api-key"] = self.key
        return None

    def after(self, one: Exchange) -> Response | None:
        if one.route != "client/config":
            return None
        flags = one.answer_json() | {"pjwt_auth_enabled": True}
        return Response(json.dumps(flags), media_type="application/json")
