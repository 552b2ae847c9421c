"""Measures a gateway's response time with 2,000 open polls: `python -m benchmarks.gateway_polls`.

Runs a real gateway process with fake services and one client with as many pending samples as connections. Measures an
unrelated request, sent every few milliseconds over its own connection: while all polls are held (long enough for each
to be answered with 408 and resent), and while all samples finish and are fetched. Covers both ways of waiting in the
SDK: one retrieve_future per sample, and one retrieve_futures for all.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from multiprocessing.connection import Connection as Pipe
from typing import Any

import psutil

from benchmarks.figure import emit, quantile
from fovea.runtime.hosts import free_ports

KEY = "tml-local"
MODEL = "fovea/fake-vl"
_PROBE_EVERY_S = 0.02
_SUBMITTERS = 50
_FETCHERS = 100


class Connection:
    """An HTTP/1.1 connection with minimal code around the socket."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, route: str, body: dict[str, Any], accept: str = "application/json") -> tuple[int, bytes]:
        """Sends a request and returns status and body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        content = json.dumps(body).encode()
        head = (
            f"POST /api/v1/{route} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {KEY}\r\nAccept: {accept}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        status = int(lines[0].split(b" ")[1])
        length = next(int(line[15:]) for line in lines if line.lower().startswith(b"content-length:"))
        return status, await reader.readexactly(length)

    async def ok(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Sends a request that must succeed."""
        status, answer = await self.post(route, body)
        if status != 200:
            raise RuntimeError(f"{route}: {status} {answer.decode()}")
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    def close(self) -> None:
        """Closes the socket."""
        if self._streams is not None:
            self._streams[1].close()


@dataclass
class Client:
    """A client with many pending samples."""

    port: int
    count: int
    sampling_id: str = ""
    pending: list[str] = field(default_factory=list)
    polls: int = 0
    connections: list[Connection] = field(default_factory=list)

    def connect(self) -> Connection:
        """Returns a new connection."""
        self.connections.append(Connection(self.port))
        return self.connections[-1]

    async def open(self) -> str:
        """Opens a session and a sampling session; returns the session's id."""
        connection = self.connect()
        session_id = str((await connection.ok("create_session", {"sdk_version": "0.38.0"}))["session_id"])
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
        self.sampling_id = (await connection.ok("create_sampling_session", body))["sampling_session_id"]
        return session_id

    async def submit(self, first: int, connections: int = _SUBMITTERS) -> None:
        """Submits all samples."""
        numbers = iter(range(first, first + self.count))

        async def work(connection: Connection) -> None:
            for seq_id in numbers:
                body = {
                    "sampling_session_id": self.sampling_id,
                    "seq_id": seq_id,
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(range(1, 200))}]},
                    "sampling_params": {"max_tokens": 100},
                }
                self.pending.append((await connection.ok("asample", body))["request_id"])

        await asyncio.gather(*(work(self.connect()) for _ in range(connections)))

    async def fetch(self, connection: Connection, request_id: str) -> None:
        """Polls one future until it is finished."""
        body = {"request_id": request_id, "allow_metadata_only": True}
        while True:
            self.polls += 1
            status, answer = await connection.post("retrieve_future", body, "application/x-protobuf")
            if status == 200:
                return
            if status != 408:
                raise RuntimeError(f"retrieve_future: {status} {answer.decode()}")

    async def wait_each(self) -> None:
        """Waits with one open poll per sample."""
        await asyncio.gather(*(self.fetch(self.connect(), request_id) for request_id in self.pending))

    async def wait_together(self) -> None:
        """Waits with one poll for all, then fetches each finished sample and acknowledges it with the next poll."""
        poller, fetched, cursor = self.connect(), [], 0
        idle: asyncio.Queue[Connection] = asyncio.Queue()
        for _ in range(_FETCHERS):
            idle.put_nowait(self.connect())

        async def fetch(request_id: str) -> None:
            connection = await idle.get()
            await self.fetch(connection, request_id)
            idle.put_nowait(connection)
            fetched.append(request_id)

        tasks: dict[str, asyncio.Task[None]] = {}
        target = {"type": "sampling_session", "sampling_session_id": self.sampling_id, "cloned_sampler_id": 0}
        while len(tasks) < self.count:
            self.polls += 1
            acknowledged = list(fetched)
            body = {"target": target, "prev_cursor": cursor, "retrieved_request_ids": acknowledged}
            answer = await poller.ok("retrieve_futures", body)
            cursor = answer["cursor"]
            del fetched[: len(acknowledged)]
            for completion in answer["completions"]:
                request_id = completion["request_id"]
                if request_id not in tasks:
                    tasks[request_id] = asyncio.create_task(fetch(request_id))
        await asyncio.gather(*tasks.values())

    def close(self) -> None:
        """Closes all connections."""
        for connection in self.connections:
            connection.close()


async def probe(pipe: Pipe, port: int, session_id: str, until: Awaitable[Any]) -> list[float]:
    """Returns the seconds of unrelated requests until something is done."""
    pipe.send((port, session_id))
    await until
    pipe.send(None)
    seconds: list[float] = await asyncio.to_thread(pipe.recv)
    return seconds


def run_probe(pipe: Pipe) -> None:
    """Sends heartbeats on command from a separate process, so that the polling client cannot delay them.

    Each heartbeat has a scheduled time and is measured from it, even if the previous one is late: a stall counts for
    all requests that it would affect.
    """
    while (told := pipe.recv()) is not None:
        port, session_id = told
        connection = HTTPConnection("127.0.0.1", port)
        pipe.send(_heartbeats(pipe, connection, session_id))
        connection.close()


def _heartbeats(pipe: Pipe, connection: HTTPConnection, session_id: str) -> list[float]:
    seconds = []
    body, headers = json.dumps({"session_id": session_id}), {"X-API-Key": KEY}
    due = time.perf_counter()
    while not pipe.poll():
        due += _PROBE_EVERY_S
        time.sleep(max(due - time.perf_counter(), 0.0))
        connection.request("POST", "/api/v1/session_heartbeat", body, headers)
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise RuntimeError(f"session_heartbeat: {response.status}")
        seconds.append(time.perf_counter() - due)
    pipe.recv()
    return seconds


def serve_fakes(pipe: Pipe) -> None:
    """Runs the fake services. The pipe carries the commands `open` and `shut`."""
    asyncio.run(_serve_fakes(pipe))


async def _serve_fakes(pipe: Pipe) -> None:
    from tests.contract.gateway.fakes import FakeRenderer, FakeSampler, FakeTrainer

    sampler = FakeSampler()
    fakes = [FakeRenderer(), sampler, FakeTrainer(lambda: [sampler])]
    for fake in fakes:
        await fake.start()
    pipe.send([fake.address for fake in fakes])
    while True:
        command = await asyncio.to_thread(pipe.recv)
        if command is None:
            break
        (sampler.open.set if command == "open" else sampler.open.clear)()
        sampler.calls.clear()
    for fake in fakes:
        await fake.stop()


@asynccontextmanager
async def gateway(
    fakes: Sequence[str], command: Sequence[str], checkout: str = ""
) -> AsyncIterator[tuple[int, psutil.Process]]:
    """Runs a gateway process. Yields its port.

    Args:
        fakes: Addresses of renderer, sampler and trainer.
        command: Arguments for Python, such as `-m fovea_gateway`.
        checkout: The absolute path of the sources that it runs; by default those of this process.
    """
    renderer, sampler, trainer = fakes
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "model-name": MODEL, "model": "/models/fake", "renderer": renderer, "sampler": sampler,
            "trainer": trainer, "port": port, "state-dir": folder, "log-level": "WARNING",
        }  # fmt: skip
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        environment = {**os.environ, "PYTHONPATH": checkout} if checkout else None
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, *arguments, cwd=checkout or None, env=environment
        )
        try:
            await _until_up(port)
            yield port, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            await process.wait()


async def _until_up(port: int) -> None:
    for _ in range(600):
        with suppress(OSError):
            status, _ = await Connection(port).post("session_heartbeat", {})
            if status != 503:  # it accepts requests, even if it rejects this body
                return
        await asyncio.sleep(0.1)
    raise RuntimeError("the gateway did not start")


async def measure(
    port: int, process: psutil.Process, fakes: Pipe, probing: Pipe, count: int, window_s: float, together: bool
) -> dict[str, float]:
    """Measures p99 and maximum of the probe while polls are held and while all is fetched, and the CPU cost; in
    seconds.
    """
    fakes.send("shut")
    client = Client(port, count)
    session_id = await client.open()
    await client.submit(0)
    marks = [_cpu_s(process)]
    waiting = asyncio.create_task(client.wait_together() if together else client.wait_each())
    held = await probe(probing, port, session_id, asyncio.sleep(window_s))
    marks.append(_cpu_s(process))
    fakes.send("open")
    begun = time.perf_counter()
    drained = await probe(probing, port, session_id, waiting)
    seconds = time.perf_counter() - begun
    marks.append(_cpu_s(process))
    client.close()
    return {
        "held_p99": quantile(held, 0.99),
        "held_worst": max(held),
        "drained_p99": quantile(drained, 0.99),
        "drained_worst": max(drained),
        "drained": seconds,
        "held_cpu": marks[1] - marks[0],
        "drained_cpu": marks[2] - marks[1],
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def run(options: argparse.Namespace, fakes: Pipe, probing: Pipe) -> None:
    """Measures and prints the figures."""
    profiler = ["-m", "cProfile", "-o", options.profile] if options.profile else []
    addresses = await asyncio.to_thread(fakes.recv)
    async with gateway(addresses, [*profiler, "-m", "fovea_gateway"]) as (port, process):
        for together in (False, True):
            found = [
                await measure(port, process, fakes, probing, options.polls, options.window, together)
                for _ in range(options.repeats)
            ]
            way = "retrieve_futures" if together else "retrieve_future"
            sizes = {"way": way, "pending": options.polls, "window_s": options.window}
            for name in found[0]:
                emit(f"gateway.polls.{name}", [values[name] for values in found], "s", **sizes)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--polls", type=int, default=2000)
    parser.add_argument(
        "--window", type=float, default=45.0, help="Seconds that polls are held; they are renewed at 30."
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", default="", help="File for a cProfile of the gateway.")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipes = []
    processes = []
    for target in (serve_fakes, run_probe):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        processes.append(context.Process(target=target, args=(theirs,), daemon=True))
        processes[-1].start()
    try:
        asyncio.run(run(options, *pipes))
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join(10)


if __name__ == "__main__":
    main()
