"""Sampling sessions that follow their model (tinker-contract.md, section 4)."""

import asyncio
from typing import Any

import pytest
import tinker
from tinker import types

from fovea.api.v1 import gateway_pb2
from fovea.client import GatewayClient
from fovea.wire import tensors
from fovea.wire.errors import SnapshotNotLoaded
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import MODEL, FakeSampler
from tests.contract.gateway.requests import Rest
from tests.waiting import eventually


async def save(rest: Rest, model_id: str, seq_id: int, **more: Any) -> dict[str, Any]:
    """An inflight save, to its end."""
    body = {"model_id": model_id, "seq_id": seq_id, "sampling_session_seq_id": seq_id, "kind": "inflight"}
    answer = await rest.ok("save_weights_for_sampler", **(body | more))
    return await rest.result(answer["request_id"])


async def inflight(rest: Rest, model_id: str, seq_id: int) -> str:
    return str((await save(rest, model_id, seq_id))["sampling_session_id"])


async def weights_of(rest: Rest, sampling_id: str, seq_id: int) -> list[int]:
    """What a sample of a session yields: the fake's tokens say which snapshot made them."""
    params = {"max_tokens": 4, "seed": 1}
    submitted = await rest.sample(sampling_id, seq_id, sampling_params=params)
    tokens: list[int] = (await rest.result(submitted.json()["request_id"]))["sequences"][0]["tokens"]
    return tokens


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
    assert await weights_of(rest, fixed, 0) == made_by(f"{model_id}@2"), "a snapshot stays what it was"
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
        assert list(response.sequences[0].tokens) == made_by(f"{model_id}@2")

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
