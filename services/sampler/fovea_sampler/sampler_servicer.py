"""The gRPC service `fovea.api.v1.SamplerService`. Each method decodes, makes one call, and encodes the result."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc

import fovea
from fovea.api.v1 import sampler_pb2, sampler_pb2_grpc
from fovea.runtime.machine_memory import memory_use
from fovea.vision.vision_family import VisionFamily
from fovea.wire import tensors
from fovea.wire.errors import FoveaError, InvalidInput, Unavailable
from fovea_sampler import sampler_metrics
from fovea_sampler.engine_api import AltRows, Delta, Event, Limits, OpenAIAnswers, PromptResult, TopRows
from fovea_sampler.generation import Generation
from fovea_sampler.pushes import Loaded, Ready, SnapshotPushes
from fovea_sampler.sample_validation import read_request
from fovea_sampler.weight_store import WeightStore

Context = grpc.aio.ServicerContext
_FINISH = {
    None: sampler_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": sampler_pb2.FINISH_REASON_STOP,
    "length": sampler_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True)
class EngineInfo:
    """The properties of an engine that do not change while it runs."""

    model: str
    instance_id: str
    dtype: str
    max_lora_rank: int
    transfer_backend: str
    transfer_worker_count: int
    limits: Limits
    max_batched_adapters: int
    adapter_memory_bytes: int
    max_sequences: int
    model_files: Mapping[str, str] = field(default_factory=dict)


class SamplerService(sampler_pb2_grpc.SamplerServiceServicer):
    """The servicer of an engine."""

    def __init__(
        self,
        facts: EngineInfo,
        vision: VisionFamily | None,
        generation: Generation,
        weights: WeightStore,
        pushes: SnapshotPushes,
        openai: OpenAIAnswers,
    ) -> None:
        self._facts = facts
        self._vision = vision
        self._generation = generation
        self._weights = weights
        self._pushes = pushes
        self._openai = openai
        # By answer id: the samples of the OpenAI responses that this sampler is writing; None ends them.
        self._sampled: dict[str, asyncio.Queue[sampler_pb2.SampledEvent | None]] = {}
        self._ready = False

    def set_ready(self, ready: bool) -> None:
        """Accepts or refuses samples. They are refused before the warm-up has ended and after the engine's death."""
        self._ready = ready

    async def GetSamplerInfo(  # noqa: N802
        self, request: sampler_pb2.GetSamplerInfoRequest, context: Context
    ) -> sampler_pb2.GetSamplerInfoResponse:
        facts, memory = self._facts, memory_use(os.getpid())
        return sampler_pb2.GetSamplerInfoResponse(
            model=facts.model,
            instance_id=facts.instance_id,
            max_context_length=facts.limits.max_context,
            max_sample_count=facts.limits.max_sample_count,
            max_top_logprobs=facts.limits.max_top_logprobs,
            max_lora_rank=facts.max_lora_rank,
            resident_snapshot_id=self._weights.resident_snapshot_id or "",
            adapter_snapshot_ids=self._weights.adapter_snapshot_ids(),
            transfer_backend=facts.transfer_backend,
            transfer_worker_count=facts.transfer_worker_count,
            receives_parts=True,
            dtype=facts.dtype,
            version=fovea.__version__,
            max_batched_adapters=facts.max_batched_adapters,
            adapter_memory_bytes=facts.adapter_memory_bytes,
            max_sequences=facts.max_sequences,
            model_files=facts.model_files,
            memory_used_bytes=memory.used_bytes,
            memory_total_bytes=memory.total_bytes,
            memory_kind=memory.kind,
            gpu_utilization=memory.utilization,
            waiting_for_slot=self._weights.waiting_for_slot,
        )

    async def Sample(  # noqa: N802
        self, request: sampler_pb2.SampleRequest, context: Context
    ) -> AsyncIterator[sampler_pb2.SampleResponse]:
        outcome = "cancelled"
        try:
            self._require_ready()
            spec = read_request(request, self._facts.limits, self._vision)
            inbox, is_first = self._sampled.get(request.answer.answer_id), True
            async with aclosing(self._generation.run(spec)) as events:
                async for event in events:
                    response = _encode(event, request.snapshot_id)
                    if inbox is not None and isinstance(event, Delta):
                        ids = request.prompt.tokens if is_first else b""
                        inbox.put_nowait(
                            sampler_pb2.SampledEvent(
                                prompt_index=request.answer.prompt_index, prompt_tokens=ids, event=response
                            )
                        )
                        response, is_first = _written(event), False
                    yield response
            outcome = "ok"
        except FoveaError as error:
            outcome = error.reason.lower()
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            sampler_metrics.REQUESTS.labels(outcome).inc()

    async def JoinTransferGroup(  # noqa: N802
        self, request: sampler_pb2.JoinTransferGroupRequest, context: Context
    ) -> sampler_pb2.JoinTransferGroupResponse:
        await self._pushes.join(request)
        return sampler_pb2.JoinTransferGroupResponse(instance_id=self._facts.instance_id)

    async def LeaveTransferGroup(  # noqa: N802
        self, request: sampler_pb2.LeaveTransferGroupRequest, context: Context
    ) -> sampler_pb2.LeaveTransferGroupResponse:
        await self._pushes.leave(request.group_id)
        return sampler_pb2.LeaveTransferGroupResponse()

    async def ReceiveSnapshot(  # noqa: N802
        self, request: sampler_pb2.ReceiveSnapshotRequest, context: Context
    ) -> AsyncIterator[sampler_pb2.ReceiveSnapshotResponse]:
        async with aclosing(self._pushes.receive(request.group_id, request.manifest, request.timeout_s)) as phases:
            async for phase in phases:
                yield _encode_phase(phase)

    async def CheckSnapshot(  # noqa: N802
        self, request: sampler_pb2.CheckSnapshotRequest, context: Context
    ) -> sampler_pb2.CheckSnapshotResponse:
        await self._pushes.check(request.manifest)
        return sampler_pb2.CheckSnapshotResponse()

    async def DropSnapshot(  # noqa: N802
        self, request: sampler_pb2.DropSnapshotRequest, context: Context
    ) -> sampler_pb2.DropSnapshotResponse:
        await self._weights.drop(request.snapshot_id)
        return sampler_pb2.DropSnapshotResponse()

    async def AnswerOpenAI(  # noqa: N802
        self, request_iterator: AsyncIterator[sampler_pb2.AnswerOpenAIRequest], context: Context
    ) -> AsyncIterator[sampler_pb2.AnswerOpenAIResponse]:
        self._require_ready()
        first = await anext(request_iterator, sampler_pb2.AnswerOpenAIRequest())
        if first.WhichOneof("step") != "request":
            raise InvalidInput("the call must begin with a request", field="request")
        answer_id, inbox = uuid.uuid4().hex, asyncio.Queue[sampler_pb2.SampledEvent | None]()
        self._sampled[answer_id] = inbox
        relaying = asyncio.create_task(_relay(request_iterator, inbox), name="relayed samples")
        steps = self._openai.answer(first.request, _drain(inbox), self._facts.limits.max_sample_count)
        try:
            async with aclosing(steps):
                async for step in steps:
                    if isinstance(step, bytes):
                        yield sampler_pb2.AnswerOpenAIResponse(answer=step)
                    else:
                        step.answer_id = answer_id
                        yield sampler_pb2.AnswerOpenAIResponse(plan=step)
        finally:
            del self._sampled[answer_id]
            relaying.cancel()
            await asyncio.gather(relaying, return_exceptions=True)

    def _require_ready(self) -> None:
        if not self._ready:
            raise Unavailable("the sampler is not serving: its engine is still starting or has died")


async def _relay(
    requests: AsyncIterator[sampler_pb2.AnswerOpenAIRequest], inbox: asyncio.Queue[sampler_pb2.SampledEvent | None]
) -> None:
    """Adds the samples that the caller sends. The end of its stream ends the samples."""
    try:
        async for one in requests:
            inbox.put_nowait(one.sampled)
    finally:
        inbox.put_nowait(None)


async def _drain(
    inbox: asyncio.Queue[sampler_pb2.SampledEvent | None],
) -> AsyncIterator[sampler_pb2.SampledEvent]:
    while (sampled := await inbox.get()) is not None:
        yield sampled


def _written(delta: Delta) -> sampler_pb2.SampleResponse:
    is_last = _FINISH[delta.finish] != sampler_pb2.FINISH_REASON_UNSPECIFIED
    written = sampler_pb2.WrittenTokens(index=delta.index, token_count=len(delta.tokens), is_last=is_last)
    return sampler_pb2.SampleResponse(written=written)


def _encode(event: Event, snapshot_id: str) -> sampler_pb2.SampleResponse:
    if isinstance(event, PromptResult):
        return sampler_pb2.SampleResponse(
            prompt=sampler_pb2.PromptResult(
                logprobs=b"" if event.logprobs is None else tensors.encode_floats(event.logprobs),
                top_logprobs=_encode_top(event.top),
                cached_token_count=event.cached_token_count,
                target_logprobs=b"" if event.target_logprobs is None else tensors.encode_floats(event.target_logprobs),
                alt_tokens=_encode_alt(event.alt),
            )
        )
    return sampler_pb2.SampleResponse(delta=_encode_delta(event, snapshot_id))


def _encode_delta(delta: Delta, snapshot_id: str) -> sampler_pb2.SequenceDelta:
    made_by = snapshot_id if delta.snapshot_id is None else delta.snapshot_id
    return sampler_pb2.SequenceDelta(
        index=delta.index,
        tokens=tensors.encode_tokens(delta.tokens),
        logprobs=tensors.encode_floats(delta.logprobs),
        top_logprobs=_encode_top(delta.top),
        finish_reason=_FINISH[delta.finish],
        snapshot_id=made_by,
        routed_experts=None if delta.routed_experts is None else tensors.encode(delta.routed_experts),
        sampled_support=delta.support,
    )


def _encode_top(top: TopRows | None) -> sampler_pb2.TopLogprobs | None:
    if top is None:
        return None
    return sampler_pb2.TopLogprobs(token_ids=tensors.encode(top.token_ids), logprobs=tensors.encode(top.logprobs))


def _encode_alt(alt: AltRows | None) -> sampler_pb2.AltTokens | None:
    if alt is None:
        return None
    return sampler_pb2.AltTokens(token_ids=tensors.encode(alt.token_ids), logprobs=tensors.encode(alt.logprobs))


def _encode_phase(phase: Ready | Loaded) -> sampler_pb2.ReceiveSnapshotResponse:
    if isinstance(phase, Ready):
        return sampler_pb2.ReceiveSnapshotResponse(ready=phase.splits)
    return sampler_pb2.ReceiveSnapshotResponse(
        loaded=sampler_pb2.SnapshotLoaded(digest=phase.digest, pause_s=phase.pause_s)
    )
