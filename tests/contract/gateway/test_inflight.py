"""Sampling sessions that follow their model (tinker-contract.md, section 4)."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from fovea.api.v1 import gateway_pb2
from fovea.client import GatewayClient
from fovea.wire import tensors
from fovea.wire.errors import SnapshotNotLoaded
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL, FakeSampler
from tests.contract.gateway.requests import Rest
from tests.waiting import eventually


async def save(rest: Rest, model_id: str, seq_id: int, **more: Any) -> dict[str, Any]:
    """Runs an inflight save to its end."""
    body = {"model_id": model_id, "seq_id": seq_id, "sampling_session_seq_id": seq_id, "kind": "inflight"}
    answer = await rest.ok("save_weights_for_sampler", **(body | more))
    return await rest.result(answer["request_id"])


async def inflight(rest: Rest, model_id: str, seq_id: int) -> str:
    return str((await save(rest, model_id, seq_id))["sampling_session_id"])


async def weights_of(rest: Rest, sampling_id: str, seq_id: int) -> list[int]:
    """Samples in a session; returns the snapshot that made the tokens, which the fake encodes in them."""
    params = {"max_tokens": 4, "seed": 1}
    submitted = await rest.sample(sampling_id, seq_id, sampling_params=params)
    tokens: list[int] = (await rest.result(submitted.json()["request_id"]))["sequences"][0]["tokens"]
    return tokens


async def get(stand: Stand, path: str) -> dict[str, Any]:
    """Returns the JSON answer of a route."""
    async with httpx.AsyncClient(base_url=stand.url, headers={"X-API-Key": KEY}) as client:
        answer = await client.get(f"/api/v1/{path}")
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def made_by(snapshot_id: str) -> list[int]:
    return FakeSampler.tokens_of(snapshot_id, 1, 0, 4)


@pytest.mark.parametrize("rank", [8, 0])
async def test_later_saves_move_every_session_forward_and_free_what_they_replace(
    stand: Stand, rest: Rest, rank: int
) -> None:
    model_id = await rest.create_model(rank=rank)
    first = await inflight(rest, model_id, 1)
    fixed = await rest.snapshot(model_id, 2, 50)
    assert await weights_of(rest, first, 0) == made_by(f"{model_id}@1")
    second = await inflight(rest, model_id, 3)
    assert first != second
    for sampling_id in (second, first):
        assert await weights_of(rest, sampling_id, 1) == made_by(f"{model_id}@3")
    assert await weights_of(rest, fixed, 0) == made_by(f"{model_id}@2"), "a snapshot must not change"
    await eventually(lambda: [r.snapshot_id for r in stand.trainer.of("ForgetSnapshot")] == [f"{model_id}@1"])
    if rank:
        assert f"{model_id}@1" not in stand.sampler.adapters
    await stand.stop()
    await stand.start()
    for sampling_id in (second, first):
        assert await weights_of(rest, sampling_id, 2) == made_by(f"{model_id}@3")
    third = await inflight(rest, model_id, 4)
    assert await weights_of(rest, third, 0) == await weights_of(rest, first, 3) == made_by(f"{model_id}@4")
    assert await weights_of(rest, fixed, 1) == made_by(f"{model_id}@2")
    assert stand.gateway is not None
    await stand.gateway.components.sampling.sweep()
    await eventually(lambda: f"{model_id}@3" in [r.snapshot_id for r in stand.trainer.of("ForgetSnapshot")])
    assert set(stand.trainer.snapshots) == {f"{model_id}@2", f"{model_id}@4"}


async def test_weights_stay_until_their_last_sample_has_ended(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    first = await inflight(rest, model_id, 1)
    stand.sampler.open.clear()
    running = (await rest.sample(first, 0)).json()["request_id"]
    await eventually(lambda: stand.sampler.running == 1)
    await inflight(rest, model_id, 2)
    await asyncio.sleep(0.1)
    assert "ForgetSnapshot" not in stand.trainer.names()
    stand.sampler.open.set()
    assert "sequences" in await rest.result(running)
    await eventually(lambda: [r.snapshot_id for r in stand.trainer.of("ForgetSnapshot")] == [f"{model_id}@1"])
    assert {request.snapshot_id for request in stand.sampler.of("Sample")} == {f"{model_id}@1"}


async def test_a_sample_takes_the_newest_weights_when_it_gets_its_place(stand: Stand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(sampler_concurrency=1)
    model_id = await rest.create_model()
    first = await inflight(rest, model_id, 1)
    stand.sampler.open.clear()
    ids = [(await rest.sample(first, seq_id)).json()["request_id"] for seq_id in (0, 1)]
    await eventually(lambda: stand.sampler.running == 1)
    await inflight(rest, model_id, 2)
    stand.sampler.open.set()
    for request_id in ids:
        assert "sequences" in await rest.result(request_id)
    assert [r.snapshot_id for r in stand.sampler.of("Sample")] == [f"{model_id}@1", f"{model_id}@2"]


async def test_a_retry_takes_the_newest_weights_too(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    first = await inflight(rest, model_id, 1)
    stand.sampler.open.clear()
    request_id = (await rest.sample(first, 0)).json()["request_id"]
    await eventually(lambda: stand.sampler.running == 1)
    await inflight(rest, model_id, 2)
    stand.sampler.failures["Sample"] = [SnapshotNotLoaded("evicted")]
    await stand.sampler.stop()
    await stand.sampler.start()
    stand.sampler.open.set()
    assert "sequences" in await rest.result(request_id)
    assert stand.sampler.of("Sample")[-1].snapshot_id == f"{model_id}@2"


async def test_models_do_not_move_each_other_and_a_session_end_frees_all(stand: Stand, rest: Rest) -> None:
    one, two = await rest.create_model(0), await rest.create_model(1)
    of_one = await inflight(rest, one, 1)
    of_two = str((await save(rest, two, 1, sampling_session_seq_id=9))["sampling_session_id"])
    await save(rest, two, 2, sampling_session_seq_id=10)
    assert await weights_of(rest, of_one, 0) == made_by(f"{one}@1")
    assert await weights_of(rest, of_two, 0) == made_by(f"{two}@2")
    await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"})
    await eventually(lambda: not stand.trainer.snapshots)


async def test_wrong_kinds_fail_by_name(rest: Rest) -> None:
    model_id = await rest.create_model()
    bad = await save(rest, model_id, 1, kind="live")
    assert bad["error"] == "kind is 'live'; it must be one of snapshot, inflight"
    named = await save(rest, model_id, 2, sampling_session_seq_id=None, path="x")
    assert "'inflight' stores weights without a name" in named["error"]
    assert bad["category"] == named["category"] == "user"
    assert "sampling_session_id" in await save(rest, model_id, 3)


async def test_sdk_inflight_clients_and_grpc_says_which_weights_made_the_tokens(stand: Stand) -> None:
    def use(client: tinker.ServiceClient) -> tuple[str, list[types.SampleResponse]]:
        training = client.create_lora_training_client(base_model=MODEL).result()
        older = training.save_weights_and_get_sampling_client(kind="inflight").result()
        newer = training.save_weights_and_get_sampling_client(kind="inflight").result()
        params = types.SamplingParams(max_tokens=4, seed=1)
        prompt = types.ModelInput.from_ints([1])
        futures = [sampling.sample(prompt, 1, params) for sampling in (older, newer)]
        return training.model_id, [future.result() for future in futures]

    model_id, responses = await stand.sdk(use)
    for response in responses:
        (sequence,) = response.sequences
        assert list(sequence.tokens) == made_by(f"{model_id}@2")
        # The gateway still answers this after the client has acknowledged its results.
        made = (await get(stand, f"weight_versions/{sequence.sequence_id}"))["weight_versions"]
        assert made == [{"snapshot_id": f"{model_id}@2", "token_count": 4}]

    assert stand.gateway is not None
    async with GatewayClient(f"127.0.0.1:{stand.gateway.grpc.port}", KEY) as client:
        session_id = await client.create_session()
        lora = stand.trainer.of("CreateModel")[0].lora
        model_id = await client.create_model(session_id, 0, MODEL, lora)
        sessions = []
        for seq_id in (1, 2):
            request = gateway_pb2.SubmitSaveForSamplerRequest(model_id=model_id, seq_id=seq_id, inflight=True)
            future = await client._unary(client._stub.SubmitSaveForSampler, request, 30)
            sessions.append((await client.wait(future.future_id)).snapshot_saved.sampling_session_id)
        for sampling_id in sessions:
            sample = gateway_pb2.SampleTokensRequest(sampling_session_id=sampling_id, sample_count=1)
            sample.prompt.chunks.add().tokens.tokens = tensors.encode_tokens([1])
            sample.params.max_tokens = 2
            events = [event async for event in client.sample(sample)]
            made = {event.delta.snapshot_id for event in events if event.WhichOneof("event") == "delta"}
            assert made == {f"{model_id}@2"}


async def test_answers_in_flight_continue_with_newer_full_weights(stand: Stand, rest: Rest) -> None:
    """A save pushes by itself. The trainer keeps no snapshot for an answer that may switch weights; the result names
    the weights of each token.
    """
    model_id = await rest.create_model(rank=0)
    first = await inflight(rest, model_id, 1)
    stand.sampler.open.clear()
    params = {"max_tokens": 4, "seed": 1}
    running = (await rest.sample(first, 0, sampling_params=params)).json()["request_id"]
    await eventually(lambda: stand.sampler.running == 1)
    for number in (2, 3):
        await inflight(rest, model_id, number)
        await eventually(lambda number=number: stand.sampler.resident == f"{model_id}@{number}")
        freed = [f"{model_id}@{one}" for one in range(1, number)]
        await eventually(lambda freed=freed: [r.snapshot_id for r in stand.trainer.of("ForgetSnapshot")] == freed)
    assert stand.sampler.running == 1
    stand.sampler.open.set()
    sequence = (await rest.result(running))["sequences"][0]
    assert sequence["tokens"] == made_by(f"{model_id}@1")[:2] + made_by(f"{model_id}@3")[2:]
    made = (await get(stand, f"weight_versions/{running}:0"))["weight_versions"]
    assert made == [{"snapshot_id": f"{model_id}@{number}", "token_count": 2} for number in (1, 3)]
    assert await weights_of(rest, first, 1) == made_by(f"{model_id}@3")
    assert (await get(stand, f"samplers/{first}"))["snapshot_id"] == f"{model_id}@3"


async def test_a_full_push_waits_for_a_sample_that_names_its_snapshot(stand: Stand, rest: Rest) -> None:
    """Samples that follow the model wait behind it and then use the newest weights."""
    model_id = await rest.create_model(rank=0)
    fixed = await rest.snapshot(model_id, 1, 50)
    stand.sampler.open.clear()
    running = (await rest.sample(fixed, 0)).json()["request_id"]
    await eventually(lambda: stand.sampler.running == 1)
    first = await inflight(rest, model_id, 2)
    waiting = (await rest.sample(first, 0)).json()["request_id"]
    await asyncio.sleep(0.1)
    assert stand.sampler.resident == f"{model_id}@1"
    stand.sampler.open.set()
    for request_id in (running, waiting):
        assert "sequences" in await rest.result(request_id)
    assert [r.snapshot_id for r in stand.sampler.of("Sample")] == [f"{model_id}@1", f"{model_id}@2"]
    assert [r.follow_updates for r in stand.sampler.of("Sample")] == [False, True]


async def test_a_push_that_fails_loses_no_answer(stand: Stand, rest: Rest) -> None:
    """An answer continues with its current weights. One that the sampler aborts starts again with the newest."""
    model_id = await rest.create_model(rank=0)
    first = await inflight(rest, model_id, 1)
    stand.sampler.open.clear()
    ids = [(await rest.sample(first, seq_id)).json()["request_id"] for seq_id in (0, 1)]
    await eventually(lambda: stand.sampler.running == 2)
    stand.trainer.push_failures[stand.sampler.address] = 1
    stand.sampler.failures["Sample"] = []
    await inflight(rest, model_id, 2)
    await eventually(lambda: len(stand.trainer.of("PushSnapshot")) == 2)
    assert stand.sampler.resident == f"{model_id}@1"
    third = (await rest.sample(first, 2)).json()["request_id"]
    await eventually(lambda: stand.sampler.resident == f"{model_id}@2")
    stand.sampler.open.set()
    for request_id in (*ids, third):
        assert "sequences" in await rest.result(request_id)
    assert len(stand.sampler.of("Sample")) == 3, "no sequence may be sampled twice"


async def test_a_sampler_that_dies_between_two_versions_loses_no_answer(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model(rank=0)
    first = await inflight(rest, model_id, 1)
    stand.sampler.open.clear()
    request_id = (await rest.sample(first, 0)).json()["request_id"]
    await eventually(lambda: stand.sampler.running == 1)
    await inflight(rest, model_id, 2)
    await eventually(lambda: stand.sampler.resident == f"{model_id}@2")
    await stand.sampler.stop()
    stand.sampler.restart()
    await stand.sampler.start()
    stand.sampler.open.set()
    assert "sequences" in await rest.result(request_id)
    assert [r.snapshot_id for r in stand.sampler.of("Sample")] == [f"{model_id}@1", f"{model_id}@2"]


async def test_answers_in_all_samplers_continue_with_newer_weights(tmp_path: Path) -> None:
    async with running(Stand(tmp_path, sampler_count=2)) as stand, stand.http() as http:
        rest = Rest(http)
        await rest.open_session()
        model_id = await rest.create_model(rank=0)
        first = await inflight(rest, model_id, 1)
        for sampler in stand.samplers:
            sampler.open.clear()
        params = {"max_tokens": 4, "seed": 1}
        ids = [(await rest.sample(first, number, sampling_params=params)).json()["request_id"] for number in range(24)]
        await eventually(lambda: all(sampler.running for sampler in stand.samplers))
        await eventually(lambda: sum(sampler.running for sampler in stand.samplers) == len(ids))
        await inflight(rest, model_id, 2)
        await eventually(lambda: all(sampler.resident == f"{model_id}@2" for sampler in stand.samplers))
        for sampler in stand.samplers:
            sampler.open.set()
        mixed = made_by(f"{model_id}@1")[:2] + made_by(f"{model_id}@2")[2:]
        for request_id in ids:
            assert (await rest.result(request_id))["sequences"][0]["tokens"] == mixed
