"""Gateways and their router in a simulated world: the real applications, without servers for their ports."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, cast

import aiohttp
from yarl import URL

from chaos.simulation.event_loop import Process
from chaos.simulation.network import HttpAnswer, Network, ask_app
from fovea.runtime.tasks import repeat
from fovea_gateway.database.ownership import Directory
from fovea_gateway.fronts.app import REPORT_S, Upkeep
from fovea_gateway.fronts.components import Components
from fovea_gateway.fronts.rest_app import build_api
from fovea_gateway.fronts.router import LOOK_S, RestRouter, RouterSettings
from fovea_gateway.http.endpoint import Readiness
from fovea_gateway.settings import GatewaySettings


class Gateway:
    """One gateway's process. It listens at once, and begins to work.

    Args:
        address: host:port, which it reports to routers.
        on_superseded: Called once another gateway owns its shard.
    """

    def __init__(
        self, address: str, process: Process, network: Network, settings: GatewaySettings,
        on_superseded: Callable[[], None],
    ) -> None:  # fmt: skip
        self._address, self.process, self._network = address, process, network
        ready = Readiness()
        self.components = Components(settings, on_superseded=on_superseded)
        self._upkeep = Upkeep(settings, self.components, ready)
        self.app = build_api(self.components, settings, ready)
        self._reporting: asyncio.Task[None] | None = None
        self._is_plural = settings.shards > 1
        network.listen(address, process)
        self.beginning = process.start(self._begin(), f"{process.name} begins")

    async def stop(self) -> None:
        """Ends it as SIGTERM does."""
        self.beginning.cancel()
        await asyncio.gather(self.beginning, return_exceptions=True)
        await self._upkeep.drain()
        self._network.close(self._address)
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)
        await self._upkeep.end()

    def abandon(self) -> None:
        """Frees what a killed process had."""
        self.components.database.abandon()
        self._network.drop_caller(self.process)

    async def _begin(self) -> None:
        await self._upkeep.begin()
        if self._is_plural:
            self._reporting = asyncio.create_task(repeat(self._report, REPORT_S, "reporting to routers"))

    async def _report(self) -> None:
        serves = not self.components.health.missing()
        await self._upkeep.report(self._address, self._address, serves=serves)


class Router:
    """One router's process.

    Args:
        address: host:port.
        app_at: Returns the application of the gateway at an address.
    """

    def __init__(
        self, address: str, process: Process, network: Network, database_url: str, app_at: Callable[[str], Any]
    ) -> None:
        directory = Directory(database_url)
        http: Any = HttpSession(network, address, app_at)
        self.app = RestRouter(directory, RouterSettings(database_url=database_url), http)
        network.listen(address, process)
        process.start(repeat(directory.look, LOOK_S, "reading the owners of shards"), "owners of shards")


class HttpSession:
    """Stands in for the router's `aiohttp.ClientSession`.

    Args:
        caller: The address of the router.
    """

    def __init__(self, network: Network, caller: str, app_at: Callable[[str], Any]) -> None:
        self._network, self._caller, self._app_at = network, caller, app_at

    def request(self, method: str, url: URL, *, headers: Any, data: AsyncIterable[bytes] | None, **_: Any) -> "_Sent":
        """Returns a request that is sent when it is entered."""
        assert method == "POST"
        return _Sent(lambda: self._ask(url, headers, data))

    async def _ask(self, url: URL, headers: Any, data: AsyncIterable[bytes] | None) -> "_Answer":
        network, address = self._network, f"{url.host}:{url.port}"
        try:
            await network.travel(self._caller)
            await network.travel(address)
        except ConnectionError:
            raise aiohttp.ConnectionTimeoutError from None
        listener = network.listeners.get(address)
        if listener is None:
            await network.reset()
            raise aiohttp.ClientConnectorError(cast(Any, None), ConnectionRefusedError())
        body = b"".join([piece async for piece in data]) if data is not None else b""  # read once it is connected
        try:
            work = ask_app(self._app_at(address), url.raw_path, dict(headers), body)
            answer = await listener.call(work, is_stopped_with_caller=False)
            await network.travel(address)
            await network.travel(self._caller)
        except ConnectionError:
            await network.reset()
            raise aiohttp.ServerDisconnectedError from None
        return _Answer(answer)


class _Sent:
    """A request in transit."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask

    async def __aenter__(self) -> "_Answer":
        answer: _Answer = await self._ask()
        return answer

    async def __aexit__(self, *_: object) -> None:
        """Does nothing: the answer has arrived whole."""


class _Answer:
    """Stands in for `aiohttp.ClientResponse`."""

    def __init__(self, answer: HttpAnswer) -> None:
        self.status, self.raw_headers, self._body = answer.status, answer.headers, answer.body
        self.content_length = len(answer.body)
        self.content = self

    async def read(self) -> bytes:
        return self._body

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self._body
