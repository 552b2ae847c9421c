"""A simulated network: a seed decides whether messages are late, lost or cut off. Carries gRPC and HTTP."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import grpc
from grpc.aio import AioRpcError, Metadata
from starlette.types import ASGIApp

from chaos.simulation.event_loop import PROCESS, Process
from fovea.wire.errors import STATUS_DETAILS, FoveaError, to_status

_USUAL_S = (0.0005, 0.01)
_RESET_S = (0.001, 0.3)
"""Seconds until a caller learns that a peer is gone."""


class Network:
    """Listeners and messages in transit.

    Attributes:
        cut: Addresses that cannot be reached and cannot reach others.
        hanging: Addresses with messages that wait until the event is set.
        slow: Maximum extra seconds of a message, by address.
        losses: Fraction of HTTP requests that arrive late, and of requests with lost answers, while callers believe
            that both were lost.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.listeners: dict[str, Listener] = {}
        self.cut: set[str] = set()
        self.hanging: dict[str, asyncio.Event] = {}
        self.slow: dict[str, float] = {}
        self.losses = 0.0
        self._late: set[asyncio.Task[Any]] = set()

    async def travel(self, address: str) -> None:
        """Waits for the transit of one message to or from an address. Raises ConnectionError if the address is cut."""
        delay_s = self.chance.uniform(*_USUAL_S)
        if address in self.slow:
            delay_s += self.chance.uniform(0.0, self.slow[address])
        await asyncio.sleep(delay_s)
        if event := self.hanging.get(address):
            await event.wait()
        if address in self.cut:
            raise ConnectionError(address)

    async def reset(self) -> None:
        """Waits until a caller learns that there is no answer."""
        await asyncio.sleep(self.chance.uniform(*_RESET_S))

    def break_off(self, address: str) -> None:
        """Breaks all calls in progress at an address; their callers learn nothing more."""
        if listener := self.listeners.get(address):
            listener.break_off()

    def listen(self, address: str, process: Process) -> "Listener":
        """Registers a process as the listener at an address."""
        listener = self.listeners[address] = Listener(process)
        return listener

    def close(self, address: str) -> None:
        """Removes the listener of a process that has ended."""
        if listener := self.listeners.pop(address, None):
            listener.break_off()

    def drop_caller(self, process: Process) -> None:
        """Drops the calls made by a process that has ended."""
        for listener in self.listeners.values():
            listener.drop_caller(process)

    async def post(self, address: str, work: Callable[[], Awaitable["HttpAnswer"]]) -> "HttpAnswer":
        """Sends an HTTP request. It may arrive without the caller knowing, be resent, and arrive after the repeat.

        Raises ConnectionError.
        """
        fate = self.chance.random()
        if fate < self.losses:
            late = asyncio.get_running_loop().create_task(self._post(address, work, self.chance.uniform(0.0, 3.0)))
            self._late.add(late)
            late.add_done_callback(self._forget)
            await self.reset()
            raise ConnectionError(address)
        answer = await self._post(address, work, 0.0)
        if fate > 1.0 - self.losses:
            await self.reset()
            raise ConnectionError(address)
        return answer

    async def _post(self, address: str, work: Callable[[], Awaitable["HttpAnswer"]], late_s: float) -> "HttpAnswer":
        await asyncio.sleep(late_s)
        await self.travel(address)
        listener = self.listeners.get(address)
        if listener is None:
            await self.reset()
            raise ConnectionError(address)
        answer: HttpAnswer = await listener.call(work(), is_stopped_with_caller=False)
        await self.travel(address)
        return answer

    def _forget(self, late: asyncio.Task[Any]) -> None:
        self._late.discard(late)
        if not late.cancelled():
            late.exception()  # no caller waits for it

    def open_channel(self, address: str) -> "Channel":
        """Stands in for `grpc.aio.insecure_channel`."""
        return Channel(self, address)


class Call(NamedTuple):
    """A call in progress: the calling process, the future of the answer, and the task that works on it."""

    caller: Process | None
    answer: asyncio.Future[Any]
    work: asyncio.Task[Any]


class Listener:
    """A listening process: its gRPC methods by path, and the calls in progress."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.methods: dict[str, Any] = {}
        self._numbers = itertools.count()
        self.calls: dict[int, Call] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Ignored method of `grpc.aio.Server`, called by generated code; the next one receives all handlers."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Registers handlers, as `grpc.aio.Server` does."""
        self.methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    async def call(self, work: Awaitable[Any], is_stopped_with_caller: bool) -> Any:
        """Returns the result of `work` in this process. Raises ConnectionError if the process or the connection ends
        first.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                result, error = await work, None
            except Exception as raised:
                result, error = None, raised
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        task = self.process.start(run())
        number = next(self._numbers)
        self.calls[number] = Call(PROCESS.get(), answer, task)
        try:
            return await answer
        finally:
            self.calls.pop(number, None)
            if is_stopped_with_caller and not task.done():
                self.process.call_later(0.0, task.cancel)

    def break_off(self) -> None:
        """Breaks all connections."""
        for call in self.calls.values():
            if not call.answer.done():
                call.answer.set_exception(ConnectionError("broken off"))

    def drop_caller(self, process: Process) -> None:
        """Cancels work that only an ended process waited for."""
        for call in self.calls.values():
            if call.caller is process and not call.work.done():
                self.process.call_later(0.0, call.work.cancel)


class Channel:
    """A `grpc.aio.Channel` for generated stubs."""

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address
        self._callers: set[asyncio.Task[Any]] = set()

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Returns a method with one request and one response."""

        def call(request: Any, timeout: float | None = None, metadata: Any = None) -> Awaitable[Any]:
            return self._one(path, request_serializer(request), response_deserializer, timeout)

        return call

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Returns a method with one request and a stream of responses."""

        def call(request: Any, timeout: float | None = None, metadata: Any = None) -> "_Stream":
            async def requests() -> list[bytes]:
                return [request_serializer(request)]

            return _Stream(lambda: self._answers(path, requests(), timeout), response_deserializer)

        return call

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Returns a method with a stream of requests and a stream of responses."""

        def call(given: AsyncIterator[Any], timeout: float | None = None, metadata: Any = None) -> "_Stream":
            async def requests() -> list[bytes]:
                return [request_serializer(request) async for request in given]

            return _Stream(lambda: self._answers(path, requests(), timeout), response_deserializer)

        return call

    stream_unary = unary_unary
    """Services behind the gateway have no such method that it calls."""

    async def close(self, grace: float | None) -> None:
        """Cancels the calls in progress."""
        for caller in list(self._callers):
            caller.cancel()

    async def _one(self, path: str, request: bytes, read: Callable[[bytes], Any], timeout_s: float | None) -> Any:
        async def requests() -> list[bytes]:
            return [request]

        (answer,) = await self._answers(path, requests(), timeout_s)
        return read(answer)

    async def _answers(self, path: str, requests: Awaitable[list[bytes]], timeout_s: float | None) -> list[bytes]:
        """Returns all messages of an answer. Raises AioRpcError."""
        sent, caller = await requests, asyncio.current_task()
        assert caller is not None
        self._callers.add(caller)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(path, sent)
        except ConnectionError:
            raise _failure(grpc.StatusCode.UNAVAILABLE, f"no answer from {self._address}") from None
        except TimeoutError:
            raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        except FoveaError as error:
            details = Metadata((STATUS_DETAILS, to_status(error).SerializeToString()))
            raise _failure(error.code, error.message, details) from None
        finally:
            self._callers.discard(caller)

    async def _exchange(self, path: str, requests: list[bytes]) -> list[bytes]:
        network = self._network
        await network.travel(self._address)
        listener = network.listeners.get(self._address)
        if listener is None:
            await network.reset()
            raise ConnectionError(self._address)
        handler = listener.methods[path]
        try:
            answers: list[bytes] = await listener.call(_serve(handler, requests), is_stopped_with_caller=True)
            await network.travel(self._address)
        except ConnectionError:
            await network.reset()
            raise
        return answers


async def _serve(handler: Any, requests: list[bytes]) -> list[bytes]:
    given = [handler.request_deserializer(request) for request in requests]
    if handler.unary_unary:
        answers = [await handler.unary_unary(given[0], None)]
    elif handler.unary_stream:
        answers = [answer async for answer in handler.unary_stream(given[0], None)]
    else:
        answers = [answer async for answer in handler.stream_stream(_each(given), None)]
    return [handler.response_serializer(answer) for answer in answers]


async def _each(messages: list[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


class _Stream:
    """The call object of a method with a stream of responses."""

    def __init__(self, ask: Callable[[], Awaitable[list[bytes]]], read: Callable[[bytes], Any]) -> None:
        self._ask, self._read = ask, read

    async def __aiter__(self) -> AsyncIterator[Any]:
        for answer in await self._ask():
            yield self._read(answer)

    def cancel(self) -> None:
        """Does nothing: leaving the iterator has already cancelled the call."""


def _failure(code: grpc.StatusCode, details: str, trailing: Metadata | None = None) -> AioRpcError:
    return AioRpcError(code, Metadata(), trailing or Metadata(), details, "")


class HttpAnswer:
    """Status, body and headers of an HTTP answer."""

    def __init__(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.status, self.body, self.headers = status, body, headers


async def ask_app(app: ASGIApp, path: str, headers: dict[str, str], body: bytes) -> HttpAnswer:
    """Sends a POST request to an ASGI application."""
    length = [] if "content-length" in headers else [(b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()] + length,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    given = [{"type": "http.request", "body": body, "more_body": False}]
    status, pieces, answered = 0, [], []

    async def receive() -> Any:
        if given:
            return given.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal status, answered
        if message["type"] == "http.response.start":
            status, answered = message["status"], message["headers"]
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return HttpAnswer(status, b"".join(pieces), answered)
