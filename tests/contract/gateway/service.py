"""A stand-in for a Kubernetes Service: new connections go to a ready gateway, existing ones stay."""

import asyncio
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_LOOK_S = 0.1


class Service:
    """A proxy on a port of 127.0.0.1 that checks readiness with the standard health check, as the kubelet does."""

    def __init__(self) -> None:
        self.port = 0
        self._ports: dict[int, int] = {}
        self._ready: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Starts the server."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Breaks all connections."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def add(self, port: int, grpc_port: int) -> None:
        """Routes connections to `port` while the health check on `grpc_port` says SERVING."""
        self._keep(asyncio.create_task(self._watch(port, grpc_port)))

    def is_ready(self, port: int) -> bool:
        """Returns whether connections are routed to this port."""
        return port in self._ready

    async def _watch(self, port: int, grpc_port: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                status = health_pb2.HealthCheckResponse.NOT_SERVING
                with suppress(grpc.aio.AioRpcError):
                    status = (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status
                if status == health_pb2.HealthCheckResponse.SERVING:
                    self._ready.add(port)
                else:
                    self._ready.discard(port)
                await asyncio.sleep(_LOOK_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._ready:
            writer.transport.abort()
            return
        try:
            inner = await asyncio.open_connection("127.0.0.1", next(iter(self._ready)))
        except OSError:
            writer.transport.abort()
            return
        self._keep(asyncio.create_task(_pump(reader, inner[1])))
        self._keep(asyncio.create_task(_pump(inner[0], writer)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(2**16):
            writer.write(piece)
            await writer.drain()
    except OSError:
        writer.transport.abort()  # one side has disconnected, so the other one must see it
    finally:
        writer.close()
