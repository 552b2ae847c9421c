"""TCP proxies between services. Each link can be cut, slowed or left hanging."""

import asyncio
from contextlib import suppress
from enum import StrEnum

_CHUNK_BYTES = 64 * 2**10


class Trouble(StrEnum):
    """Effects of a link on its connections."""

    NONE = "none"
    CUT = "cut"  # resets existing and new connections, like a machine that is down
    HANG = "hang"  # drops everything silently, like a network partition
    SLOW = "slow"  # delays each chunk


class Link:
    """Forwards connections to a port of this machine.

    Args:
        name: Name such as gateway-trainer.
        upstream: Port to forward to.
    """

    def __init__(self, name: str, upstream: int) -> None:
        self.name = name
        self.port = 0
        self._upstream = upstream
        self._trouble = Trouble.NONE
        self._delay_s = 0.0
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self, port: int = 0) -> None:
        """Listens on a port of 127.0.0.1."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, limit=_CHUNK_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    def disturb(self, trouble: Trouble, delay_s: float = 0.0) -> None:
        """Applies a trouble until the next call; NONE heals the link."""
        self._trouble, self._delay_s = trouble, delay_s
        if trouble is Trouble.HANG:
            self._passing.clear()
        else:
            self._passing.set()
        if trouble is Trouble.CUT:
            for writer in self._writers:
                writer.transport.abort()

    async def close(self) -> None:
        """Closes all connections."""
        if self._server:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with suppress(OSError):  # one side closed the connection; close the other too
            await self._forward(reader, writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self._trouble is Trouble.CUT:
                writer.transport.abort()
                return
            await self._passing.wait()
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
            self._writers.add(inner_writer)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._copy(reader, inner_writer))
                    both.create_task(self._copy(inner_reader, writer))
            except* OSError:
                pass  # one side closed the connection; close the other too
            finally:
                inner_writer.close()
                self._writers.discard(inner_writer)
        finally:
            writer.close()
            self._writers.discard(writer)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            if self._trouble is Trouble.SLOW:
                await asyncio.sleep(self._delay_s)
            await self._passing.wait()
            writer.write(data)
            await writer.drain()
        if not writer.is_closing():
            writer.write_eof()
