"""Fake renderer, sampler and trainer with deterministic answers, behind real gRPC servers in this process.

They implement what a gateway test can observe: they validate requests as the real services do, record every call, and
can fail, wait, restart and lose their state on demand.
"""

# ruff: noqa: N802 - gRPC names the methods.

import asyncio
import hashlib
import json
import struct
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np

from fovea.api.v1 import (
    model_input_pb2,
    renderer_pb2,
    renderer_pb2_grpc,
    sampler_pb2,
    sampler_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    weights_pb2,
)
from fovea.runtime.server import SERVER_OPTIONS, ErrorInterceptor
from fovea.wire import tensors
from fovea.wire.errors import FailedPrecondition, FoveaError, InvalidInput, NotFound, SnapshotNotLoaded, Unavailable
from fovea_trainer.recovery.reply_cache import ReplyCache

MODEL = "fovea/fake-vl"
VOCABULARY_SIZE = 1000
MAX_CONTEXT = 2048
IMAGE_PAD = 999
IMAGE_TOKENS = 4
HARD = 990
"""Token ids from here on get a lower probability from the fake trainer."""
Context = grpc.aio.ServicerContext


class Fake:
    """Base class: records calls by method name, injects failures, holds calls at a gate and counts those that wait
    there.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.failures: dict[str, list[FoveaError]] = defaultdict(list)
        self.open = asyncio.Event()
        self.open.set()
        self.gated: set[str] = set()  # methods that wait at the gate; all if empty
        self.waiting = 0
        self.model_files: dict[str, str] = {}
        self.server: grpc.aio.Server | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """host:port of its server."""
        return f"127.0.0.1:{self.port}"

    def names(self) -> list[str]:
        """Method names in order of arrival."""
        return [name for name, _ in self.calls]

    def of(self, name: str) -> list[Any]:
        """Requests of one method."""
        return [request for called, request in self.calls if called == name]

    async def note(self, name: str, request: Any) -> None:
        """Records a call, then fails or waits if the test requested it."""
        self.calls.append((name, request))
        if self.failures[name]:
            raise self.failures[name].pop(0)
        if self.gated and name not in self.gated:
            return
        self.waiting += 1
        try:
            await self.open.wait()
        finally:
            self.waiting -= 1

    async def start(self) -> None:
        """Starts the server, on the previous port if there was one."""
        options = [*SERVER_OPTIONS, ("grpc.so_reuseport", 0)]
        self.server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=options)
        self.register(self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def stop(self) -> None:
        """Breaks all connections, as a kill does."""
        assert self.server is not None
        await self.server.stop(0)

    def register(self, server: grpc.aio.Server) -> None:
        """Registers the servicer with the server."""
        raise NotImplementedError


class FakeRenderer(Fake, renderer_pb2_grpc.RendererServiceServicer):
    """Turns every image into IMAGE_TOKENS placeholders, and refuses bytes that do not start like their format."""

    def register(self, server: grpc.aio.Server) -> None:
        renderer_pb2_grpc.add_RendererServiceServicer_to_server(self, server)

    async def GetRendererInfo(self, request: Any, context: Context) -> renderer_pb2.GetRendererInfoResponse:
        return renderer_pb2.GetRendererInfoResponse(
            model="fake", family="qwen3_vl", supports_images=True, processor_fingerprint="f",
            vocabulary_size=VOCABULARY_SIZE, max_context_length=MAX_CONTEXT, version="0",
            model_files=self.model_files,
        )  # fmt: skip

    async def Render(self, request: renderer_pb2.RenderRequest, context: Context) -> renderer_pb2.RenderResponse:
        await self.note("Render", request)
        ids: list[int] = []
        rendered = model_input_pb2.RenderedInput()
        for index, chunk in enumerate(request.input.chunks):
            if chunk.WhichOneof("kind") == "tokens":
                ids += tensors.decode_tokens(chunk.tokens.tokens).tolist()
                continue
            if chunk.WhichOneof("kind") == "image_reference" and chunk.image_reference.uri:
                what = f"the host of {chunk.image_reference.uri} is not allowed"
                raise InvalidInput(f"chunks[{index}]: {what}", field=f"chunks[{index}]")
            image = chunk.image if chunk.WhichOneof("kind") == "image" else chunk.image_reference
            if chunk.image.data and not chunk.image.data.startswith((b"\x89PNG", b"\xff\xd8")):
                raise InvalidInput(f"chunks[{index}].image cannot be decoded", field=f"chunks[{index}].image")
            if image.HasField("expected_token_count") and image.expected_token_count != IMAGE_TOKENS:
                raise InvalidInput(f"expected {image.expected_token_count} tokens, got {IMAGE_TOKENS} from image")
            key = chunk.image.data or chunk.image_reference.sha256.encode()
            digest = hashlib.sha256(key).hexdigest()
            feature = model_input_pb2.VisionFeature(digest=digest, token_count=IMAGE_TOKENS, source=self.address)
            rendered.spans.add(offset=len(ids), length=IMAGE_TOKENS, feature=feature)
            ids += [IMAGE_PAD] * IMAGE_TOKENS
        rendered.tokens = tensors.encode_tokens(ids)
        return renderer_pb2.RenderResponse(rendered=rendered)

    async def PutImage(self, request_iterator: Any, context: Context) -> renderer_pb2.PutImageResponse:
        size_bytes = 0
        async for piece in request_iterator:
            size_bytes += len(piece.data)
        await self.note("PutImage", size_bytes)
        return renderer_pb2.PutImageResponse(size_bytes=size_bytes)


def _written(delta: sampler_pb2.SequenceDelta) -> sampler_pb2.SampleResponse:
    written = sampler_pb2.WrittenTokens(
        index=delta.index, token_count=len(delta.tokens) // 4, is_last=bool(delta.finish_reason)
    )
    return sampler_pb2.SampleResponse(written=written)


class FakeSampler(Fake, sampler_pb2_grpc.SamplerServiceServicer):
    """Samples tokens that depend on the weights and the seed. It holds only snapshots that a trainer pushed."""

    def __init__(self) -> None:
        super().__init__()
        self.sample_delay_s = 0.0
        self.takes_no_mlp = False
        self.score = -0.5
        self.writes_own_samples = True
        self.answers: dict[str, asyncio.Queue[sampler_pb2.SampledEvent | None]] = {}
        self.max_sequences = 0
        self.waiting_for_slot = 0
        self.restart()

    def restart(self) -> None:
        """Simulates a new engine, which holds no pushed snapshot."""
        self.instance_id = uuid.uuid4().hex
        self.resident = ""
        self.adapters: set[str] = set()
        self.running = 0
        self.pinned = 0  # running samples for which full weights must not change
        self.most_running = 0
        self.cancelled = 0
        self.completed: list[str] = []

    def ids(self) -> list[str]:
        """Ids of the samples that were started."""
        return [request.request_id for request in self.of("Sample")]

    def register(self, server: grpc.aio.Server) -> None:
        sampler_pb2_grpc.add_SamplerServiceServicer_to_server(self, server)

    async def GetSamplerInfo(self, request: Any, context: Context) -> sampler_pb2.GetSamplerInfoResponse:
        return sampler_pb2.GetSamplerInfoResponse(
            model="fake", instance_id=self.instance_id, max_context_length=MAX_CONTEXT, max_sample_count=128,
            max_top_logprobs=20, max_lora_rank=64, resident_snapshot_id=self.resident,
            adapter_snapshot_ids=sorted(self.adapters), transfer_backend="gloo", transfer_worker_count=1,
            model_files=self.model_files, max_sequences=self.max_sequences,
            waiting_for_slot=self.waiting_for_slot,
        )  # fmt: skip

    async def Sample(
        self, request: sampler_pb2.SampleRequest, context: Context
    ) -> AsyncIterator[sampler_pb2.SampleResponse]:
        if request.snapshot_id not in self.adapters and request.snapshot_id != self.resident:
            self.calls.append(("NotLoaded", request))
            raise SnapshotNotLoaded(f"snapshot {request.snapshot_id!r} is not loaded")
        self.running += 1
        self.pinned += not request.follow_updates
        self.most_running = max(self.most_running, self.running)
        try:
            await self.note("Sample", request)
            await asyncio.sleep(self.sample_delay_s)
            inbox = self.answers.get(request.answer.answer_id) if self.writes_own_samples else None
            for event in self._events(request):
                if inbox is not None and event.HasField("delta"):
                    inbox.put_nowait(sampler_pb2.SampledEvent(prompt_tokens=request.prompt.tokens, event=event))
                    yield _written(event.delta)
                else:
                    yield event
            self.completed.append(request.request_id)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            self.pinned -= not request.follow_updates

    async def AnswerOpenAI(
        self, request_iterator: Any, context: Context
    ) -> AsyncIterator[sampler_pb2.AnswerOpenAIResponse]:
        """Encodes each text as its bytes and each image as a chunk; the answer is the ids as text."""
        asked = (await anext(request_iterator)).request
        await self.note("AnswerOpenAI", asked)
        body = json.loads(asked.body)
        if "unknown" in body:
            raise InvalidInput("there is no field 'unknown' in this request; leave it out", field="unknown")
        plan = sampler_pb2.OpenAIPlan(sample_count=body.get("n", 1), is_stream=body.get("stream", False))
        plan.answer_id = uuid.uuid4().hex
        inbox = self.answers[plan.answer_id] = asyncio.Queue()
        relaying = asyncio.create_task(self._relay(request_iterator, inbox))
        plan.params.max_tokens = body.get("max_tokens", 8)
        prompt = plan.prompts.add()
        for message in body.get("messages", [{"content": body.get("prompt", "p")}]):
            parts = message["content"]
            for part in [{"text": parts}] if isinstance(parts, str) else parts:
                if "text" in part:
                    prompt.chunks.add().tokens.tokens = tensors.encode_tokens(list(part["text"].encode()))
                else:
                    prompt.chunks.add().image.SetInParent()
        yield sampler_pb2.AnswerOpenAIResponse(plan=plan)
        try:
            ids: dict[int, list[int]] = {index: [] for index in range(plan.sample_count)}
            ended = 0
            while ended < plan.sample_count:
                sampled = await inbox.get()
                if sampled is None:
                    raise Unavailable("the caller sends nothing more")
                delta = sampled.event.delta
                ids[delta.index] += tensors.decode_tokens(delta.tokens).tolist()
                ended += bool(delta.finish_reason)
                if plan.is_stream and delta.tokens:
                    choice = {"index": delta.index, "delta": {"content": str(ids[delta.index])}}
                    event = json.dumps({"choices": [choice]})
                    yield sampler_pb2.AnswerOpenAIResponse(answer=f"data: {event}\n\n".encode())
            if plan.is_stream:
                yield sampler_pb2.AnswerOpenAIResponse(answer=b"data: [DONE]\n\n")
                return
            choices = [{"index": index, "message": {"role": "assistant", "content": str(ids[index])}} for index in ids]
            whole = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": choices}
            yield sampler_pb2.AnswerOpenAIResponse(answer=json.dumps(whole).encode())
        finally:
            relaying.cancel()
            await asyncio.gather(relaying, return_exceptions=True)

    async def _relay(self, requests: Any, inbox: asyncio.Queue[sampler_pb2.SampledEvent | None]) -> None:
        try:
            async for one in requests:
                self.calls.append(("sampled", one.sampled))
                inbox.put_nowait(one.sampled)
        finally:
            inbox.put_nowait(None)

    async def CheckSnapshot(self, request: Any, context: Context) -> sampler_pb2.CheckSnapshotResponse:
        self.calls.append(("CheckSnapshot", request))
        if self.takes_no_mlp and request.manifest.lora.train_mlp:
            raise InvalidInput("manifest: the engine cannot adapt model.layers.0.mlp.odd_proj", field="manifest")
        return sampler_pb2.CheckSnapshotResponse()

    async def DropSnapshot(self, request: Any, context: Context) -> sampler_pb2.DropSnapshotResponse:
        await self.note("DropSnapshot", request)
        self.adapters.discard(request.snapshot_id)
        return sampler_pb2.DropSnapshotResponse()

    def _events(self, request: sampler_pb2.SampleRequest) -> list[sampler_pb2.SampleResponse]:
        prompt = tensors.decode_tokens(request.prompt.tokens)
        result = sampler_pb2.PromptResult(cached_token_count=3)
        if request.prompt_logprobs:
            first = len(prompt) - request.prompt_logprobs_last_n if request.prompt_logprobs_last_n else 1
            result.logprobs = tensors.encode_floats([np.nan] * first + [self.score] * (len(prompt) - first))
        if request.top_prompt_logprobs:
            result.top_logprobs.CopyFrom(_top(len(prompt), request.top_prompt_logprobs, is_prompt=True))
        if request.HasField("target_tokens"):
            targets = tensors.decode(request.target_tokens.token_ids)
            assert tensors.decode(request.target_tokens.row_offsets).size == len(prompt)
            result.target_logprobs = tensors.encode_floats([self.logprob_of(int(token_id)) for token_id in targets])
        if k := request.alt_token_count:
            drawn = np.arange((len(prompt) - 1) * k, dtype=np.int32).reshape(len(prompt) - 1, k)
            result.alt_tokens.token_ids.CopyFrom(tensors.encode(drawn))
            result.alt_tokens.logprobs.CopyFrom(tensors.encode(-drawn.astype(np.float32)))
        events = [sampler_pb2.SampleResponse(prompt=result)]
        count = request.params.max_tokens if request.params.HasField("max_tokens") else 8
        newest = self.resident if request.follow_updates else request.snapshot_id
        for index in range(request.sample_count):
            makers = ((request.snapshot_id, slice(count // 2)), (newest, slice(count // 2, None)))
            for maker, own in makers:
                part, is_last = self.tokens_of(maker, request.params.seed, index, count)[own], own.stop is None
                delta = sampler_pb2.SequenceDelta(
                    index=index, tokens=tensors.encode_tokens(part),
                    logprobs=tensors.encode_floats([-0.25] * len(part)),
                    finish_reason=sampler_pb2.FINISH_REASON_LENGTH if is_last else None,
                    snapshot_id=maker,
                )  # fmt: skip
                if request.top_sample_logprobs:
                    delta.top_logprobs.CopyFrom(_top(len(part), request.top_sample_logprobs, is_prompt=False))
                if request.routed_experts and is_last:
                    experts = np.full((len(prompt) + count - 1, 3, 2), index, np.uint8)
                    delta.routed_experts.CopyFrom(tensors.encode(experts))
                events.append(sampler_pb2.SampleResponse(delta=delta))
        return events

    @staticmethod
    def logprob_of(token_id: int) -> float:
        """Returns the score of a target token, which is the same at every position."""
        return -(token_id + 1) / 8

    @staticmethod
    def tokens_of(snapshot_id: str, seed: int, index: int, count: int) -> list[int]:
        """Returns the sampled tokens."""
        digest = hashlib.sha256(f"{snapshot_id}/{seed}/{index}".encode()).digest()
        return [digest[i % 32] for i in range(count)]


def _top(rows: int, k: int, is_prompt: bool) -> sampler_pb2.TopLogprobs:
    ids = np.tile(np.arange(1, k + 1, dtype=np.int32), (rows, 1))
    logprobs = np.tile(-np.arange(1, k + 1, dtype=np.float32), (rows, 1))
    if is_prompt:
        ids[0], logprobs[0] = 0, -99999.0
    return sampler_pb2.TopLogprobs(token_ids=tensors.encode(ids), logprobs=tensors.encode(logprobs))


class FakeTrainer(Fake, trainer_pb2_grpc.TrainerServiceServicer):
    """Counts gradients and steps. A loss is minus the sum of the weights times a logprob that falls with each step.

    Numbered commands go through the real journal: each runs once, and continues if its caller disconnects.
    """

    def __init__(self, samplers: Callable[[], list[FakeSampler]]) -> None:
        super().__init__()
        self._samplers = samplers
        self.saved: dict[str, dict[str, Any]] = {}
        self.push_failures: dict[str, int] = defaultdict(int)
        self.push_delay_s = 0.0
        self.learns = True
        self.hints: list[trainer_pb2.FetchAheadRequest] = []
        self.devices: dict[str, Any] = {}  # the GPU information that it reports
        self.restart()

    def restart(self) -> None:
        """Simulates a new process, without models and unsaved snapshots."""
        self.instance_id = uuid.uuid4().hex
        self.models: dict[str, dict[str, Any]] = {}
        self.snapshots: dict[str, weights_pb2.Snapshot] = {}
        self._replies = ReplyCache()

    def register(self, server: grpc.aio.Server) -> None:
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self, server)

    async def GetTrainerInfo(self, request: Any, context: Context) -> trainer_pb2.GetTrainerInfoResponse:
        return trainer_pb2.GetTrainerInfoResponse(
            model="fake", family="qwen3_vl", instance_id=self.instance_id, world_size=2, max_lora_rank=64,
            max_context_length=MAX_CONTEXT, model_ids=list(self.models), dtype="float32",
            loss_functions=["cross_entropy", "importance_sampling"], model_files=self.model_files, takes_groups=True,
            **self.devices,
        )  # fmt: skip

    def _model(self, model_id: str) -> dict[str, Any]:
        if model_id not in self.models:
            raise NotFound(f"there is no model {model_id!r}")
        return self.models[model_id]

    async def CreateModel(self, request: Any, context: Context) -> trainer_pb2.CreateModelResponse:
        await self.note("CreateModel", request)
        is_full = request.WhichOneof("kind") == "full"
        if is_full and self.models:
            raise FailedPrecondition("full parameters need the trainer for themselves: other models exist")
        self.models[request.model_id] = {"step": 0, "gradients": 0, "is_full": is_full}
        spec = weights_pb2.TensorSpec(name="a", dtype="float32", shape=[4, 8])
        adapter = None if is_full else weights_pb2.SnapshotManifest(tensors=[spec], lora=request.lora)
        return trainer_pb2.CreateModelResponse(trainable_parameter_count=10, adapter=adapter)

    async def DeleteModel(self, request: Any, context: Context) -> trainer_pb2.DeleteModelResponse:
        await self.note("DeleteModel", request)
        self.models.pop(request.model_id, None)
        self._replies.forget(request.model_id)
        return trainer_pb2.DeleteModelResponse()

    async def FetchAhead(self, request: Any, context: Context) -> trainer_pb2.FetchAheadResponse:
        self.hints.append(request)  # not recorded as a call: tests count only calls with effects
        return trainer_pb2.FetchAheadResponse()

    async def ForwardBackward(
        self, request_iterator: Any, context: Context
    ) -> AsyncIterator[trainer_pb2.ForwardBackwardResponse]:
        records = [record async for record in request_iterator]
        header = records[0].header
        datums = [datum for record in records[1:] for datum in record.group.datums or [record.datum]]
        if len(datums) != header.datum_count:  # A killed gateway ends its stream early.
            raise InvalidInput(
                f"datum_count is {header.datum_count}, but {len(datums)} datums were sent", field="datum_count"
            )
        seq_id = header.seq_id if header.backward else 0
        for response in await self._replies.once(header.model_id, seq_id, lambda: self._computed(header, datums)):
            yield response

    async def _computed(
        self, header: trainer_pb2.ForwardBackwardHeader, datums: list[trainer_pb2.Datum]
    ) -> list[trainer_pb2.ForwardBackwardResponse]:
        await self.note("ForwardBackward", (header, datums))
        model = self._model(header.model_id)
        if header.HasField("custom_loss") != (header.loss_function == "custom"):
            raise InvalidInput("custom_loss goes with loss_function 'custom'", field="custom_loss")
        if header.loss_function not in ("cross_entropy", "importance_sampling", "stable_reinforce", "custom"):
            raise InvalidInput(f"loss_fn {header.loss_function!r} is unknown", field="loss_fn")
        loss = 0.0
        outputs = []
        for index, datum in enumerate(datums):
            length = len(datum.input.tokens) // 4
            targets = tensors.decode(datum.loss_inputs["target_tokens"])
            if targets.shape[0] != length:
                raise InvalidInput(f"data[{index}].target_tokens has {targets.shape[0]} rows, the input {length}")
            steps = np.float32(1 + model["step"] if self.learns else 1)
            logprobs = np.where(targets >= HARD, -4.0, -1.0).astype(np.float32) / steps
            weights = tensors.decode(datum.loss_inputs["weights"]) if "weights" in datum.loss_inputs else 1.0
            loss -= float((weights * logprobs).sum())
            outputs.append(trainer_pb2.DatumOutput(tensors={"logprobs": tensors.encode(logprobs)}))
        if header.backward:
            model["gradients"] = len(datums) + (0 if header.drop_gradients else model["gradients"])
        metrics = trainer_pb2.Metrics(values={"loss:sum": loss})
        groups = [trainer_pb2.ForwardBackwardResponse(group=trainer_pb2.OutputGroup(outputs=outputs))]
        singles = [trainer_pb2.ForwardBackwardResponse(output=output) for output in outputs]
        return [
            *(groups if header.reads_groups else singles),
            trainer_pb2.ForwardBackwardResponse(metrics=metrics),
        ]

    async def ClearGradients(self, request: Any, context: Context) -> trainer_pb2.ClearGradientsResponse:
        return await self._replies.once(request.model_id, request.seq_id, lambda: self._cleared(request))

    async def _cleared(self, request: trainer_pb2.ClearGradientsRequest) -> trainer_pb2.ClearGradientsResponse:
        await self.note("ClearGradients", request)
        self._model(request.model_id)["gradients"] = 0
        return trainer_pb2.ClearGradientsResponse()

    async def OptimStep(self, request: Any, context: Context) -> trainer_pb2.OptimStepResponse:
        return await self._replies.once(request.model_id, request.seq_id, lambda: self._stepped(request))

    async def _stepped(self, request: trainer_pb2.OptimStepRequest) -> trainer_pb2.OptimStepResponse:
        await self.note("OptimStep", request)
        model = self._model(request.model_id)
        seen, model["gradients"] = model["gradients"], 0
        model["step"] += 1
        metrics = trainer_pb2.Metrics(values={"gradients:sum": seen, "learning_rate:mean": request.adam.learning_rate})
        return trainer_pb2.OptimStepResponse(metrics=metrics, step=model["step"])

    async def SaveState(self, request: Any, context: Context) -> trainer_pb2.SaveStateResponse:
        await self.note("SaveState", request)
        self.saved[request.uri] = dict(self._model(request.model_id))
        return trainer_pb2.SaveStateResponse(size_bytes=100, step=self.models[request.model_id]["step"])

    async def LoadState(self, request: Any, context: Context) -> trainer_pb2.LoadStateResponse:
        return await self._replies.once(request.model_id, request.seq_id, lambda: self._loaded(request))

    async def _loaded(self, request: trainer_pb2.LoadStateRequest) -> trainer_pb2.LoadStateResponse:
        await self.note("LoadState", request)
        model = self._model(request.model_id)
        if request.uri not in self.saved:
            raise NotFound(f"there is nothing at {request.uri}")
        model["step"] = self.saved[request.uri]["step"] if request.optimizer else 0
        return trainer_pb2.LoadStateResponse(step=model["step"])

    async def TakeSnapshot(self, request: Any, context: Context) -> trainer_pb2.TakeSnapshotResponse:
        await self.note("TakeSnapshot", request)
        model = self._model(request.model_id)
        kind = weights_pb2.SNAPSHOT_KIND_FULL if model["is_full"] else weights_pb2.SNAPSHOT_KIND_ADAPTER
        snapshot = weights_pb2.Snapshot(
            snapshot_id=request.snapshot_id, model_id=request.model_id, step=model["step"], kind=kind, size_bytes=10,
            digest=hashlib.sha256(struct.pack("<q", model["step"])).hexdigest(),
        )  # fmt: skip
        self.snapshots[request.snapshot_id] = snapshot
        if request.uri:
            self.saved[request.uri] = {"snapshot": snapshot}
        return trainer_pb2.TakeSnapshotResponse(snapshot=snapshot)

    async def PushSnapshot(self, request: Any, context: Context) -> trainer_pb2.PushSnapshotResponse:
        await self.note("PushSnapshot", request)
        await asyncio.sleep(self.push_delay_s)
        snapshot = self.snapshots.get(request.snapshot_id) or self.saved.get(request.uri, {}).get("snapshot")
        if request.snapshot_id and snapshot is None:
            raise NotFound(f"snapshot {request.snapshot_id} is not held")
        response = trainer_pb2.PushSnapshotResponse(snapshot=snapshot)
        by_address = {sampler.address: sampler for sampler in self._samplers()}
        for address in request.samplers:
            if self.push_failures[address]:
                self.push_failures[address] -= 1
                response.results.add(sampler=address, error="the transfer broke off")
                continue
            sampler = by_address[address]
            if snapshot is not None and snapshot.kind == weights_pb2.SNAPSHOT_KIND_ADAPTER:
                sampler.adapters.add(request.snapshot_id)
            else:
                assert sampler.pinned == 0, "a full push must not overlap running samples"
                sampler.resident = request.snapshot_id
            response.results.add(sampler=address)
        return response

    async def CheckAdapter(self, request: Any, context: Context) -> trainer_pb2.CheckAdapterResponse:
        await self.note("CheckAdapter", request)
        return trainer_pb2.CheckAdapterResponse()

    async def ForgetSnapshot(self, request: Any, context: Context) -> trainer_pb2.ForgetSnapshotResponse:
        await self.note("ForgetSnapshot", request)
        self.snapshots.pop(request.snapshot_id, None)
        return trainer_pb2.ForgetSnapshotResponse()
