"""A real gateway (uvicorn and gRPC on 127.0.0.1) in front of fake services, with the real SDK as its client."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from fovea_gateway.fronts.app import Gateway
from fovea_gateway.settings import GatewaySettings
from tests.certificates import one_certificate
from tests.contract.gateway.fakes import MODEL, FakeRenderer, FakeSampler, FakeTrainer
from tests.contract.gateway.requests import Rest
from tests.contract.gateway.valid_bodies import Bodies
from tests.e2e.browser import Browser, running_browser

KEY = "tml-local"


class Stand:
    """One gateway with its fake services. `gateway` can be stopped and started again on the same state."""

    def __init__(self, state_dir: Path, sampler_count: int = 1) -> None:
        self.renderer = FakeRenderer()
        self.samplers = [FakeSampler() for _ in range(sampler_count)]
        self.trainer = FakeTrainer(lambda: self.samplers)
        self.state_dir = state_dir
        self.overrides: dict[str, Any] = {}
        self.gateway: Gateway | None = None
        self.port = 0

    @property
    def sampler(self) -> FakeSampler:
        """The first sampler."""
        return self.samplers[0]

    @property
    def url(self) -> str:
        """Base URL of the REST API."""
        return f"http://127.0.0.1:{self.port}{self.overrides.get('base_path', '')}"

    async def start_fakes(self) -> None:
        for fake in (self.renderer, *self.samplers, self.trainer):
            await fake.start()

    async def stop_fakes(self) -> None:
        for fake in (self.renderer, *self.samplers, self.trainer):
            fake.open.set()
            await fake.stop()

    async def start(self, **overrides: Any) -> None:
        """Starts a gateway on this state, at the same port as before."""
        self.overrides |= overrides
        values: dict[str, Any] = {
            "model_name": MODEL,
            "model": "/models/fake",
            "renderer": [self.renderer.address],
            "sampler": [sampler.address for sampler in self.samplers],
            "trainer": self.trainer.address,
            "port": self.port,
            "state_dir": self.state_dir,
            "poll_hold_s": 1.0,
            "retry_deadline_s": 20.0,
            "trainer_wait_s": 1.0,
            "drain_s": 0.5,
            # The full-disk alert has its own test; other tests must not depend on the free space of this machine.
            "alerts_disk_share": 0.0,
        }
        settings = GatewaySettings(**(values | self.overrides))
        self.gateway = Gateway(settings)
        await self.gateway.start()
        self.port = self.gateway.rest_port

    async def stop(self) -> None:
        """Stops the gateway as SIGTERM does."""
        assert self.gateway is not None
        await self.gateway.stop()
        self.gateway = None

    def silence(self, session_id: str, seconds: float) -> None:
        """Sets a session's last heartbeat and last poll back in time."""
        assert self.gateway is not None
        sessions = self.gateway.components.sessions
        for heard in (sessions._alive_at, sessions._heard_at):
            if session_id in heard:
                heard[session_id] -= seconds

    def http(self, key: str | None = KEY) -> httpx.AsyncClient:
        """A bare HTTP client, for details that the SDK hides."""
        headers = {"X-API-Key": key} if key else {}
        return httpx.AsyncClient(base_url=f"{self.url}/api/v1/", headers=headers, timeout=30)

    async def sdk(self, use: Callable[[tinker.ServiceClient], Any], key: str = KEY) -> Any:
        """Runs `use` with a ServiceClient in a thread: the SDK blocks, and the gateway runs in this loop."""

        def run() -> Any:
            with tinker.ServiceClient(base_url=self.url, api_key=key) as client:
                return use(client)

        return await asyncio.to_thread(run)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="package", autouse=True)
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_certificate(tmp_path_factory.mktemp("certificates")):
        yield


_LOOKS = (
    "fovea_gateway.access.api_keys._LOOK_S", "fovea_gateway.fronts.app.LOOK_S", "fovea_gateway.fronts.app._GAUGES_S",
    "fovea_gateway.fronts.app._AUDIT_S", "fovea_gateway.fronts.app.REPORT_S",
    "fovea_gateway.fronts.app._JOURNAL_S", "fovea_gateway.fronts.app._RETURN_S", "fovea_gateway.fronts.app._SHARES_S",
    "fovea_gateway.replicas.replicas._AGAIN_S", "fovea_gateway.replicas.replicas._POLL_S",
    "fovea_gateway.training.commands._FIRST_LOOK_S", "fovea_gateway.training.housekeeping._LOOK_S",
    "fovea_gateway.training.residency._FULL_S", "fovea_gateway.training.residency._LOOK_S",
)  # fmt: skip


@pytest.fixture(scope="package", autouse=True)
def _looks() -> Iterator[None]:
    """Makes gateways of this process poll every 0.1 s instead of every one or two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _LOOKS:
            patch.setattr(name, 0.1)
        yield


@pytest.fixture
async def stand(tmp_path: Path, database_url: str) -> AsyncIterator[Stand]:
    """A running stand with one sampler."""
    async with running(Stand(tmp_path), database_url=database_url) as running_stand:
        yield running_stand


@contextlib.asynccontextmanager
async def running(stand: Stand, **overrides: Any) -> AsyncIterator[Stand]:
    """Starts and stops a stand."""
    os.environ["TINKER_TELEMETRY"] = "0"
    await stand.start_fakes()
    await stand.start(**overrides)
    try:
        yield stand
    finally:
        if stand.gateway is not None:
            await stand.stop()
        await stand.stop_fakes()


@pytest.fixture
async def rest(stand: Stand) -> AsyncIterator[Rest]:
    """A bare client with a session."""
    async with stand.http() as http:
        client = Rest(http)
        await client.open_session()
        yield client


@pytest.fixture
async def made(rest: Rest) -> Bodies:
    """Request bodies that refer to existing objects."""
    opened = await rest.ok(
        "create_sampling_session", session_id=rest.session_id, sampling_session_seq_id=0, base_model=MODEL
    )
    bodies = Bodies(rest.session_id, await rest.create_model(), opened["sampling_session_id"])
    # A sampling session with a finished result answers polls for it at once.
    await rest.result((await rest.sample(bodies.sampling_id, 0)).json()["request_id"])
    return bodies


@pytest.fixture
def no_surprises(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test if a traceback was logged, because a future hides unexpected exceptions."""
    yield
    assert [caplog.handler.format(record) for record in caplog.get_records("call") if record.exc_info] == []
