"""Isolation of two owners: the work of one neither shows in the other's answers nor starves it."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from fovea.api.v1 import gateway_pb2 as pb
from fovea.api.v1 import gateway_pb2_grpc, model_input_pb2, sampler_pb2
from fovea.wire.errors import FoveaError, InvalidInput, ResourceExhausted, from_rpc_error
from fovea.wire.tensors import encode_tokens
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import PNG, Rest, image_datum, text_datum
from tests.waiting import eventually

ALICE, BOB = "tml-alice", "tml-bob"


@pytest.fixture
async def stand(tmp_path: Path, database_url: str) -> AsyncIterator[Stand]:
    """A gateway with keys of two owners and few places for their requests."""
    keys = [f"alice={ALICE}", f"bob={BOB}"]
    settings = {"api_key": keys, "max_pending": 20, "max_sessions": 8, "sampler_concurrency": 1}
    async with running(Stand(tmp_path), database_url=database_url, **settings) as stand:
        yield stand


@pytest.fixture
async def alice(stand: Stand) -> AsyncIterator[Rest]:
    async with stand.http(ALICE) as http:
        yield await _with_session(http)


@pytest.fixture
async def bob(stand: Stand) -> AsyncIterator[Rest]:
    async with stand.http(BOB) as http:
        yield await _with_session(http)


@pytest.fixture
async def stub(stand: Stand) -> AsyncIterator[Any]:
    assert stand.gateway is not None
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stand.gateway.grpc.port}") as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)


async def _with_session(http: httpx.AsyncClient) -> Rest:
    rest = Rest(http)
    await rest.open_session()
    return rest


async def base_session(rest: Rest, number: int = 0) -> str:
    answer = await rest.ok(
        "create_sampling_session", session_id=rest.session_id, sampling_session_seq_id=number, base_model=MODEL
    )
    return str(answer["sampling_session_id"])


def keyed(key: str) -> tuple[tuple[str, str], ...]:
    return (("x-api-key", key),)


def sample_request(session: str, *chunks: model_input_pb2.Chunk) -> pb.SampleTokensRequest:
    text = model_input_pb2.Chunk(tokens=model_input_pb2.TokenChunk(tokens=encode_tokens([1, 2, 3])))
    return pb.SampleTokensRequest(
        sampling_session_id=session,
        prompt=model_input_pb2.ModelInput(chunks=[text, *chunks]),
        sample_count=1,
        params=sampler_pb2.SamplingParams(max_tokens=2, seed=1),
    )


def waits_for(stand: Stand, request_id: str) -> str:
    """Returns the reason that an unfinished request waits, as text."""
    assert stand.gateway is not None
    unfinished = stand.gateway.components.futures.unfinished()
    return next(each.progress.waiting_for for each in unfinished if each.submission.future_id == request_id)


async def told(call: Any) -> FoveaError:
    """Returns the error that ends a stream."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


async def test_an_image_of_another_owner_looks_unknown(stand: Stand, alice: Rest, bob: Rest, stub: Any) -> None:
    sha256 = hashlib.sha256(PNG).hexdigest()

    async def pieces() -> AsyncIterator[pb.UploadImageRequest]:
        yield pb.UploadImageRequest(sha256=sha256, data=PNG)

    await stub.UploadImage(pieces(), metadata=keyed(ALICE))

    def naming(digest: str) -> model_input_pb2.Chunk:
        reference = model_input_pb2.ImageReference(sha256=digest, format=model_input_pb2.IMAGE_FORMAT_PNG)
        return model_input_pb2.Chunk(image_reference=reference)

    hers, his = await base_session(alice), await base_session(bob)
    events = [event async for event in stub.SampleTokens(sample_request(hers, naming(sha256)), metadata=keyed(ALICE))]
    assert events
    calls = len(stand.renderer.calls)
    answers = []
    for digest in (sha256, "0" * 64):
        error = await told(stub.SampleTokens(sample_request(his, naming(digest)), metadata=keyed(BOB)))
        answers.append((type(error), error.message.replace(digest, "DIGEST"), error.field, error.metadata))
    assert answers[0] == answers[1]
    assert len(stand.renderer.calls) == calls, "no service may be called"


async def test_cached_prompts_are_an_owners_own(stand: Stand, alice: Rest, bob: Rest, stub: Any) -> None:
    for rest, key in ((alice, ALICE), (bob, BOB)):
        session = await base_session(rest)
        for seq_id, more in enumerate(({}, {"prompt_logprobs": True}, {"topk_prompt_logprobs": 2})):
            await rest.result((await rest.sample(session, seq_id, **more)).json()["request_id"])
        [event async for event in stub.SampleTokens(sample_request(session), metadata=keyed(key))]
    salts = [request.cache_salt for request in stand.sampler.of("Sample")]
    assert len(set(salts[:4])) == len(set(salts[4:])) == 1
    assert len(set(salts)) == 2
    assert all(salts)
    assert not any(key in salt for salt in salts for key in (ALICE, BOB))


async def test_commands_behind_a_missing_one_stop_no_other_model(alice: Rest, bob: Rest) -> None:
    model_id = await alice.create_model()
    adam = {"adam_params": {}, "type": "optim_step"}
    answers = [await alice.post("optim_step", model_id=model_id, seq_id=seq_id, **adam) for seq_id in range(2, 42)]
    held = [answer.json()["request_id"] for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(held) == 10
    assert {(answer.status_code, answer.json()["reason"]) for answer in refused} == {(429, "RESOURCE_EXHAUSTED")}
    assert "max_pending 20" in refused[0].json()["detail"]
    assert (await alice.sample(await base_session(alice), 0)).status_code == 429, (
        "all requests of this owner must count together"
    )
    session = await base_session(bob)
    for seq_id in range(3):
        assert "sequences" in await bob.result((await bob.sample(session, seq_id)).json()["request_id"])
    await bob.result((await bob.optim_step(await bob.create_model(), 1))["request_id"])
    # Requests that all others wait for are never refused; otherwise none would ever end.
    first = await alice.optim_step(model_id, 1)
    for request_id in (first["request_id"], *held):
        assert "metrics" in await alice.result(request_id)
    assert "metrics" in await alice.result((await alice.optim_step(model_id, 12))["request_id"])


async def test_streams_count_as_well(stand: Stand, alice: Rest, bob: Rest, stub: Any) -> None:
    stand.sampler.open.clear()
    session = await base_session(alice)
    calls = [stub.SampleTokens(sample_request(session), metadata=keyed(ALICE)) for _ in range(10)]
    assert stand.gateway is not None
    (sampler,) = stand.gateway.components.base_models.default.samplers.members
    await eventually(lambda: sampler.queued == 10)
    error = await told(stub.SampleTokens(sample_request(session), metadata=keyed(ALICE)))
    assert isinstance(error, ResourceExhausted)
    assert error.metadata["limit"] == "max_pending"
    answer = await bob.sample(await base_session(bob), 0)
    for call in calls:
        call.cancel()
    await eventually(lambda: sampler.queued <= 1)
    stand.sampler.open.set()
    assert "sequences" in await bob.result(answer.json()["request_id"])
    assert "sequences" in await alice.result((await alice.sample(session, 0)).json()["request_id"]), (
        "the owner's share must be free"
    )


async def test_owners_are_served_by_turns(stand: Stand, alice: Rest, bob: Rest) -> None:
    stand.sampler.open.clear()
    hers, his = await base_session(alice), await base_session(bob)
    ids = [(await alice.sample(hers, seq_id)).json()["request_id"] for seq_id in range(9)]
    await eventually(lambda: stand.sampler.running == 1)
    last = (await bob.sample(his, 0)).json()["request_id"]
    assert stand.gateway is not None
    (sampler,) = stand.gateway.components.base_models.default.samplers.members
    await eventually(lambda: sampler.waiting == 9)
    stand.sampler.open.set()
    for request_id in ids:
        await alice.result(request_id)
    await bob.result(last)
    begun = [request.request_id for request in stand.sampler.of("Sample")]
    assert begun == [ids[0], last, *ids[1:]], "the last request waits for the running one, not for nine"


@pytest.mark.parametrize(("settings", "requests"), [({}, 2), ({"sampler_beside": 6}, 3)])
async def test_a_sampler_gets_a_quarter_of_its_batch_beside_an_interactive_owner(
    stand: Stand, alice: Rest, bob: Rest, settings: dict[str, int], requests: int
) -> None:
    stand.sampler.max_sequences = 16
    await stand.stop()
    await stand.start(sampler_concurrency=1024, **settings)
    stand.sampler.open.clear()
    hers, his = await base_session(alice), await base_session(bob)
    await bob.sample(his, 0)
    await eventually(lambda: stand.sampler.running == 1)
    ids = [(await alice.sample(hers, seq_id, num_samples=2)).json()["request_id"] for seq_id in range(9)]
    assert stand.gateway is not None
    (sampler,) = stand.gateway.components.base_models.default.samplers.members
    await eventually(lambda: sampler.waiting == 9 - requests)
    await eventually(lambda: stand.sampler.running == 1 + requests)
    stand.sampler.open.set()
    for request_id in ids:
        assert len((await alice.result(request_id))["sequences"]) == 2


async def test_a_request_that_waits_for_a_sampler_gets_the_reason(stand: Stand, alice: Rest, bob: Rest) -> None:
    await stand.stop()
    await stand.start(poll_hold_s=0.01)
    stand.sampler.open.clear()
    hers, his = await base_session(alice), await base_session(bob)
    ids = [(await alice.sample(hers, seq_id)).json()["request_id"] for seq_id in range(3)]
    await eventually(lambda: stand.sampler.running == 1)
    last = (await bob.sample(his, 0)).json()["request_id"]
    assert stand.gateway is not None
    (sampler,) = stand.gateway.components.base_models.default.samplers.members
    await eventually(lambda: sampler.waiting == 3)
    told = [(await rest.poll(request_id)).json() for rest, request_id in ((alice, ids[2]), (bob, last))]
    assert [answer["queue_state"] for answer in told] == ["paused_capacity"] * 2
    words = (
        "waiting for a place in a sampler: it is at most number {0} of the {0} requests that this owner has waiting, "
        "taking turns"
    )
    reasons = [answer["queue_state_reason"] for answer in told]
    assert reasons == [f"{words.format(count)} with 1 other owner" for count in (2, 1)]
    stand.sampler.open.set()


async def test_owners_share_the_trainer_and_are_told_why_they_wait(stand: Stand, alice: Rest, bob: Rest) -> None:
    await stand.stop()
    await stand.start(poll_hold_s=0.01, max_pending=100)
    flood = [await alice.create_model(number) for number in range(6)]
    quiet = await bob.create_model()
    stand.trainer.open.clear()
    hers = [(await alice.forward_backward(model_id, 1)).json()["request_id"] for model_id in flood]
    await eventually(lambda: stand.trainer.waiting == 1)
    his = (await bob.forward_backward(quiet, 1)).json()["request_id"]

    async def told() -> dict[str, Any]:
        answer: dict[str, Any] = (await bob.poll(his)).json()
        return answer

    async def is_told() -> bool:
        return str((await told())["queue_state_reason"]).startswith("waiting for the trainer: it is at most number 1")

    await eventually(is_told)
    assert (await told())["queue_state"] == "paused_capacity"
    stand.trainer.open.set()
    for rest, ids in ((alice, hers), (bob, [his])):
        for request_id in ids:
            assert "metrics" in await rest.result(request_id)
    begun = [header.model_id for header, _ in stand.trainer.of("ForwardBackward")]
    assert begun.index(quiet) == 1, (
        "one request of the other owner was ahead; this one is next, before the five that she queued"
    )


async def test_owners_share_the_trainer_by_seconds_also_of_work_that_fails(
    stand: Stand, alice: Rest, bob: Rest
) -> None:
    await stand.stop()
    await stand.start(max_pending=1000)
    slow, quick = [await alice.create_model(number) for number in range(4)], await bob.create_model()
    begun: list[str] = []

    async def note(name: str, request: Any) -> None:
        if name == "ForwardBackward":
            begun.append(request[0].model_id)
            if request[0].model_id in slow:
                await asyncio.sleep(0.2)  # long compared with the time of his next request
                raise InvalidInput("this loss exceeds its time")

    stand.trainer.note = note  # type: ignore[method-assign]
    for number in range(1, 31):
        for model_id in slow:
            await alice.forward_backward(model_id, number, data=[text_datum(2)])
    for number in range(1, 6):
        answer = await bob.forward_backward(quick, number, data=[text_datum(256)])
        assert "metrics" in await bob.result(answer.json()["request_id"])
    places = [place for place, model_id in enumerate(begun) if model_id == quick]
    assert places[-1] - places[0] <= 3 * (len(places) - 1), (
        "at most two requests of the first owner run between two of the second, however small"
    )


@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler", "load_weights", "create_model"])
async def test_every_command_takes_a_turn(stand: Stand, alice: Rest, bob: Rest, kind: str) -> None:
    await stand.stop()
    await stand.start(max_pending=100)
    models, quiet = [await alice.create_model(number) for number in range(6)], await bob.create_model()
    bodies: list[dict[str, Any]] = [{"model_id": model_id, "seq_id": 2, "path": "x"} for model_id in models]
    saved = await alice.ok("save_weights", model_id=models[0], seq_id=1, path="old", type="save_weights")
    path = (await alice.result(saved["request_id"]))["path"]
    for model_id in models[1:]:
        await alice.result((await alice.forward_backward(model_id, 1)).json()["request_id"])
    if kind == "create_model":
        lora = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}
        bodies = [
            {"session_id": alice.session_id, "model_seq_id": number, "base_model": MODEL, "lora_config": lora}
            for number in range(10, 16)
        ]
    elif kind == "load_weights":
        bodies = [body | {"path": path, "optimizer": True} for body in bodies]
    stand.trainer.calls.clear()
    stand.trainer.open.clear()
    hers = [(await alice.ok(kind, **body))["request_id"] for body in bodies]
    await eventually(lambda: stand.trainer.waiting > 0)
    if kind.startswith("save"):  # Saves share the storage with each other; a forward_backward does not wait for them.
        his = (await bob.ok(kind, model_id=quiet, seq_id=1, path="y"))["request_id"]
        await eventually(lambda: waits_for(stand, his).startswith("waiting to save"))
    else:
        his = (await bob.forward_backward(quiet, 1)).json()["request_id"]
        await eventually(lambda: waits_for(stand, his).startswith("waiting for the trainer"))
    stand.trainer.open.set()
    for rest, ids in ((alice, hers), (bob, [his])):
        for request_id in ids:
            assert "error" not in await rest.result(request_id)
    served = [getattr(request, "model_id", "") or request[0].model_id for _, request in stand.trainer.calls]
    assert served.index(quiet) <= 2, "at most two requests of the first owner were ahead; the second owner's is next"


@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler"])
async def test_saves_delay_no_step(stand: Stand, alice: Rest, bob: Rest, kind: str) -> None:
    hers, his = await alice.create_model(), await bob.create_model()
    stand.trainer.gated = {"SaveState" if kind == "save_weights" else "TakeSnapshot"}
    stand.trainer.open.clear()
    saved = await alice.ok(kind, model_id=hers, seq_id=1, path="x")
    await eventually(lambda: stand.trainer.waiting > 0)
    assert "metrics" in await bob.result((await bob.forward_backward(his, 1)).json()["request_id"])
    stand.trainer.open.set()
    assert "path" in await alice.result(saved["request_id"])


async def test_requests_of_a_killed_client_yield_and_wait_for_its_return(stand: Stand, alice: Rest) -> None:
    await stand.stop()
    await stand.start(max_pending=100, quiet_s=600, poll_hold_s=0.05, trainer_concurrency=1)
    models = [await alice.create_model(number) for number in range(6)]
    sampling = await base_session(alice)
    stand.trainer.open.clear()
    stand.sampler.open.clear()
    trained = [(await alice.forward_backward(model_id, 1)).json()["request_id"] for model_id in models]
    sampled = [(await alice.sample(sampling, seq_id)).json()["request_id"] for seq_id in range(6)]
    await eventually(lambda: (stand.trainer.waiting, stand.sampler.waiting) == (1, 1))
    stand.silence(alice.session_id, 601)
    async with stand.http(ALICE) as http:
        other = await _with_session(http)
        body = {"session_id": other.session_id, "base_model": MODEL, "lora_config": {"rank": 8}}
        created = await other.ok("create_model", model_seq_id=0, **body)
        session = await base_session(other)
        creating = asyncio.create_task(other.result(created["request_id"]))
        await eventually(lambda: waits_for(stand, created["request_id"]).startswith("waiting for the trainer"))
        sample = (await other.sample(session, 0)).json()["request_id"]
        await eventually(lambda: waits_for(stand, sample).startswith("waiting for a place"))
        stand.trainer.open.set()
        stand.sampler.open.set()
        assert "error" not in await creating
        assert created["model_id"] in stand.trainer.models
        assert "sequences" in await other.result(sample)
    assert stand.sampler.ids().index(sample) == 1, (
        "one request of the killed client was ahead; the other client's is next"
    )
    names = stand.trainer.names()
    assert names[names.index("ForwardBackward") + 1] == "CreateModel", "one request of the killed client was ahead"
    for request_id in [*trained, *sampled]:
        assert "error" not in await alice.result(request_id), "a returning client must find all requests that it sent"


async def test_an_owner_has_a_share_of_the_sessions(stand: Stand, alice: Rest, bob: Rest) -> None:
    body = {"tags": [], "sdk_version": "0.38.0"}
    opened = []
    while (answer := await alice.post("create_session", **body)).status_code == 200:
        opened.append(answer.json()["session_id"])
        assert len(opened) < 8
    assert answer.status_code == 429
    assert "max_sessions 8" in answer.json()["detail"]
    await bob.open_session()
    await stand.stop()
    await stand.start()
    assert (await alice.post("create_session", **body)).status_code == 429, "a restart must change nothing"
    for session_id in opened[:2]:
        await alice.ok(f"sessions/{session_id}/finish", reason={"type": "success"})
    await alice.open_session()


async def test_an_owner_has_as_many_models_as_it_may(stand: Stand, alice: Rest, bob: Rest) -> None:
    await stand.stop()
    await stand.start(max_models_per_owner=2)
    lora = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}
    bodies = [{"session_id": alice.session_id, "model_seq_id": number, "base_model": MODEL} for number in range(4)]
    answers = [await alice.ok("create_model", lora_config=lora, **body) for body in bodies]
    results = [await alice.result(answer["request_id"]) for answer in answers]
    assert sorted("model_id" in result for result in results) == [False, False, True, True]
    refusals = [result["error"] for result in results if "model_id" not in result]
    advice = f"(fovea sessions end ID): {alice.session_id}"
    assert all("max_models_per_owner is 2" in one and advice in one for one in refusals)
    await bob.create_model()
    await alice.ok(f"sessions/{alice.session_id}/finish", reason={"type": "success"})
    await alice.open_session()
    await alice.create_model()


async def test_batches_rendered_ahead_count_per_owner(stand: Stand, alice: Rest, bob: Rest) -> None:
    async def hold(rest: Rest, count: int) -> None:
        model_id, before = await rest.create_model(), len(stand.renderer.of("Render"))
        for seq_id in range(2, 2 + count):  # the first request never arrives
            assert (await rest.forward_backward(model_id, seq_id, data=[image_datum()])).status_code == 200
        await eventually(lambda: len(stand.renderer.of("Render")) == before + count)

    await hold(alice, 8)
    await hold(bob, 1)
