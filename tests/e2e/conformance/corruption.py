"""Servers with one fault: a proxy in front of a correct server changes requests or answers."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.responses import Response
from tinker.proto import tinker_public_pb2 as public

from fovea_conformance.proxy import Exchange, Rule

Change = Callable[[Any], None]
_PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Wrong:
    """The two hooks of the proxy; see `fovea_conformance.proxy.Proxy`."""

    before: Rule | None = None
    after: Rule | None = None


def request(route: str, change: Change) -> Wrong:
    """A server that processes a different JSON request from the one sent."""

    def before(one: Exchange) -> Response | None:
        if one.route == route:
            body = one.json()
            change(body)
            one.body = json.dumps(body).encode()
        return None

    return Wrong(before=before)


def answer(route: str, change: Change) -> Wrong:
    """A server that changes JSON answers of routes with this prefix."""

    def after(one: Exchange) -> Response | None:
        if not one.route.startswith(route) or one.status != 200:
            return None
        body = one.answer_json()
        change(body)
        return Response(json.dumps(body), media_type="application/json")

    return Wrong(after=after)


def sample(change: Change) -> Wrong:
    """A server that changes finished samples (protobuf SampleResponse)."""
    return _result("asample", public.SampleResponse, change)


def loss(change: Change) -> Wrong:
    """A server that changes finished losses (protobuf ForwardBackwardOutput)."""
    return _result("forward_backward", public.ForwardBackwardOutput, change)


def _result(route: str, kind: Any, change: Change) -> Wrong:
    futures: set[str] = set()

    def after(one: Exchange) -> Response | None:
        if one.route == route and one.status == 200:
            futures.add(one.answer_json()["request_id"])
        if one.route != "retrieve_future" or one.json()["request_id"] not in futures:
            return None
        if one.status != 200 or one.answer.startswith(b"{"):
            return None
        message = kind.FromString(one.unpacked)
        change(message)
        return Response(message.SerializeToString(), media_type=_PROTOBUF)

    return Wrong(after=after)


def params(**changed: object) -> Wrong:
    """A server that samples with other parameters; None removes one."""

    def change(body: dict[str, Any]) -> None:
        given = body["sampling_params"] | changed
        body["sampling_params"] = {name: value for name, value in given.items() if value is not None}

    return request("asample", change)


def without(route: str, *names: str) -> Wrong:
    """A server that ignores some fields."""

    def change(body: dict[str, Any]) -> None:
        for name in names:
            body.pop(name, None)

    return request(route, change)


def floats(data: bytes) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Returns a writable copy of float32 bytes."""
    return np.frombuffer(data, np.float32).copy()
