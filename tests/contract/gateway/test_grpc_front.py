"""The gRPC API: the same use cases over a real channel."""

import hashlib
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fovea.api.v1 import gateway_pb2 as pb
from fovea.api.v1 import gateway_pb2_grpc, model_input_pb2, sampler_pb2, trainer_pb2, weights_pb2
from fovea.wire import tensors
from fovea.wire.errors import FoveaError, InvalidInput, NotFound, SessionEnded, Unauthenticated, from_rpc_error
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import MODEL, FakeSampler
from tests.contract.gateway.requests import PNG
from tests.waiting import eventually

KEYED = (("x-api-key", KEY),)
LORA = weights_pb2.LoraConfig(rank=4, alpha=8, train_attention=True, train_vision=True)


@pytest.fixture
async def stub(stand: Stand) -> AsyncIterator[Any]:
    """A stub for the gateway's gRPC port."""
    assert stand.gateway is not None
    async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)


async def wait(stub: Any, future_id: str) -> list[pb.WaitFutureResponse]:
    """Returns all records of a result."""
    while True:
        request = pb.WaitFutureRequest(future_id=future_id, timeout_s=5)
        records = [record async for record in stub.WaitFuture(request, metadata=KEYED)]
        if records[0].WhichOneof("record") != "pending":
            return records


async def failure(call: Any) -> FoveaError:
    """Returns the error that ends a call."""

    async def end() -> None:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await end()
    return from_rpc_error(caught.value)


def text(*ids: int) -> model_input_pb2.Chunk:
    return model_input_pb2.Chunk(tokens=model_input_pb2.TokenChunk(tokens=tensors.encode_tokens(ids)))


def records(model_id: str, seq_id: int, *inputs: list[model_input_pb2.Chunk], loss: str = "cross_entropy") -> Any:
    """Yields the records of a loss stream; every image takes four tokens."""
    header = pb.SubmitForwardBackwardHeader(model_id=model_id, seq_id=seq_id, loss_function=loss, backward=True)

    async def stream() -> AsyncIterator[pb.SubmitForwardBackwardRequest]:
        yield pb.SubmitForwardBackwardRequest(header=header)
        for chunks in inputs:
            length = sum(len(chunk.tokens.tokens) // 4 or 4 for chunk in chunks)
            loss_inputs = {
                "target_tokens": tensors.encode(np.zeros(length, np.int64)),
                "weights": tensors.encode(np.ones(length, np.float32)),
            }
            datum = pb.InputDatum(input=model_input_pb2.ModelInput(chunks=chunks), loss_inputs=loss_inputs)
            yield pb.SubmitForwardBackwardRequest(datum=datum)

    return stream()


async def create(stub: Any) -> tuple[str, str]:
    """Opens a session and creates a model in it."""
    session_id = (await stub.CreateSession(pb.CreateSessionRequest(), metadata=KEYED)).session_id
    request = pb.SubmitCreateModelRequest(session_id=session_id, model_seq_id=0, base_model=MODEL, lora=LORA)
    future_id = (await stub.SubmitCreateModel(request, metadata=KEYED)).future_id
    return session_id, (await wait(stub, future_id))[0].model_created.model_id


async def upload(stub: Any) -> model_input_pb2.Chunk:
    """Uploads an image in two pieces. Returns a chunk with a reference to it."""
    sha256 = hashlib.sha256(PNG).hexdigest()

    async def pieces() -> AsyncIterator[pb.UploadImageRequest]:
        yield pb.UploadImageRequest(sha256=sha256, data=PNG[:10])
        yield pb.UploadImageRequest(data=PNG[10:])

    assert (await stub.UploadImage(pieces(), metadata=KEYED)).size_bytes == len(PNG)
    reference = model_input_pb2.ImageReference(
        sha256=sha256, format=model_input_pb2.IMAGE_FORMAT_PNG, expected_token_count=4
    )
    return model_input_pb2.Chunk(image_reference=reference)


async def test_train_save_and_sample(stand: Stand, stub: Any) -> None:
    session_id, model_id = await create(stub)
    assert model_id == f"{session_id}:train:0"
    assert (await stub.GetModel(pb.GetModelRequest(model_id=model_id), metadata=KEYED)).lora == LORA
    image = await upload(stub)
    submitted = await stub.SubmitForwardBackward(
        records(model_id, 1, [text(1, 2)], [text(1), image, text(2)]), metadata=KEYED
    )
    outputs = await wait(stub, submitted.future_id)
    assert [record.WhichOneof("record") for record in outputs] == ["output", "output", "metrics"]
    assert tensors.decode(outputs[1].output.tensors["logprobs"]).shape == (6,)
    assert outputs[2].metrics.values["loss:sum"] == 8.0
    step = pb.SubmitOptimStepRequest(model_id=model_id, seq_id=2, adam=trainer_pb2.AdamParams(learning_rate=0.1))
    stepped = await wait(stub, (await stub.SubmitOptimStep(step, metadata=KEYED)).future_id)
    assert stepped[0].metrics.values["gradients:sum"] == 2
    state = pb.SubmitSaveStateRequest(model_id=model_id, seq_id=3, name="a")
    path = (await wait(stub, (await stub.SubmitSaveState(state, metadata=KEYED)).future_id))[0].checkpoint_saved.path
    load = pb.SubmitLoadStateRequest(model_id=model_id, seq_id=4, path=path, optimizer=True)
    assert (await wait(stub, (await stub.SubmitLoadState(load, metadata=KEYED)).future_id))[0].state_loaded.step == 1
    save = pb.SubmitSaveForSamplerRequest(model_id=model_id, seq_id=5)
    saved = (await wait(stub, (await stub.SubmitSaveForSampler(save, metadata=KEYED)).future_id))[0].snapshot_saved
    assert (saved.snapshot.snapshot_id, saved.snapshot.step) == (f"{model_id}@1", 1)
    request = pb.SampleTokensRequest(
        sampling_session_id=saved.sampling_session_id,
        prompt=model_input_pb2.ModelInput(chunks=[text(1), image]),
        sample_count=2,
        params=sampler_pb2.SamplingParams(max_tokens=4, seed=5),
    )
    events = [event async for event in stub.SampleTokens(request, metadata=KEYED)]
    assert not stand.sampler.of("Sample")[-1].at_once
    assert events[0].prompt.cached_token_count == 3
    tokens = [b"".join(e.delta.tokens for e in events[1:] if e.delta.index == index) for index in range(2)]
    expected = [FakeSampler.tokens_of(f"{model_id}@1", 5, index, 4) for index in range(2)]
    assert [tensors.decode_tokens(part).tolist() for part in tokens] == expected


async def test_model_from_a_checkpoint(stand: Stand, stub: Any) -> None:
    session_id, model_id = await create(stub)
    state = pb.SubmitSaveStateRequest(model_id=model_id, seq_id=1, name="a")
    path = (await wait(stub, (await stub.SubmitSaveState(state, metadata=KEYED)).future_id))[0].checkpoint_saved.path
    request = pb.SubmitCreateModelRequest(session_id=session_id, model_seq_id=1, base_model=MODEL, from_path=path)
    created = await wait(stub, (await stub.SubmitCreateModel(request, metadata=KEYED)).future_id)
    assert created[0].model_created.model_id == f"{session_id}:train:1"
    assert created[1].state_loaded.path == path
    model = await stub.GetModel(pb.GetModelRequest(model_id=f"{session_id}:train:1"), metadata=KEYED)
    assert model.lora == LORA


async def test_errors_are_statuses_with_reasons(stand: Stand, stub: Any) -> None:
    session_id, model_id = await create(stub)
    assert isinstance(await failure(stub.GetCapabilities(pb.GetCapabilitiesRequest())), Unauthenticated)
    wrong = stub.GetCapabilities(pb.GetCapabilitiesRequest(), metadata=(("x-api-key", "tml-no"),))
    assert isinstance(await failure(wrong), Unauthenticated)
    nobody = stub.GetModel(pb.GetModelRequest(model_id="no"), metadata=KEYED)
    assert isinstance(await failure(nobody), NotFound)
    submitted = await stub.SubmitForwardBackward(records(model_id, 1, [text(1)], loss="no"), metadata=KEYED)
    request = pb.WaitFutureRequest(future_id=submitted.future_id, timeout_s=5)
    error = await failure(stub.WaitFuture(request, metadata=KEYED))
    assert isinstance(error, InvalidInput)
    assert error.field == "loss_function"

    async def headless() -> AsyncIterator[pb.SubmitForwardBackwardRequest]:
        yield pb.SubmitForwardBackwardRequest(datum=pb.InputDatum())

    assert isinstance(await failure(stub.SubmitForwardBackward(headless(), metadata=KEYED)), InvalidInput)
    missing = model_input_pb2.ImageReference(sha256="0" * 64, format=model_input_pb2.IMAGE_FORMAT_PNG)
    image = model_input_pb2.Chunk(image_reference=missing)
    call = stub.SubmitForwardBackward(records(model_id, 2, [text(1), image]), metadata=KEYED)
    error = await failure(call)
    assert "call UploadImage" in error.message
    await stub.FinishSession(pb.FinishSessionRequest(session_id=session_id), metadata=KEYED)
    error = await failure(stub.Heartbeat(pb.HeartbeatRequest(session_id=session_id), metadata=KEYED))
    assert isinstance(error, SessionEnded)


async def test_errors_name_the_fields_of_the_protos(stand: Stand, stub: Any) -> None:
    """Errors of submissions, futures and streams name proto fields; REST has different names."""
    session_id, model_id = await create(stub)

    async def failed(submitted: Any) -> FoveaError:
        future_id = (await submitted).future_id
        return await failure(stub.WaitFuture(pb.WaitFutureRequest(future_id=future_id, timeout_s=5), metadata=KEYED))

    def model(number: int, **changes: Any) -> Any:
        request = pb.SubmitCreateModelRequest(session_id=session_id, model_seq_id=number, base_model=MODEL, **changes)
        return stub.SubmitCreateModel(request, metadata=KEYED)

    def named(error: FoveaError, field: str, words: str) -> None:
        assert (error.field, words in error.message) == (field, True), error.message
        assert not re.search(r"_fn|lora_config|model_input|num_samples|ttl_seconds", error.message)

    named(await failed(model(1)), "lora", "lora is missing; rank 0")
    named(await failed(model(2, lora=weights_pb2.LoraConfig(rank=-1))), "lora.rank", "lora.rank is -1; it must be")
    named(
        await failed(model(3, lora=weights_pb2.LoraConfig(rank=4))), "lora", "train_unembedding, train_mlp and train_at"
    )
    named(await failed(model(4, from_path="x")), "from_path", "from_path 'x' is not a checkpoint")
    losses = stub.SubmitForwardBackward
    named(await failed(losses(records(model_id, 1), metadata=KEYED)), "datum", "datum is empty; send")
    empty = losses(records(model_id, 2, [text(1)], []), metadata=KEYED)
    named(await failed(empty), "datum[1].input", "datum[1].input has no tokens")
    custom = losses(records(model_id, 3, [text(1)], loss="custom"), metadata=KEYED)
    named(await failed(custom), "custom_loss_id", "custom_loss_id is missing: loss_function 'custom' needs")
    save = pb.SubmitSaveStateRequest(model_id=model_id, seq_id=4, name=".")
    named(await failed(stub.SubmitSaveState(save, metadata=KEYED)), "name", "name '.' is not a name")
    save = pb.SubmitSaveStateRequest(model_id=model_id, seq_id=5, name="a", ttl_s=5)
    named(await failed(stub.SubmitSaveState(save, metadata=KEYED)), "ttl_s", "ttl_s is 5; it must be")
    wait_for = stub.WaitFuture(pb.WaitFutureRequest(future_id="no"), metadata=KEYED)
    named(await failure(wait_for), "future_id", "there is no request 'no'")
    request = pb.CreateSamplingSessionRequest(session_id=session_id, sampling_session_seq_id=0, base_model=MODEL)
    sampling_id = (await stub.CreateSamplingSession(request, metadata=KEYED)).sampling_session_id
    prompt = model_input_pb2.ModelInput(chunks=[text(1)])
    none = pb.SampleTokensRequest(sampling_session_id=sampling_id, prompt=prompt, sample_count=0)
    named(await failure(stub.SampleTokens(none, metadata=KEYED)), "sample_count", "sample_count is 0; it must be")
    recorded = pb.SampleTokensRequest(sampling_session_id=sampling_id, prompt=prompt, record_stability_info=True)
    words = "record_stability_info needs the future of a sample"
    named(await failure(stub.SampleTokens(recorded, metadata=KEYED)), "record_stability_info", words)


async def test_leaving_a_stream_frees_the_sampler(stand: Stand, stub: Any) -> None:
    session_id, _ = await create(stub)
    request = pb.CreateSamplingSessionRequest(session_id=session_id, sampling_session_seq_id=0, base_model=MODEL)
    sampling_id = (await stub.CreateSamplingSession(request, metadata=KEYED)).sampling_session_id
    stand.sampler.open.clear()
    prompt = model_input_pb2.ModelInput(chunks=[text(1)])
    sample = pb.SampleTokensRequest(sampling_session_id=sampling_id, prompt=prompt, sample_count=1)
    call = stub.SampleTokens(sample, metadata=KEYED)
    await eventually(lambda: stand.sampler.running == 1)
    call.cancel()
    await eventually(lambda: stand.sampler.running == 0)
    assert stand.sampler.cancelled == 1


async def test_unfinished_future_answers_pending_with_a_reason(stand: Stand, stub: Any) -> None:
    _, model_id = await create(stub)
    stand.trainer.open.clear()
    submitted = await stub.SubmitForwardBackward(records(model_id, 1, [text(1)]), metadata=KEYED)
    request = pb.WaitFutureRequest(future_id=submitted.future_id, timeout_s=0.2)
    answer = [record async for record in stub.WaitFuture(request, metadata=KEYED)]
    assert "trainer" in answer[0].pending.reason
    stand.trainer.open.set()


async def test_health_and_capabilities(stand: Stand, stub: Any) -> None:
    assert stand.gateway is not None
    async with grpc.aio.insecure_channel(stand.gateway.grpc.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def is_serving() -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(service="fovea.api.v1.GatewayService"))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        await eventually(is_serving)
    models = (await stub.GetCapabilities(pb.GetCapabilitiesRequest(), metadata=KEYED)).models
    assert [(m.name, m.max_context_length, m.supports_images, m.max_lora_rank) for m in models] == [
        (MODEL, 2048, True, 64)
    ]
