"""Serves OpenAI's API with vLLM's own serving classes, on top of a replacement engine that draws no tokens itself.

vLLM parses the request, applies the chat template, and writes the response with its tool-call parsers. The replacement
engine turns vLLM's calls into a plan. The caller of the RPC (the gateway) requests the samples of the plan. The
replacement engine returns them to vLLM, whether this sampler draws them or the caller forwards them from another one.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.entrypoints.generate.base.serving import decode_token_ids
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from fovea.api.v1 import sampler_pb2
from fovea.wire import tensors
from fovea.wire.errors import (
    FoveaError,
    Internal,
    InvalidInput,
    Unavailable,
)
from fovea_sampler.engine import message_apis, openai_requests
from fovea_sampler.engine.openai_requests import TextRenderer
from fovea_sampler.engine_api import FILLER_LOGPROB

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Step = sampler_pb2.OpenAIPlan | bytes
_Write = Callable[[Any, Any], Awaitable[Any]]
"""Calls a handler of vLLM with an engine and the names of models; returns its response, its events, or an error."""

_ANSWER_BYTES = 2**20
_WITH_CHOICES = (sampler_pb2.OPEN_AI_ROUTE_CHAT_COMPLETIONS, sampler_pb2.OPEN_AI_ROUTE_COMPLETIONS)


class OpenAIServing:
    """The server side of OpenAI's API for one model.

    Args:
        llm: The engine; only its tokenizer, chat template and configuration are used.
        tool_parser: The name of a tool-call parser of vLLM; `auto` chooses it from the chat template.
        end_ids: Tokens that end a sequence, unless a request sets `ignore_eos`.
    """

    def __init__(self, llm: "AsyncLLM", tool_parser: str, end_ids: Sequence[int]) -> None:
        self._llm = llm
        self._end_ids = frozenset(end_ids)
        self._renderer = TextRenderer(llm.renderer)
        self._options: dict[str, Any] = {
            "chat_template": None,
            "chat_template_content_format": "auto",
            "enable_auto_tools": True,
            "tool_parser": message_apis.tool_parser_of(llm.renderer.get_tokenizer())
            if tool_parser == "auto"
            else tool_parser,
        }
        self._online = OnlineRenderer(llm.model_config, self._renderer, request_logger=None, **self._options)  # type: ignore[arg-type]

    async def answer(
        self, asked: sampler_pb2.OpenAIRequest, sampled: AsyncIterator[sampler_pb2.SampledEvent], most_samples: int
    ) -> AsyncGenerator[Step]:
        """Yields the plan of what to sample, then the bytes of the response; see `engine_api.OpenAIAnswers`."""
        body: dict[str, Any] = json.loads(asked.body)
        has_support = asked.route in _WITH_CHOICES and openai_requests.take_support(body)
        request, write = await self._read(asked.route, body, most_samples)
        image_id = await self._renderer.image_id() if asked.image_count else None
        engine = _CallerEngine(
            self._llm, self._renderer, request, asked.image_count, image_id, self._end_ids, has_support
        )
        tasks = [
            asyncio.create_task(engine.listen(sampled), name="sampled"),
            asyncio.create_task(self._write(engine, write), name="answer"),
        ]
        try:
            while (step := await engine.steps.get()) is not None:
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(
        self, route: "sampler_pb2.OpenAIRoute", body: dict[str, Any], most_samples: int
    ) -> tuple[openai_requests.GenerationRequest, "_Write"]:
        """Returns the request to sample for, and a function that calls vLLM's handler with an engine."""
        common: dict[str, Any] = {"online_renderer": self._online, "request_logger": None}
        if route == sampler_pb2.OPEN_AI_ROUTE_RESPONSES:
            responses, messages = await message_apis.read_responses(body, self._renderer, most_samples)

            def respond(engine: Any, models: Any) -> Any:
                handler = message_apis.ResponsesHandler(engine, models, **common, **self._options)
                handler.messages = messages
                return handler.create_responses(responses)

            return responses, respond
        if route == sampler_pb2.OPEN_AI_ROUTE_MESSAGES:
            given, request = await message_apis.read_messages(body, self._renderer, most_samples)

            def message(engine: Any, models: Any) -> Any:
                handler = message_apis.MessagesHandler(engine, models, "assistant", **common, **self._options)
                handler.chat, handler.system_fingerprint = request, None
                return handler.create_messages(given)

            return request, message
        if "messages" in body:
            body["messages"] = await self._renderer.guard(body["messages"])
        asked = openai_requests.read(route, body, most_samples)

        def complete(engine: Any, models: Any) -> Any:
            if isinstance(asked, ChatCompletionRequest):
                chat = message_apis.ChatHandler(engine, models, "assistant", **common, **self._options)
                chat.system_fingerprint = None
                return chat.create_chat_completion(asked)
            completion = OpenAIServingCompletion(engine, models, **common)
            completion.system_fingerprint = None
            return completion.create_completion(asked)

        return asked, complete

    async def _write(self, engine: "_CallerEngine", write: "_Write") -> None:
        """Runs vLLM's handler. Puts its response and then None into `engine.steps`, or the handler's error."""
        try:
            name = engine.model_name
            models = SimpleNamespace(model_name=lambda lora: name, lora_requests={}, is_base_model=bool)
            answer = await write(engine, models)
            if isinstance(answer, ErrorResponse):
                raise openai_requests.error_of(answer)
            if isinstance(answer, AsyncGenerator):
                async for event in answer:
                    engine.put(message_apis.event_text(event).encode())
            else:
                engine.add_supports(answer)
                body = message_apis.body_of(answer).encode()
                for start in range(0, len(body), _ANSWER_BYTES):
                    engine.put(body[start : start + _ANSWER_BYTES])
            engine.steps.put_nowait(None)
        except FoveaError as error:
            engine.steps.put_nowait(error)
        except Exception as error:  # templates and parsers raise anything: vLLM decides if the client is at fault
            engine.steps.put_nowait(openai_requests.error_of(create_error_response(error)))


class _CallerEngine:
    """The replacement engine that vLLM's serving classes call during one request.

    Attributes:
        steps: The plan, then the chunks of the response, then None. An exception ends the request.
    """

    errored = False

    @property
    def model_name(self) -> str:
        """The model as the client named it."""
        return self._request.model or ""

    def __init__(
        self,
        llm: "AsyncLLM",
        renderer: TextRenderer,
        request: openai_requests.GenerationRequest,
        image_count: int,
        image_id: int | None,
        end_ids: frozenset[int],
        has_support: bool,
    ) -> None:
        self.model_config, self.vllm_config = llm.model_config, llm.vllm_config
        self.input_processor, self.renderer = llm.input_processor, renderer
        self.steps: asyncio.Queue[Step | Exception | None] = asyncio.Queue()
        self._request, self._image_count, self._image_id, self._end_ids = request, image_count, image_id, end_ids
        self._plan: sampler_pb2.OpenAIPlan | None = None
        self._inboxes: list[asyncio.Queue[sampler_pb2.SampledEvent]] = []
        self._prompts: list[list[int]] = []
        self._is_planned, self._has_support, self._early = False, has_support, list[bytes]()
        self._supports: dict[int, bytes] = {}

    def check_admission(self, count: int) -> None:
        """Accepts everything: the sampling calls of the gateway have their own limit."""

    def generate(
        self, prompt: Mapping[str, Any], params: SamplingParams, request_id: str, **ignored: Any
    ) -> AsyncGenerator[RequestOutput]:
        """Adds a prompt to the plan and returns its results.

        vLLM calls it for all prompts before it reads any result.
        """
        if self._plan is None:
            self._plan = self._new_plan(params)
        self._add_prompt(prompt["prompt_token_ids"])
        self._inboxes.append(asyncio.Queue())
        return self._results(len(self._inboxes) - 1, params, request_id)

    def put(self, piece: bytes) -> None:
        """Adds a piece of the response to `steps`, after the plan.

        vLLM 0.32's Responses API writes its first two events before it asks the engine for anything.
        """
        if self._is_planned:
            self.steps.put_nowait(piece)
        else:
            self._early.append(piece)

    async def listen(self, sampled: AsyncIterator[sampler_pb2.SampledEvent]) -> None:
        """Distributes the caller's samples to the prompts until the caller ends the stream."""
        try:
            async for one in sampled:
                if not 0 <= one.prompt_index < len(self._inboxes):
                    raise InvalidInput(
                        f"prompt_index is {one.prompt_index}, but there are {len(self._inboxes)} prompts"
                    )
                self._inboxes[one.prompt_index].put_nowait(one)
            self.steps.put_nowait(Unavailable("the caller ended the stream before every sequence had ended"))
        except FoveaError as error:
            self.steps.put_nowait(error)

    def _new_plan(self, params: SamplingParams) -> sampler_pb2.OpenAIPlan:
        stop = sampler_pb2.StopCondition(
            token_ids=params.stop_token_ids or [], strings=params.stop or [], ignore_eos=params.ignore_eos
        )
        drawn = sampler_pb2.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            seed=params.seed,
            stop=stop,
            # vLLM's default max_tokens counts an image as one token. If it is absent, the sampler fills the context.
            max_tokens=openai_requests.max_tokens_of(self._request),
            structured_outputs=openai_requests.structure_of(params),
        )
        return sampler_pb2.OpenAIPlan(
            sample_count=params.n,
            params=drawn,
            top_sample_logprobs=params.logprobs or 0,
            is_stream=bool(self._request.stream),
            sampled_support=self._has_support,
        )

    def _add_prompt(self, ids: list[int]) -> None:
        assert self._plan is not None
        prompt = self._plan.prompts.add()
        if self._image_id is None:
            prompt.chunks.add().tokens.tokens = tensors.encode_tokens(ids)
            return
        places = [place for place, token in enumerate(ids) if token == self._image_id]
        if len(places) != self._image_count:
            raise InvalidInput(
                f"messages have {self._image_count} images, but the chat template writes {len(places)}: put images "
                "only into user messages",
                field="messages",
            )
        for start, end in zip([-1, *places], [*places, len(ids)], strict=True):
            if start >= 0:
                prompt.chunks.add().image.SetInParent()
            if end > start + 1:
                prompt.chunks.add().tokens.tokens = tensors.encode_tokens(ids[start + 1 : end])

    async def _results(self, index: int, params: SamplingParams, request_id: str) -> AsyncGenerator[RequestOutput]:
        assert self._plan is not None
        if not self._is_planned:
            self._is_planned = True
            self.steps.put_nowait(self._plan)
            for piece in self._early:
                self.steps.put_nowait(piece)
        inbox, is_delta = self._inboxes[index], params.output_kind is RequestOutputKind.DELTA
        ids: list[int] = []
        sequences: list[_Sequence] = []
        while not sequences or not all(sequence.is_ended for sequence in sequences):
            sampled = await inbox.get()
            if sampled.prompt_tokens or not sequences:  # the first event of a try: a sampler may have failed before
                ids = tensors.decode_tokens(sampled.prompt_tokens).tolist()
                sequences = [self._new_sequence(number, params, ids) for number in range(params.n)]
            if sampled.event.WhichOneof("event") != "delta":
                continue
            if not sampled.event.delta.index < params.n:
                raise Internal(
                    f"the caller sampled sequence {sampled.event.delta.index}, but only {params.n} are planned"
                )
            sequence = sequences[sampled.event.delta.index]
            sequence.add(sampled.event.delta)
            if is_delta:
                is_last = all(one.is_ended for one in sequences)
                yield RequestOutput(request_id, None, ids, None, [sequence.output(is_delta)], is_last)
        self._supports |= {index * params.n + one.index: one.support for one in sequences}
        if not is_delta:
            outputs = [sequence.output(is_delta) for sequence in sequences]
            yield RequestOutput(request_id, None, ids, None, outputs, finished=True)

    def add_supports(self, answer: Any) -> None:
        """Adds to each choice of a response the ids from which each token was drawn, null for all ids; if asked."""
        for choice in answer.choices if self._has_support else ():
            ids, offsets = tensors.unpack_support(self._supports[choice.index], tensors.SUPPORT)
            rows = np.split(ids, offsets[1:-1]) if len(offsets) > 1 else []
            setattr(choice, tensors.SUPPORT, [row.tolist() or None for row in rows])

    def _new_sequence(self, index: int, params: SamplingParams, prompt_ids: list[int]) -> "_Sequence":
        ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else self._end_ids)
        return _Sequence(index, self.renderer.get_tokenizer(), params, prompt_ids, ends)


class _Sequence:
    """One sequence: it detokenizes the sampled tokens and builds vLLM's outputs."""

    def __init__(
        self, index: int, tokenizer: Any, params: SamplingParams, prompt_ids: list[int], end_ids: set[int]
    ) -> None:
        self.index, self.support = index, b""
        self._tokenizer, self._params, self._end_ids = tokenizer, params, end_ids
        request = EngineCoreRequest(
            request_id="", prompt_token_ids=prompt_ids, mm_features=None, sampling_params=params, pooling_params=None,
            arrival_time=time.time(), lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        self._text = IncrementalDetokenizer.from_new_request(tokenizer, request)
        self._tokens: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    @property
    def is_ended(self) -> bool:
        return self._finish_reason is not None

    def add(self, delta: sampler_pb2.SequenceDelta) -> None:
        """Appends the tokens of a delta."""
        tokens = tensors.decode_tokens(delta.tokens).tolist()
        is_stop = delta.finish_reason == sampler_pb2.FINISH_REASON_STOP
        is_by_token = is_stop and bool(tokens) and tokens[-1] in self._end_ids
        found = self._text.update(tokens, stop_terminated=is_by_token)
        self._tokens += tokens
        self.support += delta.sampled_support
        if self._params.logprobs is not None:
            self._logprobs += self._read_logprobs(delta, tokens)
        if delta.finish_reason == sampler_pb2.FINISH_REASON_LENGTH:
            self._finish_reason = "length"
        elif is_stop:
            self._finish_reason = "stop"
            asked = is_by_token and tokens[-1] in (self._params.stop_token_ids or ())
            special = openai_requests.special_stop(
                self._tokenizer, self._text.output_token_ids, self._params.stop or ()
            )
            self._stop_reason = tokens[-1] if asked else found or special

    def output(self, is_delta: bool) -> CompletionOutput:
        """Returns everything so far, or only the part since the last output if `is_delta`."""
        output = CompletionOutput(
            index=self.index,
            text=self._text.get_next_output_text(self.is_ended, is_delta),
            token_ids=self._tokens,
            cumulative_logprob=None,
            logprobs=self._logprobs if self._params.logprobs is not None else None,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
        )
        if is_delta:
            self._tokens, self._logprobs = [], []
        return output

    def _read_logprobs(self, delta: sampler_pb2.SequenceDelta, tokens: list[int]) -> list[dict[int, Logprob]]:
        own = np.frombuffer(delta.logprobs, "<f4").tolist()
        k = self._params.logprobs or 0
        ids = tensors.decode(delta.top_logprobs.token_ids).tolist() if k else [[]] * len(tokens)
        best = tensors.decode(delta.top_logprobs.logprobs).tolist() if k else [[]] * len(tokens)
        return [self._position(*row) for row in zip(tokens, own, ids, best, strict=True)]

    def _position(self, token: int, logprob: float, ids: list[int], best: list[float]) -> dict[int, Logprob]:
        """Returns the log-probabilities at one position: the best first, as OpenAI lists them, then the sampled one."""
        known = {each: value for each, value in zip(ids, best, strict=True) if value > FILLER_LOGPROB}
        known.setdefault(token, logprob)
        texts = decode_token_ids(list(known), self._tokenizer)
        return {
            each: Logprob(value, rank, text)
            for rank, ((each, value), (text, _)) in enumerate(zip(known.items(), texts, strict=True), 1)
        }
