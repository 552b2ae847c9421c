"""EndpointSlices over real HTTP: list and watch as in the Kubernetes API, with its ways to fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

NAMESPACE = "fovea"
_PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
Event = tuple[int, str, dict[str, Any]]


class ApiServer:
    """Stores slices and their history.

    Attributes:
        queries: The query of every request, in order.
        refusal: Status and text of the answer to every request, if set.
    """

    def __init__(self) -> None:
        self.queries: list[dict[str, str]] = []
        self.refusal: tuple[int, str] | None = None
        self.port = 0
        self._slices: dict[str, dict[str, Any]] = {}
        self._history: list[Event] = []
        self._version = 100
        self._oldest = 0
        self._changed = asyncio.Condition()
        self._watching: set[asyncio.Transport] = set()
        self._ended = 0

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def lists(self) -> int:
        """Returns the list requests."""
        return sum("watch" not in query for query in self.queries)

    @property
    def watches(self) -> list[str]:
        """Returns the start versions of watches."""
        return [query["resourceVersion"] for query in self.queries if "watch" in query]

    @property
    def watching(self) -> int:
        """Returns the number of open watches."""
        return len(self._watching)

    async def put(self, name: str, endpoints: Iterable[dict[str, Any]] | None, service: str = "s", **more: Any) -> None:
        """Writes a slice; `None` stands for JSON's null, which an empty slice may contain."""
        kind = "MODIFIED" if name in self._slices else "ADDED"
        metadata = {"name": name, "labels": {"kubernetes.io/service-name": service}}
        values = {"addressType": "IPv4", "ports": [{"name": "grpc", "port": 50052}]} | more
        listed = None if endpoints is None else list(endpoints)
        self._slices[name] = {"metadata": metadata, "endpoints": listed, **values}
        await self._note(kind, self._slices[name])

    async def delete(self, name: str) -> None:
        """Removes a slice."""
        await self._note("DELETED", self._slices.pop(name))

    async def bookmark(self) -> None:
        """Sends watchers a newer version without a change."""
        await self._note("BOOKMARK", {"metadata": {}})

    def compact(self) -> None:
        """Forgets all versions except the newest, so that watches from earlier ones fail."""
        self._version += 1
        self._oldest = self._version

    async def end_watches(self) -> None:
        """Ends all watches after the sent events, as the API does after their time limit."""
        async with self._changed:
            self._ended += 1
            self._changed.notify_all()

    def drop(self) -> None:
        """Breaks all connections of watches."""
        for transport in self._watching:
            transport.abort()

    async def send_error(self, code: int) -> None:
        """Sends an ERROR event to running watches."""
        await self._note("ERROR", {"kind": "Status", "code": code, "reason": "Expired", "message": "too old"})

    async def _note(self, kind: str, item: dict[str, Any]) -> None:
        async with self._changed:
            self._version += 1
            if kind != "ERROR":
                item["metadata"]["resourceVersion"] = str(self._version)
            self._history.append((self._version, kind, json.loads(json.dumps(item))))
            self._changed.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        if self.refusal is not None:
            return web.json_response({"kind": "Status", "message": self.refusal[1]}, status=self.refusal[0])
        service = request.query["labelSelector"].removeprefix("kubernetes.io/service-name=")
        if "watch" in request.query:
            return await self._watch(request, service)
        items = [item for item in self._slices.values() if _service(item) == service]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, request: web.Request, service: str) -> web.StreamResponse:
        version, ended = int(request.query["resourceVersion"]), self._ended
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        if version < self._oldest:
            await _send(response, "ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
            return response
        transport = request.transport
        assert transport is not None
        self._watching.add(transport)
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._version > version or self._ended > ended)  # noqa: B023
                for at, kind, item in [event for event in self._history if event[0] > version]:
                    if kind in ("BOOKMARK", "ERROR") or _service(item) == service:
                        await _send(response, kind, item)
                    version = at
                if self._ended > ended:
                    return response
                version = max(version, self._version)
        finally:
            self._watching.discard(transport)


@asynccontextmanager
async def serving() -> AsyncIterator[ApiServer]:
    """A server on a free port."""
    server = ApiServer()
    application = web.Application()
    application.router.add_get(_PATH, server._answer)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        server.drop()
        await runner.cleanup()


def kubeconfig(server: ApiServer, folder: Path) -> Path:
    """Writes a file for KUBECONFIG."""
    path = folder / "kubeconfig.json"
    path.write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": {"server": server.url}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    return path


def endpoint(address: str, **conditions: bool) -> dict[str, Any]:
    """Returns an endpoint; without conditions its readiness is unknown."""
    return {"addresses": [address], "conditions": conditions}


async def _send(response: web.StreamResponse, kind: str, item: dict[str, Any]) -> None:
    await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")


def _service(item: dict[str, Any]) -> str:
    return str(item["metadata"]["labels"]["kubernetes.io/service-name"])
