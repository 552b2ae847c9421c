"""Two gateways with one shard each on one PostgreSQL, behind a router: clients see one Fovea, even if a gateway is
killed.
"""

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tinker
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fovea.api.v1 import gateway_pb2 as pb
from fovea.api.v1 import gateway_pb2_grpc
from fovea.runtime.hosts import free_ports
from fovea_gateway.database.ownership import shard_of
from fovea_gateway.fronts.router import Router, RouterSettings
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL, FakeTrainer
from tests.contract.gateway.recovering import RecoveringTrainer
from tests.contract.gateway.requests import PNG, Rest, image_input, text_datum
from tests.contract.gateway.test_grpc_front import KEYED, create, records, text, upload, wait
from tests.contract.gateway.test_keys import command
from tests.contract.gateway.test_postgresql import CLIENTS, Load, Patient, check_once, kill, slow_down
from tests.contract.gateway.test_process import Process
from tests.postgresql import Server
from tests.waiting import eventually

OWNERS = ("ann", "bob", "cat", "dan")


class Front:
    """A router in this process, in front of gateways that share a database."""

    def __init__(self, database_url: str, *stands: Stand) -> None:
        self.stand, self.stands, self.database_url = stands[0], stands, database_url
        self.router = Router(RouterSettings(port=0, database_url=database_url, drain_s=0.5))
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Base URL of the REST API."""
        return f"http://127.0.0.1:{self.router.rest_port}"

    async def start(self, shards: int) -> None:
        """Starts the router and waits until all shards have a gateway."""
        self._task = asyncio.create_task(self.router.run())
        await eventually(lambda: self.router.shard_count == shards, 120)

    async def stop(self) -> None:
        assert self._task is not None
        self.router.stop()
        await self._task

    def http(self, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
        """A client."""
        base_url, headers = f"{self.url}/api/v1/", {"X-API-Key": KEY}
        return httpx.AsyncClient(base_url=base_url, headers=headers, timeout=60, transport=transport)


@pytest.fixture
async def front(request: pytest.FixtureRequest, tmp_path: Path, postgresql: Server) -> AsyncIterator[Front]:
    """A router in front of two gateways with the same services. Its parameter is the class of the fake trainer."""
    url = postgresql.new_url()
    first, second = Stand(tmp_path), Stand(tmp_path)
    first.trainer = getattr(request, "param", FakeTrainer)(lambda: first.samplers)
    second.renderer, second.samplers, second.trainer = first.renderer, first.samplers, first.trainer
    keys = [KEY, *(f"{owner}=tml-{owner}" for owner in OWNERS)]
    async with running(first, database_url=url, shards=2, api_key=keys):
        await second.start(database_url=url, shards=2, api_key=keys)
        front = Front(url, first, second)
        await front.start(2)
        yield front
        await front.stop()
        await second.stop()


@pytest.fixture
async def clients(front: Front) -> AsyncIterator[list[Rest]]:
    """A client in each shard, by shard."""
    async with AsyncExitStack() as stack:
        found = [Rest(await stack.enter_async_context(front.http())) for _ in range(2)]
        for each in found:
            await each.open_session()
        assert {shard_of(each.session_id) for each in found} == {0, 1}, (
            "new sessions must go to the shard with the fewest"
        )
        yield sorted(found, key=lambda each: shard_of(each.session_id) or 0)


async def test_a_command_is_in_the_audit_log_of_all_shards(front: Front) -> None:
    """The command sees views of all shards in place of the tables, and writes into the table of the first shard."""
    admin = (await command(front.stand, "create", "--owner", "root", "--scope", "admin")).strip()
    async with httpx.AsyncClient(base_url=f"{front.url}/api/v1/", headers={"X-API-Key": admin}, timeout=60) as http:

        async def is_known() -> bool:
            return (await http.get("sessions")).status_code == 200

        await eventually(is_known)
        (entry,) = (await http.get("audit", params={"event": "key_create"})).json()["entries"]
    assert entry["event_details"]["route"] == "fovea keys create"


async def test_the_sdk_trains_and_samples_in_both_shards(front: Front) -> None:
    def use(_: int) -> str:
        with tinker.ServiceClient(base_url=front.url, api_key=KEY) as client:
            training = client.create_lora_training_client(base_model=MODEL, rank=8).result(60)
            loss = training.forward_backward([text_datum()], "cross_entropy")
            step = training.optim_step(tinker.AdamParams(learning_rate=0.1))
            assert loss.result(60).metrics["loss:sum"] == 5.0
            step.result(60)
            sampling = training.save_weights_and_get_sampling_client().result(60)
            prompt, params = tinker.ModelInput.from_ints([1, 2]), tinker.SamplingParams(max_tokens=4, seed=3)
            assert len(sampling.sample(prompt, 2, params).result(60).sequences) == 2
            return str(training.model_id)

    models = await asyncio.gather(*(asyncio.to_thread(use, number) for number in range(2)))
    assert {shard_of(model_id) for model_id in models} == {0, 1}


async def test_lists_and_limits_are_of_all_shards(front: Front, clients: list[Rest]) -> None:
    models = [await each.create_model() for each in clients]
    for each in clients:
        for _ in range(3):  # whichever gateway answers
            listed = (await each.http.get("sessions")).json()["sessions"]
            assert set(listed) == {one.session_id for one in clients}
            runs = (await each.http.get("training_runs")).json()
            assert {run["training_run_id"] for run in runs["training_runs"]} == set(models)
            assert runs["cursor"]["total_count"] == 2
    found = await clients[0].ok("sessions/search", session_id=clients[1].session_id)
    assert [one["session_id"] for one in found["sessions"]] == [clients[1].session_id]


async def test_a_checkpoint_of_one_shard_is_loaded_and_sampled_in_the_other(clients: list[Rest]) -> None:
    writer, reader = clients
    model_id = await writer.create_model()
    state = await writer.ok("save_weights", model_id=model_id, seq_id=1, path="a")
    path = (await writer.result(state["request_id"]))["path"]
    weights = await writer.ok("save_weights_for_sampler", model_id=model_id, seq_id=2, path="b")
    sampled = (await writer.result(weights["request_id"]))["path"]
    loaded = await reader.ok("load_weights", session_id=reader.session_id, model_seq_id=0, path=path, optimizer=True)
    assert (await reader.result(loaded["request_id"]))["model_id"] == f"{reader.session_id}:train:0"
    opened = await reader.ok(
        "create_sampling_session", session_id=reader.session_id, sampling_session_seq_id=0, model_path=sampled
    )
    sampling_id = opened["sampling_session_id"]
    assert "error" not in await reader.result((await reader.sample(sampling_id, 0)).json()["request_id"])
    run, _, name = sampled.removeprefix("tinker://").partition("/")
    assert (await reader.http.delete(f"training_runs/{run}/checkpoints/{name}")).status_code == 200

    async def is_gone() -> bool:
        return (await reader.sample(sampling_id, 1)).status_code == 404

    await eventually(is_gone)


@pytest.mark.parametrize("front", [RecoveringTrainer], indirect=True)
async def test_each_gateway_restores_its_own_models_in_a_trainer_that_restarted(
    front: Front, clients: list[Rest]
) -> None:
    trainer = front.stand.trainer
    models = [await each.create_model() for each in clients]
    for rest, model_id in zip(clients, models, strict=True):
        assert "error" not in await rest.result((await rest.forward_backward(model_id, 1)).json()["request_id"])
        assert "error" not in await rest.result((await rest.optim_step(model_id, 2))["request_id"])
    trainer.restart()
    for rest, model_id in zip(clients, models, strict=True):
        assert "error" not in await rest.result((await rest.forward_backward(model_id, 3)).json()["request_id"])
        assert "error" not in await rest.result((await rest.optim_step(model_id, 4))["request_id"])
    assert sorted(request.model_id for request in trainer.of("RestoreModel")) == sorted(models)
    for stand in front.stands:
        assert stand.gateway is not None
        await stand.gateway.components.orphans.sweep(with_folders=True)
    assert trainer.of("DeleteModel") == [], "models of other shards are not orphans"


async def test_a_body_that_names_its_session_last_is_kept_until_then(clients: list[Rest]) -> None:
    for rest in clients:
        opened = await rest.ok(
            "create_sampling_session", session_id=rest.session_id, sampling_session_seq_id=0, base_model=MODEL
        )
        prompt = image_input(data=PNG + b"x" * 2**21).model_dump(mode="json", exclude_none=True)
        body: dict[str, Any] = {"num_samples": 1, "prompt": prompt, "sampling_params": {"max_tokens": 4}}
        answer = await rest.post("asample", **body, sampling_session_id=opened["sampling_session_id"], seq_id=0)
        assert answer.status_code == 200, answer.text
        assert "sequences" in await rest.result(answer.json()["request_id"])


async def test_errors_arrive_as_the_gateways_send_them(front: Front, clients: list[Rest]) -> None:
    for rest in clients:
        missing = await rest.post("get_info", model_id=f"{rest.session_id}:train:7")
        assert (missing.status_code, missing.json()["reason"]) == (404, "NOT_FOUND")
    async with httpx.AsyncClient(base_url=f"{front.url}/api/v1/") as stranger:
        assert (await stranger.post("create_session", json={})).status_code == 401
        assert (await stranger.get("healthz")).json() == {"status": "ok"}
    assert (await clients[0].http.post("asample", content=b"{no JSON")).status_code == 400
    assert (await clients[0].http.get("live/pictures/none")).status_code == 404


async def test_openai_clients_and_the_page_reach_a_gateway(front: Front) -> None:
    async with httpx.AsyncClient(base_url=front.url, headers={"X-API-Key": KEY}, timeout=60) as http:
        assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == [MODEL]
        assert (await http.post("/v1/chat/completions", json={"model": "none", "messages": []})).status_code == 404
        assert "<!doctype html>" in (await http.get("/")).text.lower()


async def test_grpc_calls_reach_both_shards(front: Front) -> None:
    async with grpc.aio.insecure_channel(front.router.grpc.address) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        made = [await create(stub) for _ in range(2)]
        assert {shard_of(session_id) for session_id, _ in made} == {0, 1}
        image = await upload(stub)
        for session_id, model_id in made:
            submitted = await stub.SubmitForwardBackward(
                records(model_id, 1, [text(1), image, text(2)]), metadata=KEYED
            )
            assert [record.WhichOneof("record") for record in await wait(stub, submitted.future_id)][-1] == "metrics"
            await stub.Heartbeat(pb.HeartbeatRequest(session_id=session_id), metadata=KEYED)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetModel(pb.GetModelRequest(model_id=f"{session_id}:train:9"), metadata=KEYED)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_gateway_refuses_requests_for_a_shard_that_it_does_not_own(
    front: Front, clients: list[Rest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways that restarted at the same addresses may have swapped their shards before a router notices."""
    directory = front.router._directory
    await directory.look()
    zero, one = (directory._owners[shard] for shard in (0, 1))
    monkeypatch.setattr(directory, "_read", lambda: [one._replace(shard=0), zero._replace(shard=1)])
    await eventually(lambda: directory._owners[0].rest == one.rest)
    for each in clients:
        refused = await each.http.get(f"sessions/{each.session_id}")
        assert refused.status_code == 503, refused.text
        assert "now owns another shard: send this request again" in refused.json()["detail"]
    async with grpc.aio.insecure_channel(front.router.grpc.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = pb.HeartbeatRequest(session_id=clients[0].session_id)
        with pytest.raises(grpc.aio.AioRpcError, match="now owns another shard") as caught:
            await stub.Heartbeat(request, metadata=KEYED)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        monkeypatch.undo()
        await eventually(lambda: directory._owners[0].rest == zero.rest)
        await stub.Heartbeat(request, metadata=KEYED)
    for each in clients:
        assert (await each.http.get(f"sessions/{each.session_id}")).status_code == 200


async def test_owners_in_different_shards_get_equal_places_in_a_sampler(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fovea_gateway.health._LATELY_S", 600.0)  # on a busy machine a report may be late
    sampler = front.stand.sampler
    sampler.max_sequences = 16  # up to a fifth more may be admitted: 20
    sampler.open.clear()
    async with AsyncExitStack() as stack:
        found = {}
        for owner in OWNERS:  # three owners in one shard, one in the other
            stand = front.stands[owner == OWNERS[-1]]
            rest = Rest(await stack.enter_async_context(stand.http(f"tml-{owner}")))
            body = {"session_id": await rest.open_session(), "sampling_session_seq_id": 0, "base_model": MODEL}
            found[owner] = rest, (await rest.ok("create_sampling_session", **body))["sampling_session_id"]
            assert (await rest.sample(found[owner][1], 0)).status_code == 200
        gateways = [stand.gateway for stand in front.stands if stand.gateway is not None]
        members = [gateway.components.base_models.default.samplers.members[0] for gateway in gateways]
        await eventually(lambda: [member._slots._places for member in members] == [15, 5])
        for rest, sampling_id in found.values():
            for seq_id in range(1, 21):
                assert (await rest.sample(sampling_id, seq_id)).status_code == 200
        await eventually(lambda: sampler.running == 20)
        works = [work for gateway in gateways for work in gateway.components.futures.unfinished()]
        begun = Counter(work.submission.owner for work in works if work.progress.begun_at is not None)
        assert begun == dict.fromkeys(OWNERS, 5), "each owner must have a quarter of the places"
        sampler.open.set()
        for rest, sampling_id in found.values():
            assert "sequences" in await rest.result(f"{sampling_id}:20")


async def test_the_page_shows_all_shards_as_one(front: Front, clients: list[Rest]) -> None:
    models = {await each.create_model() for each in clients}
    async with front.http() as http, http.stream("GET", "live/events") as response:
        assert response.status_code == 200
        shown: set[str] = set()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and "order" in (told := json.loads(line.removeprefix("data: "))):
                shown = set(told["order"])
            if shown >= models:
                break
        assert shown == models
    for each, model_id in zip(clients, sorted(models, key=lambda one: shard_of(one) or 0), strict=True):
        assert (await each.http.get(f"live/curves/{model_id}")).json()["model_id"] == model_id


async def test_a_router_is_a_program(front: Front) -> None:
    (port,) = free_ports(1)
    flags = [f"--port={port}", f"--database-url={front.database_url}"]
    command = [sys.executable, "-m", "fovea_gateway.fronts.router", *flags]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        base_url, headers = f"http://127.0.0.1:{port}/api/v1/", {"X-API-Key": KEY}
        async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=60, transport=Patient()) as http:
            rest = Rest(http)
            assert await rest.create_model() == f"{rest.session_id}:train:0"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_router_is_ready_once_a_gateway_serves(tmp_path: Path, postgresql: Server) -> None:
    url, stand = postgresql.new_url(), Stand(tmp_path)
    front = Front(url, stand)
    await front.start(0)
    await eventually(lambda: front.router.grpc.port > 0)
    async with grpc.aio.insecure_channel(front.router.grpc.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)

        async def is_ready() -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        assert not await is_ready()
        async with running(stand, database_url=url, shards=2):
            await eventually(is_ready)
    await front.stop()


async def test_a_killed_owner_is_replaced_by_a_waiting_gateway_and_no_future_is_lost(
    tmp_path: Path, postgresql: Server
) -> None:
    stand, url = Stand(tmp_path), postgresql.new_url()
    await stand.start_fakes()
    for fake in (stand.trainer, stand.sampler):
        slow_down(fake, 0.05)
    gateways = [Process(stand) for _ in range(3)]
    front = Front(url, stand)
    front.http = lambda _=None, make=front.http: make(Patient())  # type: ignore[method-assign,misc]
    try:
        for gateway in gateways[:2]:
            await gateway.start(database_url=url, shards=2)
        await gateways[2].start("healthz", database_url=url, shards=2)
        await front.start(2)
        load = Load(front)  # type: ignore[arg-type]

        async def during() -> None:
            await eventually(lambda: load.steps > CLIENTS and load.sdk_rounds > 0, 120)
            await kill(gateways[0])
            steps, rounds = load.steps, load.sdk_rounds
            await eventually(lambda: load.steps > steps + 2 * CLIENTS and load.sdk_rounds > rounds, 120)

        await load.run(during)
        check_once(front, load)  # type: ignore[arg-type]
        assert {shard_of(sample) for sample in load.samples} == {0, 1}
        assert set(load.samples) <= set(stand.sampler.completed), "running requests must run again"
    finally:
        await front.stop()
        for gateway in gateways:
            if gateway.process is not None and gateway.process.returncode is None:
                await kill(gateway)
        await stand.stop_fakes()
