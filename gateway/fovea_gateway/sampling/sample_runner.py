"""Runs samples: renders the prompt once, sends it to a sampler that has the weights, and retries if that fails."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from cachetools import LRUCache

from fovea.api.v1 import gateway_pb2, model_input_pb2, sampler_pb2
from fovea.runtime.tasks import Backoff
from fovea.wire.errors import (
    ContextOverflow,
    FeatureEvicted,
    FoveaError,
    InvalidInput,
    ModelLost,
    SnapshotNotLoaded,
    Unavailable,
)
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.access.fair_queue import Turn
from fovea_gateway.replicas.base_models import BaseModel
from fovea_gateway.replicas.replicas import ReplicaLeft
from fovea_gateway.replicas.samplers import Sampler, version_of
from fovea_gateway.replicas.snapshot_pushes import LoadFailed, RestoreInProgress
from fovea_gateway.sampling import sample_wire as targets
from fovea_gateway.sampling.sample_wire import Cells, Makers, gather, makers_of
from fovea_gateway.sessions.future import Kind, Pending, QueueState, stage

logger = logging.getLogger(__name__)

Events = AsyncGenerator[sampler_pb2.SampleResponse, None]

_OPTIONS = tuple(
    name
    for name, field in gateway_pb2.SampleTokensRequest.DESCRIPTOR.fields_by_name.items()
    if (asked := sampler_pb2.SampleRequest.DESCRIPTOR.fields_by_name.get(name))
    and asked.message_type is field.message_type
)
"""The options passed to a sampler unchanged: the fields that both requests have, with the same type."""

_LONGEST_PAUSE_S = 0.5
_MENDS = 30
"""How often one request may find its snapshot or its image evicted before that is an error."""

_KNOWN_MAKERS = 2**14
_KNOWN_MODELS = 2**12
_BREAKS = 10
"""How often samplers may fail with one request, or to load its weights, before these are assumed to be the cause."""


@dataclass(eq=False)
class SamplingSession:
    """A choice of weights to sample from. An empty `snapshot_id` means the base model.

    Attributes:
        followed_model_id: The model that this session follows: each `inflight` save moves the session to its new
            weights. None if the weights are fixed.
        client_count: Clients that have joined in addition to the first one.
    """

    sampling_session_id: str
    session_id: str
    owner: str
    base_model: str
    request_seq_id: int | None = None
    model_path: str | None = None
    snapshot_id: str = ""
    followed_model_id: str | None = None
    client_count: int = 0
    created_at: float = field(default_factory=time.time)


@dataclass
class SampleWork:
    """The state of one sample request.

    Attributes:
        pending: Its future; the future of a stream is not registered.
        base: The base model to sample from, with or without an adapter.
        sampling: The session that names the weights. They may change until a try has its slot in a sampler.
        at_once: Whether the sampler sends each sequence as a whole, not as a stream.
        answer: The OpenAI response for which to sample.
        is_wanted: Returns whether a client waits for the request.
        snapshot_id: The weights of the last try.
        cells: The cells to score in the prompt.
        outage: The backoff since a sampler first failed the request.
        mends: The number of times that the request found its snapshot or its image evicted.
        breaks: The number of samplers that have failed with the request in them, or that could not load its weights.
        is_following: Whether newer full weights may replace those of the last try while it runs.
    """

    pending: Pending
    base: BaseModel
    sampling: SamplingSession
    request: gateway_pb2.SampleTokensRequest
    at_once: bool
    answer: sampler_pb2.OpenAIAnswer | None = None
    is_wanted: Callable[[], bool] = lambda: True
    snapshot_id: str = ""
    rendered: model_input_pb2.RenderedInput | None = None
    cells: Cells | None = None
    outage: Backoff | None = None
    mends: int = 0
    breaks: int = 0
    is_following: bool = False

    @property
    def prompt_ids(self) -> bytes:
        """Returns the int32 ids of the prompt as rendered; empty before that."""
        return self.rendered.tokens if self.rendered is not None else b""


def check_context(prompt_tokens: int, max_tokens: int, max_context_length: int) -> None:
    """Raises ContextOverflow if a sample may exceed the context. The Tinker cookbook looks for its message."""
    if prompt_tokens + max_tokens > max_context_length:
        raise ContextOverflow(
            "Prompt length plus max_tokens exceeds the model's context window: "
            f"{prompt_tokens} prompt tokens + {max_tokens} max_tokens > {max_context_length}.",
            field="sampling_params.max_tokens",
        )


def _held(work: SampleWork) -> AbstractContextManager[None]:
    """Keeps the snapshot of a sample from being freed while it waits and between its tries."""
    sampling = work.sampling
    if not sampling.snapshot_id or sampling.followed_model_id is not None:
        return nullcontext()
    return work.base.snapshots.using(sampling.snapshot_id)


class Versions:
    """The number of the newest requested snapshot of each model."""

    def __init__(self) -> None:
        self._newest: LRUCache[str, int] = LRUCache(_KNOWN_MODELS)

    def want(self, snapshot_id: str) -> None:
        """Records a request for a snapshot. The base model has no versions."""
        version = version_of(snapshot_id)
        if version is None:
            return
        model_id, number = version
        self._newest[model_id] = max(number, self._newest.get(model_id, number))

    def lag(self, held: Iterable[str]) -> int:
        """Returns how many versions `held` is behind the newest requested one, for the model that is furthest behind.

        Ignores models without a held version: this sampler does not serve them, or it had to evict their adapters.
        """
        newest_held: dict[str, int] = {}
        for model_id, number in filter(None, map(version_of, held)):
            newest_held[model_id] = max(number, newest_held.get(model_id, number))
        return max((self._newest.get(model_id, at) - at for model_id, at in newest_held.items()), default=0)


class SampleRunner:
    """The runner of sample requests.

    Args:
        retry_deadline_s: Seconds that a request waits for an unavailable sampler to return.
        timeout_s: Deadline of one try, in seconds.
    """

    def __init__(self, versions: Versions, retry_deadline_s: float, timeout_s: float) -> None:
        self._versions, self._retry_deadline_s, self._timeout_s = versions, retry_deadline_s, timeout_s
        self.makers: LRUCache[str, list[Makers]] = LRUCache(_KNOWN_MAKERS)
        """The snapshots that made each sequence of whole samples, by future, also once clients have the results."""
        self.tasks_in_samplers: set[asyncio.Task[Any]] = set()
        """Tasks with a request in a sampler, until they end. To stop one would mean to sample its request twice."""

    async def collect(self, work: SampleWork) -> list[gateway_pb2.SampleTokensResponse]:
        """Samples to the end. If a sampler fails midway, the request starts again."""
        with _held(work):
            while True:
                try:
                    async with aclosing(self._attempt(work)) as attempt:
                        events = [event async for event in attempt]
                    records = gather(events, work.request, work.cells)
                    deltas = [record.delta for record in records if record.WhichOneof("event") == "delta"]
                    self.makers[work.pending.submission.future_id] = [makers_of(delta) for delta in deltas]
                    return records
                except ReplicaLeft:
                    continue
                except FoveaError as error:
                    await self._mend(work, error)

    async def stream(self, work: SampleWork) -> AsyncIterator[sampler_pb2.SampleResponse]:
        """Yields events as they arrive, without `written` ones. A failure is retried only before the first event."""
        is_begun = False
        with _held(work):
            while True:
                try:
                    async with aclosing(self._attempt(work)) as attempt:
                        async for event in attempt:
                            is_begun = True
                            if event.WhichOneof("event") != "written":
                                yield event
                    return
                except ReplicaLeft:
                    continue
                except FoveaError as error:
                    if is_begun:
                        raise
                    await self._mend(work, error)

    async def _attempt(self, work: SampleWork) -> Events:
        if work.rendered is None:
            work.pending.progress.wait_on("rendering the prompt")
            with stage("render", Kind.SAMPLE.value):
                work.rendered = await work.base.renderers.render(
                    work.pending.submission.owner, work.request.prompt, "prompt"
                )
            await self._check(work)
        picked = work.base.samplers.pick(work.pending.submission.owner, work.sampling.snapshot_id, work.rendered)
        tokens = most_tokens(work.request, len(work.rendered.tokens) // 4, work.base.max_context_length)
        turn = Turn(work.pending.submission.owner, tokens, size=work.request.sample_count, is_wanted=work.is_wanted)
        try:
            async with self._place(work, picked, turn) as sampler:
                work.pending.progress.wait_on("sampling")
                async for event in self._sample(sampler, work, turn):
                    yield event
        finally:
            memory_kind = picked.info.memory_kind if picked.info is not None else ""
            work.pending.add_seconds(turn.seconds * picked.device_count, memory_kind)

    @asynccontextmanager
    async def _place(self, work: SampleWork, sampler: Sampler, turn: Turn) -> AsyncIterator[Sampler]:
        """Holds a slot in a sampler that has the weights, until the block ends. Raises ReplicaLeft if the sampler
        leaves.
        """
        async with AsyncExitStack() as held:
            work.pending.progress.queue(
                lambda: f"waiting for a place in a sampler: {sampler.describe(turn)}", QueueState.PAUSED
            )
            await held.enter_async_context(sampler.slot(turn))
            work.pending.progress.wait_on("waiting for the weights to be loaded")
            work.pending.begin()
            snapshot_id = work.snapshot_id = work.sampling.snapshot_id
            self._versions.want(snapshot_id)
            using = held.enter_context(ExitStack())
            using.enter_context(work.base.snapshots.using(snapshot_id))
            with stage("weights", Kind.SAMPLE.value):
                resident = await work.base.snapshots.resident_for(snapshot_id)
                work.is_following = resident == snapshot_id and work.sampling.followed_model_id is not None
                await held.enter_async_context(sampler.weights_lock.hold(resident, work.is_following))
                if work.is_following:
                    using.close()  # The sampler has them, and another try takes the newest.
                if resident != snapshot_id:
                    peers = [peer for peer in work.base.samplers.up if peer.weights_lock.resident == resident]
                    await work.base.snapshots.ensure_adapter(sampler, snapshot_id, peers)
            sampler.check_stays()
            yield sampler

    async def _sample(self, sampler: Sampler, work: SampleWork, turn: Turn) -> Events:
        request = sampler_pb2.SampleRequest(
            request_id=work.pending.submission.future_id,
            snapshot_id=work.snapshot_id,
            prompt=work.rendered,
            target_tokens=targets.to_score(work.cells) if work.cells else None,
            **{name: getattr(work.request, name) for name in _OPTIONS},
            at_once=work.at_once,
            follow_updates=work.is_following,
            answer=work.answer,
            # Owners do not share cache entries, because an owner could learn another's prompts from cache hits.
            cache_salt=work.pending.submission.owner,
        )
        self._note_sampling()
        usage, prompt_tokens = work.pending.usage, len(request.prompt.tokens) // 4
        sampled_before = usage.sampled_tokens
        try:
            running = metrics.SAMPLES_RUNNING.labels(sampler.address).track_inprogress()
            with stage("sample", Kind.SAMPLE.value), running:
                answer = cast(Events, sampler.client.sample(request, self._timeout_s))
                async with aclosing(answer) as events:
                    async for event in events:
                        usage.sampled_tokens += len(event.delta.tokens) // 4 + event.written.token_count
                        usage.cached_tokens += event.prompt.cached_token_count
                        if event.delta.finish_reason or event.written.is_last:
                            sampler.free(turn, 1)
                        yield event
            usage.prompt_tokens += prompt_tokens
            turn.settle(prompt_tokens + usage.sampled_tokens - sampled_before)
        except SnapshotNotLoaded:
            turn.settle(0)
            sampler.note_not_loaded(work.snapshot_id)
            raise
        except Unavailable as error:
            work.breaks += 1
            sampler.mark_down(str(error))
            raise

    def _note_sampling(self) -> None:
        if (task := asyncio.current_task()) and task not in self.tasks_in_samplers:
            self.tasks_in_samplers.add(task)
            task.add_done_callback(self.tasks_in_samplers.discard)

    async def _mend(self, work: SampleWork, error: FoveaError) -> None:
        """Prepares the next try, or raises the error if the request cannot be retried."""
        if task := asyncio.current_task():
            self.tasks_in_samplers.discard(task)
        if isinstance(error, SnapshotNotLoaded | FeatureEvicted):
            work.mends += 1
            if work.mends > _MENDS:
                raise error
            if isinstance(error, FeatureEvicted):
                work.rendered = None
        elif isinstance(error, RestoreInProgress):
            work.outage = None
            work.pending.progress.wait_on(error.message, QueueState.PAUSED)
            await asyncio.sleep(_LONGEST_PAUSE_S)
        elif isinstance(error, Unavailable) and not isinstance(error, ModelLost):
            if work.outage is None:
                work.outage = Backoff(self._retry_deadline_s, longest_s=_LONGEST_PAUSE_S)
                logger.info("sample %s waits: %s", work.pending.submission.future_id, error)
            if work.outage.is_over:
                raise Unavailable(
                    f"gave up after {self._retry_deadline_s:.0f} s: {error.message}. Send the request again"
                ) from None
            work.breaks += isinstance(error, LoadFailed)
            if work.breaks > _BREAKS:
                raise Unavailable(
                    f"gave up: samplers failed {work.breaks} times with this request: {error.message}"
                ) from None
            work.pending.progress.wait_on(error.message, QueueState.PAUSED)
            await work.outage.pause()
            await work.base.samplers.wait_up(work.outage.left_s)
        else:
            raise error
        metrics.SAMPLE_RETRIES.labels(error.reason).inc()
        logger.debug("retrying sample %s: %s", work.pending.submission.future_id, error)

    async def _check(self, work: SampleWork) -> None:
        assert work.rendered is not None
        length = len(work.rendered.tokens) // 4
        _check_last_n(work.request, length)
        if work.request.HasField("target_table"):
            work.cells = targets.read_table(work.request.target_table)
            targets.check_table(work.cells, length, (await work.base.renderers.info()).vocabulary_size)
        info = work.base.samplers.info
        if info is None:
            return  # the sampler itself checks too
        check_limits(work.request, info)
        params = work.request.params
        check_context(length, params.max_tokens if params.HasField("max_tokens") else 1, info.max_context_length)


def most_tokens(request: gateway_pb2.SampleTokensRequest, prompt_tokens: int, max_context_length: int) -> int:
    """Returns the maximum number of tokens of a sample, including its prompt."""
    most = request.params.max_tokens if request.params.HasField("max_tokens") else max_context_length
    return prompt_tokens + max(request.sample_count, 0) * max(min(most, max_context_length - prompt_tokens), 0)


def check_limits(request: gateway_pb2.SampleTokensRequest, info: sampler_pb2.GetSamplerInfoResponse) -> None:
    """Raises InvalidInput for counts above the limits of the samplers."""
    for name, value, least, most in (
        ("num_samples", request.sample_count, 1, info.max_sample_count),
        ("topk_prompt_logprobs", request.top_prompt_logprobs, 0, info.max_top_logprobs),
        ("topk_sample_logprobs", request.top_sample_logprobs, 0, info.max_top_logprobs),
        ("prompt_alt_tokens_k", request.alt_token_count, 0, info.max_top_logprobs),
        ("prompt_logprobs_last_n", request.prompt_logprobs_last_n, 0, info.max_context_length),
    ):
        if not least <= value <= most:
            raise InvalidInput(f"{name} is {value}; it must be {least} .. {most}", field=name)


def _check_last_n(request: gateway_pb2.SampleTokensRequest, token_count: int) -> None:
    last_n, field = request.prompt_logprobs_last_n, "prompt_logprobs_last_n"
    if not last_n:
        return
    if not request.prompt_logprobs:
        raise InvalidInput(f"{field} needs prompt_logprobs; ask for them, or leave it out", field=field)
    if last_n >= token_count:
        raise InvalidInput(
            f"{field} is {last_n}; it must be 1 .. {token_count - 1}, less than the prompt's {token_count} tokens",
            field=field,
        )
