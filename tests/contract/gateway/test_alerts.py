"""Alerts start and end once each, on the page of the owners concerned and at a webhook (a real HTTP server)."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fovea.runtime.hosts import free_ports
from fovea.wire.errors import InvalidInput
from fovea_gateway.access.api_keys import Scope
from fovea_gateway.live import alerts
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.recovering import RecoveringTrainer
from tests.contract.gateway.requests import Rest
from tests.small_disk import fill
from tests.waiting import eventually

SECRET = "T0P-SECRET"


class Receiver(ThreadingHTTPServer):
    """A webhook server. It answers with `statuses` first and then with 200; `gate` holds its answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Post)
        self.told: list[dict[str, Any]] = []
        self.bodies: list[str] = []
        self.statuses: list[int] = []
        self.attempts = 0
        self.gate = threading.Event()
        self.gate.set()

    @property
    def url(self) -> str:
        """The URL, with a secret in its path."""
        return f"http://127.0.0.1:{self.server_port}/{SECRET}?token={SECRET}"

    def events(self, kind: str) -> list[str]:
        """Events of one kind of alert, in order of arrival."""
        return [one["event"] for one in self.told if one["kind"] == kind]


class _Post(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.attempts += 1
        self.server.gate.wait(60)
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status == 200:
            self.server.bodies.append(body)
            self.server.told.append(json.loads(body))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        serving = threading.Thread(target=server.serve_forever, args=[0.05])
        serving.start()
        yield server
        server.gate.set()
        server.shutdown()
        serving.join()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea_gateway.fronts.app.ALERTS_S", 0.05)
    monkeypatch.setattr(alerts, "CALM_S", 0.2)
    monkeypatch.setattr("fovea_gateway.fronts.app.TICK_S", 0.05)


@pytest.fixture
async def stand(tmp_path: Path, receiver: Receiver) -> AsyncIterator[Stand]:
    stand = Stand(tmp_path)
    stand.trainer = RecoveringTrainer(lambda: stand.samplers)
    async with running(stand, alerts_webhook=receiver.url, alerts_gone_s=0.3, alerts_disk_share=0.0) as stand:
        yield stand


async def _until(stand: Stand, key: str | None, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Returns the first alert section of the stream that meets a condition."""
    async with (
        asyncio.timeout(60),
        stand.http(key) if key else stand.http() as http,
        http.stream("GET", "live/events") as response,
    ):
        name = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name == "alerts":
                section: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if holds(section):
                    return section
    raise AssertionError("the stream ended without such alerts")


async def _section(stand: Stand, key: str | None = None) -> dict[str, Any]:
    return await _until(stand, key, lambda section: True)


async def _key(stand: Stand, owner: str, scope: Scope) -> str:
    assert stand.gateway is not None
    return (await stand.gateway.components.keys.create(owner, "", scope, None))[0]


def _kinds(section: dict[str, Any]) -> list[str]:
    return [one["kind"] for one in section["open"]]


async def test_a_sampler_that_is_gone_begins_an_alert_and_its_return_ends_it(stand: Stand, receiver: Receiver) -> None:
    admin = await _key(stand, "root", Scope.ADMIN)
    await stand.sampler.stop()
    await eventually(lambda: receiver.events("sampler_gone") == ["begin"])
    shown = await _until(stand, admin, lambda section: _kinds(section) == ["sampler_gone"])
    assert shown["open"][0]["subject"] == stand.sampler.address
    assert _kinds(await _section(stand)) == [], "only administrators see alerts of services"
    await stand.sampler.start()
    await eventually(lambda: receiver.events("sampler_gone") == ["begin", "end"])
    await _until(stand, admin, lambda section: [one["kind"] for one in section["ended"]] == ["sampler_gone"])
    begun, end = receiver.told
    assert begun["id"] == end["id"]
    assert SECRET not in json.dumps(receiver.told)


@pytest.mark.parametrize("service", ["trainer", "renderer"])
async def test_a_trainer_or_renderer_that_is_gone_begins_an_alert(
    stand: Stand, receiver: Receiver, service: str
) -> None:
    await getattr(stand, service).stop()
    await eventually(lambda: receiver.events(f"{service}_gone") == ["begin"])
    await getattr(stand, service).start()
    await eventually(lambda: receiver.events(f"{service}_gone") == ["begin", "end"])


async def test_a_service_that_never_answered_begins_an_alert_with_the_reason(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fovea_gateway.fronts.components.START_S", 1.0)
    monkeypatch.setattr("fovea_gateway.replicas.replicas._QUIET_S", 0.0)
    stand = Stand(tmp_path)
    (port,) = free_ports(1)
    dead = f"127.0.0.1:{port}"
    async with running(stand, alerts_webhook=receiver.url, alerts_disk_share=0.0, sampler=[dead]):
        await eventually(lambda: receiver.events("sampler_gone") == ["begin"])
        shown = await _until(stand, await _key(stand, "root", Scope.ADMIN), lambda section: bool(section["open"]))
    (alert,) = shown["open"]
    assert f"at {dead} has not answered since the gateway started: failed to connect" in alert["message"]


async def test_alerts_of_a_model_are_its_owners(stand: Stand, receiver: Receiver) -> None:
    other, admin = await _key(stand, "bob", Scope.TRAIN), await _key(stand, "root", Scope.ADMIN)
    async with stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        await rest.ok("live/reports", model_id=model_id, metrics={"kl": 0.75})
        await eventually(lambda: receiver.events("kl_high") == ["begin"])
        for key in (None, admin):
            await _until(stand, key, lambda section: _kinds(section) == ["kl_high"])
        assert _kinds(await _section(stand, other)) == []
        assert (receiver.told[0]["subject"], receiver.told[0]["owner"] != "") == (model_id, True)
        assert "0.75" in receiver.told[0]["message"]
        await rest.ok("live/reports", model_id=model_id, metrics={"kl": 0.25})
        await eventually(lambda: receiver.events("kl_high") == ["begin", "end"])


async def test_a_loss_that_the_trainer_refuses_as_not_finite_begins_an_alert(stand: Stand, receiver: Receiver) -> None:
    async with stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        stand.trainer.failures["ForwardBackward"] = [InvalidInput("datum[0]: its cross_entropy loss is nan: ...")]
        await rest.result((await rest.forward_backward(model_id, 1)).json()["request_id"])
        await eventually(lambda: receiver.events("loss_not_finite") == ["begin"])
        await rest.result((await rest.optim_step(model_id, 2, learning_rate=1e-3))["request_id"])
        await rest.result((await rest.forward_backward(model_id, 3)).json()["request_id"])
        await rest.result((await rest.optim_step(model_id, 4, learning_rate=1e-3))["request_id"])
        await eventually(lambda: receiver.events("loss_not_finite") == ["begin", "end"])
        body = json.dumps({"model_id": model_id, "metrics": {"held_out_loss": float("nan")}})
        assert (await http.post("live/reports", content=body)).status_code == 200
        await eventually(lambda: receiver.events("loss_not_finite") == ["begin", "end", "begin"])


async def test_a_change_that_does_not_become_durable_begins_an_alert(tmp_path: Path, receiver: Receiver) -> None:
    stand = Stand(tmp_path)
    stand.trainer = trainer = RecoveringTrainer(lambda: stand.samplers)
    trainer.is_disk_slow = True
    async with running(stand, alerts_webhook=receiver.url, alerts_durable_lag_s=0.2), stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        await rest.result((await rest.forward_backward(model_id, 1)).json()["request_id"])
        await rest.result((await rest.optim_step(model_id, 2, learning_rate=1e-3))["request_id"])
        await eventually(lambda: receiver.events("durable_lag") == ["begin"])
        trainer.is_disk_slow = False
        await rest.result((await rest.forward_backward(model_id, 3)).json()["request_id"])
        await rest.result((await rest.optim_step(model_id, 4, learning_rate=1e-3))["request_id"])
        await eventually(lambda: receiver.events("durable_lag") == ["begin", "end"])


async def test_requests_that_wait_long_for_an_adapters_slot_begin_an_alert(tmp_path: Path, receiver: Receiver) -> None:
    async with running(Stand(tmp_path), alerts_webhook=receiver.url, alerts_slot_wait_s=0.2) as stand:
        stand.sampler.waiting_for_slot = 3
        await eventually(lambda: receiver.events("slot_wait") == ["begin"])
        stand.sampler.waiting_for_slot = 0
        await eventually(lambda: receiver.events("slot_wait") == ["begin", "end"])


async def test_a_disk_that_fills_up_begins_an_alert(small_disk: Path, receiver: Receiver) -> None:
    async with running(Stand(small_disk), alerts_webhook=receiver.url, alerts_disk_share=0.9):
        fill(small_disk / "junk", 2 * 2**20)
        await eventually(lambda: receiver.events("disk_full") != [])
        (small_disk / "junk").unlink()
        await eventually(
            lambda: receiver.events("disk_full").count("end") == receiver.events("disk_full").count("begin")
        )


async def test_a_failing_webhook_is_tried_again_shown_and_never_in_the_way(
    stand: Stand, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    admin = await _key(stand, "root", Scope.ADMIN)
    receiver.statuses = [503]
    await stand.renderer.stop()
    await eventually(lambda: receiver.events("renderer_gone") == ["begin"])
    assert receiver.attempts == 2
    await _until(stand, admin, lambda told: told["webhook"] == {"host": "127.0.0.1", "sent": 1, "dropped": 0})

    # A permanent refusal drops the alert; only administrators see the reason.
    receiver.statuses = [404]
    await stand.renderer.start()
    await eventually(lambda: receiver.attempts == 3)

    told = await _until(stand, admin, lambda told: told["webhook"].get("failure") == "it answered 404")
    assert told["webhook"]["dropped"] == 1
    assert "webhook" not in await _section(stand)

    # The gateway stops waiting for a silent server after a while, and keeps working meanwhile.
    monkeypatch.setattr(alerts.Webhook, "ATTEMPT_S", 0.2)
    receiver.gate.clear()
    await stand.sampler.stop()
    await eventually(lambda: receiver.attempts >= 4)
    async with stand.http() as http:
        assert await Rest(http).create_model()

    await _until(stand, admin, lambda told: "within 0.2 s" in told["webhook"].get("failure", ""))
    receiver.gate.set()
    await eventually(lambda: receiver.events("sampler_gone")[:1] == ["begin"])
    logged = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("fovea"))
    assert "the webhook at 127.0.0.1 fails" in logged
    assert SECRET not in logged


@pytest.mark.parametrize("url", ["file:///etc/passwd", "hooks.example.org", "http://"])
def test_a_webhook_has_a_web_address(tmp_path: Path, url: str) -> None:
    async def start() -> None:
        await Stand(tmp_path).start(alerts_webhook=url)

    with pytest.raises(ValueError, match="it must be a URL such as"):
        asyncio.run(start())
