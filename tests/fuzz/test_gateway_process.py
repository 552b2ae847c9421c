"""A real gateway process with fake services survives any REST and gRPC input and serves the next request."""

import asyncio
import json
import random
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import zstandard

from fovea.runtime.hosts import free_ports
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.nasty import to_json
from tests.contract.gateway.requests import PROTOBUF, Rest, forward_backward_body
from tests.contract.gateway.valid_bodies import ROUTES, Bodies
from tests.contract.gateway.valid_messages import calls
from tests.fuzz.mutations import Messages, fuzzed, mutated_bytes, mutated_json
from tests.waiting import eventually

_MOST_GROWTH_BYTES = 512 * 2**20
_BOMB = zstandard.compress(bytes(2**26))
_KEYED = (("x-api-key", KEY),)
_OURS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class Target:
    """The gateway process, the event loop of its fakes and clients, and the ids of existing objects."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stand = Stand(folder)
        self._rest_port, self._grpc_port = free_ports(2)
        self.wrong: list[str] = []
        self.run(self._start())
        self.before = self.process.memory_info().rss

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine in the loop and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    async def _start(self) -> None:
        await self._stand.start_fakes()
        stand = self._stand
        flags = {
            "model-name": MODEL, "model": "/models/fake", "renderer": stand.renderer.address,
            "sampler": stand.sampler.address, "trainer": stand.trainer.address, "port": self._rest_port,
            "grpc-port": self._grpc_port, "state-dir": stand.state_dir, "log-level": "ERROR", "poll-hold-s": 0.1,
        }  # fmt: skip
        self.started = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fovea_gateway", *(f"--{name}={value}" for name, value in flags.items())
        )
        self.process = psutil.Process(self.started.pid)
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self._rest_port}/api/v1/", headers={"X-API-Key": KEY}, timeout=30
        )
        self.channel: Any = grpc.aio.insecure_channel(f"127.0.0.1:{self._grpc_port}")
        await eventually(self._answers, 60)
        rest = Rest(self.http)
        await rest.open_session()
        opened = await rest.ok(
            "create_sampling_session", session_id=rest.session_id, sampling_session_seq_id=0, base_model=MODEL
        )
        self.bodies = Bodies(rest.session_id, await rest.create_model(), opened["sampling_session_id"])
        self.messages = Messages(calls(self.bodies))

    async def _answers(self) -> bool:
        try:
            return (await self.http.get("sessions")).status_code == 200
        except httpx.TransportError:
            return False

    async def _stop(self) -> None:
        await self.http.aclose()
        await self.channel.close(None)
        self.started.kill()
        await self.started.wait()
        await self._stand.stop_fakes()

    def stop(self) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def check(self) -> None:
        """Checks that the process is alive, within its memory and without server errors, and serves a valid request."""
        assert self.wrong == []
        assert self.started.returncode is None
        assert self.run(self._answers())
        assert self.process.memory_info().rss - self.before < _MOST_GROWTH_BYTES

    async def rest(self, seed: int) -> None:
        """Sends one REST request."""
        rng = random.Random(seed)
        route, headers = rng.choice([*ROUTES, "forward_backward"]), {"Content-Type": "application/json"}
        if route == "forward_backward":
            right = forward_backward_body(self.bodies.model_id, rng.randrange(1, 2**31))
            body, headers = mutated_bytes(rng, [right]), {"Content-Type": PROTOBUF}
        else:
            body = to_json(mutated_json(rng, self.bodies.of(route))).encode()
            if rng.random() < 0.5:
                body = mutated_bytes(rng, [json.dumps(self.bodies.of(route)).encode()])
        if rng.random() < 0.1:
            headers["Content-Encoding"] = "zstd"
            body = zstandard.compress(body)
            if rng.random() < 0.5:
                body = mutated_bytes(rng, [body, _BOMB])
        response = await self.http.post(route.partition("?")[0], content=body, headers=headers)
        if response.status_code >= 500:
            self.wrong.append(f"seed {seed}: {route}: {response.status_code} {response.text:.300}")

    async def grpc(self, seed: int) -> None:
        """Sends one message over gRPC as the only message of its call."""
        rng = random.Random(seed)
        kind = rng.choice(list(self.messages.of_kind))
        body = self.messages.encoded(rng, kind)
        call = self.channel.stream_stream(f"/fovea.api.v1.GatewayService/{kind.removesuffix('Request')}")
        try:
            async for _ in call(iter([body]), metadata=_KEYED, timeout=20):
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() in _OURS:
                self.wrong.append(f"seed {seed}: {kind}: {error.details()}")


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """One gateway process for all inputs."""
    with tempfile.TemporaryDirectory() as folder:
        made = Target(Path(folder))
        yield made
        made.stop()


async def _all(sent: list[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*sent)


@fuzzed(0.15)
def test_rest(target: Target, seeds: list[int]) -> None:
    target.run(_all([target.rest(seed) for seed in seeds]))
    target.check()


@fuzzed(0.2)
def test_grpc(target: Target, seeds: list[int]) -> None:
    target.run(_all([target.grpc(seed) for seed in seeds]))
    target.check()
