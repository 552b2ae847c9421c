"""The servicer behind a real gRPC server, with an engine without a model."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import grpc
import numpy as np
import pytest

import fovea
from fovea.api.v1 import model_input_pb2, renderer_pb2, renderer_pb2_grpc, sampler_pb2, sampler_pb2_grpc, weights_pb2
from fovea.client.inference import SamplerClient
from fovea.runtime import tracing
from fovea.runtime.server import ErrorInterceptor
from fovea.wire import tensors
from fovea.wire.errors import (
    FeatureEvicted,
    InvalidInput,
    NotFinite,
    ResourceExhausted,
    SnapshotNotLoaded,
    Unavailable,
)
from fovea.wire.tensors import iter_pieces, size_bytes, tensors_sha256
from fovea_sampler.engine_api import Limits
from fovea_sampler.generation import Generation, ImageFetcher
from fovea_sampler.pushes import SnapshotPushes
from fovea_sampler.sampler_servicer import EngineInfo, SamplerService
from fovea_sampler.weight_store import AdapterCache, SlotQueue, WeightStore
from tests.otlp_collector import Collector, attributes
from tests.unit.sampler.memory_engine import MemoryEngine, eventually
from tests.vision_families import IMAGE, small_qwen3_vl

MAX_REQUESTS = 3


class OneImage(renderer_pb2_grpc.RendererServiceServicer):
    """Holds one image and counts the requests for it."""

    def __init__(self) -> None:
        grid = np.asarray([[1, 4, 4]], dtype=np.int64)
        self.tensors = {"pixel_values": np.arange(384, dtype=np.uint8).reshape(16, 24), "image_grid_thw": grid}
        self.digest = hashlib.sha256(b"one").hexdigest()
        self.fetch_count = 0

    async def FetchFeatures(  # noqa: N802
        self, request: renderer_pb2.FetchFeaturesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[renderer_pb2.FetchFeaturesResponse]:
        """See renderer.proto."""
        self.fetch_count += 1
        if list(request.digests) != [self.digest]:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not held")
        for piece in iter_pieces(self.digest, self.tensors):
            yield piece

    def feature(self, source: str) -> model_input_pb2.VisionFeature:
        """Returns the image's features."""
        return model_input_pb2.VisionFeature(
            digest=self.digest,
            token_count=4,
            size_bytes=size_bytes(self.tensors),
            source=source,
            tensors_sha256=tensors_sha256(self.tensors),
        )


class CountingAnswers:
    """Plans one sequence, and answers with the number of received events."""

    async def answer(
        self, asked: sampler_pb2.OpenAIRequest, sampled: AsyncIterator[sampler_pb2.SampledEvent], most_samples: int
    ) -> AsyncGenerator[sampler_pb2.OpenAIPlan | bytes]:
        yield sampler_pb2.OpenAIPlan(sample_count=most_samples)
        count = 0
        async for one in sampled:
            count += 1
            if one.event.delta.finish_reason:
                yield b"%d of " % count + asked.body
                return


@dataclass
class Served:
    """A sampler that serves over gRPC."""

    engine: MemoryEngine
    service: SamplerService
    client: SamplerClient
    renderer: OneImage
    address: str


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A sampler and a renderer on one free port."""
    engine, renderer = MemoryEngine(), OneImage()
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    images = ImageFetcher(small_qwen3_vl(), 1 << 20, default_source=address)
    weights = WeightStore(engine, AdapterCache(2, 1000), SlotQueue(8, 64, 512, 64))
    limits = Limits(100, 50, 4, 5, 2, 8)
    facts = EngineInfo("model", "instance", "float32", 64, "gloo", 1, limits, 8, 9 << 20, 64)
    generation = Generation(engine, weights, images, MAX_REQUESTS)
    pushes = SnapshotPushes(engine, weights)
    service = SamplerService(facts, small_qwen3_vl(), generation, weights, pushes, CountingAnswers())
    service.set_ready(True)
    sampler_pb2_grpc.add_SamplerServiceServicer_to_server(service, server)
    renderer_pb2_grpc.add_RendererServiceServicer_to_server(renderer, server)
    await server.start()
    async with SamplerClient(address) as client:
        yield Served(engine, service, client, renderer, address)
    await images.close()
    await server.stop(None)


def request(max_tokens: int = 3, sample_count: int = 1, snapshot_id: str = "") -> sampler_pb2.SampleRequest:
    """Returns a text request."""
    result = sampler_pb2.SampleRequest(request_id="r", sample_count=sample_count, snapshot_id=snapshot_id)
    result.prompt.tokens = tensors.encode_tokens([10, 20])
    result.params.max_tokens = max_tokens
    return result


def image_request(feature: model_input_pb2.VisionFeature) -> sampler_pb2.SampleRequest:
    """Returns an image request."""
    result = request()
    result.prompt.tokens = tensors.encode_tokens([10, IMAGE, IMAGE, IMAGE, IMAGE])
    result.prompt.spans.add(offset=1, length=4, feature=feature)
    return result


async def events(served: Served, wanted: sampler_pb2.SampleRequest) -> list[sampler_pb2.SampleResponse]:
    """Returns all events of the stream."""
    return [event async for event in served.client.sample(wanted, timeout_s=20)]


async def test_events(served: Served) -> None:
    first, *deltas = await events(served, request(sample_count=2))
    assert np.isnan(tensors.decode_floats(first.prompt.logprobs)).all()
    for index in range(2):
        mine = [event.delta for event in deltas if event.delta.index == index]
        assert [tensors.decode_tokens(delta.tokens)[0] for delta in mine] == [10 + index, 20 + index, 10 + index]
        assert [delta.finish_reason for delta in mine] == [0, 0, sampler_pb2.FINISH_REASON_LENGTH]


async def test_the_engine_goes_on_in_the_callers_trace(served: Served) -> None:
    with Collector() as collector:
        tracing.configure("fovea-test", collector.url)
        with tracing.span("caller"):
            await events(served, request(sample_count=2))
        await asyncio.to_thread(tracing.shutdown)
    call = collector.one("fovea.api.v1.SamplerService/Sample")
    assert call.parent_span_id == collector.one("caller").span_id
    engines = {attributes(span)["sequence"]: span.parent_span_id for span in collector.named("engine")}
    assert engines == {0: call.span_id, 1: call.span_id}


async def test_prompt_options(served: Served) -> None:
    wanted = request()
    wanted.target_tokens.token_ids.CopyFrom(tensors.encode(np.asarray([5, 7], np.int32)))
    wanted.target_tokens.row_offsets.CopyFrom(tensors.encode(np.asarray([0, 2], np.int64)))
    wanted.alt_token_count = 3
    first, *_ = await events(served, wanted)
    assert tensors.decode_floats(first.prompt.target_logprobs).tolist() == [-5.0, -7.0]
    ids, logprobs = (
        tensors.decode(tensor) for tensor in (first.prompt.alt_tokens.token_ids, first.prompt.alt_tokens.logprobs)
    )
    assert (ids.dtype, ids.tolist()) == (np.int32, [[0, 0, 0]])
    assert (logprobs.dtype, logprobs.shape) == (np.float32, (1, 3))
    first, *_ = await events(served, request())
    assert not first.prompt.target_logprobs
    assert not first.prompt.HasField("alt_tokens")


async def test_info(served: Served) -> None:
    info = await served.client.info()
    assert info.version == fovea.__version__
    assert (info.model, info.instance_id, info.max_context_length) == ("model", "instance", 50)
    assert info.transfer_backend == "gloo"
    assert (info.max_batched_adapters, info.adapter_memory_bytes) == (8, 9 << 20)


async def test_before_it_is_ready(served: Served) -> None:
    served.service.set_ready(False)
    with pytest.raises(Unavailable, match="not serving"):
        await events(served, request())
    assert (await served.client.info()).instance_id == "instance"


async def test_errors_keep_their_class_and_field(served: Served) -> None:
    with pytest.raises(InvalidInput) as invalid:
        await events(served, request(sample_count=9))
    assert invalid.value.field == "sample_count"
    with pytest.raises(SnapshotNotLoaded) as missing:
        await events(served, request(snapshot_id="m@1"))
    assert missing.value.metadata["snapshot_id"] == "m@1"


async def test_cancelling_closes_the_engines_generators(served: Served) -> None:
    served.engine.step.clear()
    drawing = asyncio.create_task(events(served, request(max_tokens=40, sample_count=4)))
    await eventually(lambda: served.engine.running == 4)
    drawing.cancel()
    await eventually(lambda: not served.engine.running)
    served.engine.step.set()
    assert len(await events(served, request())) == 4


async def test_too_many_requests(served: Served) -> None:
    served.engine.step.clear()
    waiting = [asyncio.create_task(events(served, request())) for _ in range(MAX_REQUESTS)]
    await eventually(lambda: served.engine.running == MAX_REQUESTS)
    with pytest.raises(ResourceExhausted):
        await events(served, request())
    served.engine.step.set()
    assert all(len(answer) == 4 for answer in await asyncio.gather(*waiting))
    await events(served, request())


async def test_images_are_fetched_once_by_many_at_once(served: Served) -> None:
    wanted = image_request(served.renderer.feature(""))  # without a source, which means the default renderer
    await asyncio.gather(*(events(served, wanted) for _ in range(MAX_REQUESTS)))
    assert served.renderer.fetch_count == 1


async def test_an_evicted_image(served: Served) -> None:
    feature = served.renderer.feature(served.address)
    feature.digest = "f" * 64
    with pytest.raises(FeatureEvicted, match="render it again"):
        await events(served, image_request(feature))
    await events(served, image_request(served.renderer.feature(served.address)))


async def test_a_known_image_with_other_tensors(served: Served) -> None:
    """A cached image must not answer for a request that promises other tensors."""
    await events(served, image_request(served.renderer.feature(served.address)))
    feature = served.renderer.feature(served.address)
    feature.tensors_sha256 = "f" * 64
    with pytest.raises(Exception, match="digest"):
        await events(served, image_request(feature))


async def push(
    served: Served, snapshot_id: str, digest: str, kind: weights_pb2.SnapshotKind = weights_pb2.SNAPSHOT_KIND_ADAPTER
) -> list[sampler_pb2.ReceiveSnapshotResponse]:
    """Joins the group "g" and pushes a snapshot of one tensor."""
    join = sampler_pb2.JoinTransferGroupRequest(
        group_id="g", master_address="h", master_port=5, rank_offset=1, world_size=2, timeout_s=5
    )
    assert await served.client.join_transfer_group(join) == "instance"
    manifest = weights_pb2.SnapshotManifest(bucket_bytes=9)
    manifest.snapshot.CopyFrom(
        weights_pb2.Snapshot(snapshot_id=snapshot_id, digest=digest, kind=kind, model_id=snapshot_id.split("@")[0])
    )
    manifest.tensors.add(name="t", dtype="float32", shape=[2])
    asked = sampler_pb2.ReceiveSnapshotRequest(group_id="g", manifest=manifest, timeout_s=5)
    return [phase async for phase in served.client.receive_snapshot(asked)]


async def test_a_push_over_the_wire(served: Served) -> None:
    phases = await push(served, "m@1", "d")
    assert [phase.WhichOneof("phase") for phase in phases] == ["ready", "loaded"]
    assert phases[1].loaded.digest == "d"
    _, *deltas = await events(served, request(snapshot_id="m@1"))
    assert {event.delta.snapshot_id for event in deltas} == {"m@1"}
    assert list((await served.client.info()).adapter_snapshot_ids) == ["m@1"]
    await served.client.drop_snapshot("m@1")
    await served.client.leave_transfer_group("g")
    assert not served.engine.adapters
    assert not served.engine.groups


async def test_an_answer_in_openais_words_is_a_plan_and_then_text(served: Served) -> None:
    delta = sampler_pb2.SequenceDelta(finish_reason=sampler_pb2.FINISH_REASON_STOP)
    steps = [
        sampler_pb2.AnswerOpenAIRequest(request=sampler_pb2.OpenAIRequest(body=b"{}")),
        sampler_pb2.AnswerOpenAIRequest(sampled=sampler_pb2.SampledEvent(event=sampler_pb2.SampleResponse())),
        sampler_pb2.AnswerOpenAIRequest(
            sampled=sampler_pb2.SampledEvent(event=sampler_pb2.SampleResponse(delta=delta))
        ),
    ]

    async def say(messages: list[sampler_pb2.AnswerOpenAIRequest]) -> AsyncIterator[sampler_pb2.AnswerOpenAIRequest]:
        for message in messages:
            yield message

    plan, answer = [step async for step in served.client.answer_openai(say(steps))]
    assert plan.plan.sample_count == 4
    assert answer.answer == b"2 of {}"
    for wrong in ([], steps[1:2]):  # one message: a client that still sends loses the reason
        with pytest.raises(InvalidInput, match="must begin with a request"):
            _ = [step async for step in served.client.answer_openai(say(wrong))]


async def test_tokens_of_an_answer_that_is_written_here_are_not_sent(served: Served) -> None:
    told: asyncio.Queue[sampler_pb2.AnswerOpenAIRequest] = asyncio.Queue()
    told.put_nowait(sampler_pb2.AnswerOpenAIRequest(request=sampler_pb2.OpenAIRequest(body=b"{}")))

    async def say() -> AsyncIterator[sampler_pb2.AnswerOpenAIRequest]:
        while True:
            yield await told.get()

    wanted, elsewhere = request(), request()
    async with aclosing(served.client.answer_openai(say())) as steps:  # type: ignore[type-var]
        wanted.answer.answer_id = (await anext(steps)).plan.answer_id
        elsewhere.answer.answer_id = "of another sampler"
        assert len(wanted.answer.answer_id) == 32
        first, *written = await events(served, wanted)
        assert first.prompt.logprobs is not None
        assert [(one.written.token_count, one.written.is_last) for one in written] == [
            (1, False),
            (1, False),
            (1, True),
        ]
        assert sum(one.ByteSize() for one in written) < 20
        assert (await anext(steps)).answer == b"3 of {}"
    for asked in (elsewhere, wanted):  # an answer that does not exist, or no longer
        _, *deltas = await events(served, asked)
        assert [tensors.decode_tokens(one.delta.tokens).tolist() for one in deltas] == [[10], [20], [10]]


async def test_an_overflowing_snapshot_fails_and_the_base_model_continues(served: Served) -> None:
    await push(served, "m@1", "large")
    served.engine.overflowing.add("large")
    for sample_count in (2, 1):
        with pytest.raises(NotFinite, match="snapshot 'm@1' cannot be sampled") as raised:
            await events(served, request(snapshot_id="m@1", sample_count=sample_count))
        assert raised.value.metadata["snapshot_id"] == "m@1"
    assert len(served.engine.used_names) == 2, "the second request must not reach the engine"
    assert not served.engine.running
    assert len(await events(served, request())) == 4


async def test_a_request_that_follows_its_model_names_the_weights_of_each_token(served: Served) -> None:
    """A failed load ends the request with a distinct error, so that the gateway sends it again."""
    full = weights_pb2.SNAPSHOT_KIND_FULL
    await push(served, "m@1", "d", full)
    wanted = request(max_tokens=40, sample_count=2, snapshot_id="m@1")
    wanted.follow_updates = True
    served.engine.stop_at = 20
    sampling = asyncio.create_task(events(served, wanted))
    await eventually(lambda: not served.engine.step.is_set())
    await push(served, "m@2", "d", full)
    served.engine.step.set()
    made: list[list[str]] = [[], []]
    for event in (await sampling)[1:]:
        made[event.delta.index].append(event.delta.snapshot_id)
    assert [len(one) for one in made] == [40, 40]
    assert all(one == sorted(one) and set(one) == {"m@1", "m@2"} for one in made)
    served.engine.step.clear()
    wanted.snapshot_id = "m@2"
    async with aclosing(served.client.sample(wanted, timeout_s=20)) as stream:
        await anext(stream)
        served.engine.fail_loading = True
        with pytest.raises(Unavailable, match="half-loaded"):
            await push(served, "m@3", "d", full)
        with pytest.raises(SnapshotNotLoaded, match="loading snapshot 'm@3' failed"):
            [event async for event in stream]
    await eventually(lambda: served.engine.running == 0)
