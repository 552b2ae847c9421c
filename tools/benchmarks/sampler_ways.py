"""Three ways to sample from one model: vLLM itself, Fovea over gRPC, and Fovea over REST with the official SDK."""

import hashlib
import itertools
import os
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tinker
from tinker import types

from benchmarks.client import Bench
from benchmarks.running import Running
from fovea.api.v1 import gateway_pb2, model_input_pb2, sampler_pb2
from fovea.client import GatewayClient, RendererClient
from fovea.runtime.credentials import SECRET_VARIABLE
from fovea.wire.rendered_input import ImageSpan
from fovea.wire.tensors import decode_tokens, encode_tokens

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(frozen=True)
class Timing:
    """Timing of one sample in seconds from the call. Without streaming, the first token is at the end."""

    first_token: float
    whole: float
    token_count: int


class Way(Protocol):
    """A way to sample. All ways draw the same number of tokens at temperature 1, ignoring end-of-sequence tokens."""

    name: str

    async def prepare(self, inputs: Sequence[types.ModelInput]) -> list[Any]:
        """Converts inputs to this way's format; not measured."""

    async def sample(self, prepared: Any) -> Timing:
        """Draws one sequence."""

    async def close(self) -> None:
        """Closes connections."""


class Sdk:
    """The official SDK over REST."""

    name = "sdk"

    def __init__(self, bench: Bench, new_tokens: int) -> None:
        self._client: tinker.SamplingClient = bench.service.create_sampling_client(base_model=bench.model).result(60)
        self._params = types.SamplingParams(max_tokens=new_tokens, temperature=1.0, stop=[])

    async def prepare(self, inputs: Sequence[types.ModelInput]) -> list[Any]:
        """See Way."""
        return list(inputs)

    async def sample(self, prepared: Any) -> Timing:
        """See Way."""
        begun = time.perf_counter()
        response = await self._client.sample(prepared, 1, self._params)
        whole = time.perf_counter() - begun
        return Timing(whole, whole, len(response.sequences[0].tokens))

    async def close(self) -> None:
        """See Way."""


class Grpc:
    """Fovea's own API over gRPC."""

    name = "grpc"

    def __init__(self, running: Running, api_key: str, new_tokens: int) -> None:
        self._client = GatewayClient(running.addresses["gateway"], api_key)
        self._base_model = running.model_name
        self._session_id = self._sampling_id = ""
        stop = sampler_pb2.StopCondition(ignore_eos=True)
        self._params = sampler_pb2.SamplingParams(max_tokens=new_tokens, temperature=1.0, stop=stop)

    async def prepare(self, inputs: Sequence[types.ModelInput]) -> list[Any]:
        """See Way."""
        if not self._session_id:
            self._session_id = await self._client.create_session()
            self._sampling_id = await self._client.create_sampling_session(self._session_id, 0, self._base_model)
        await self._client.heartbeat(self._session_id)
        return [
            gateway_pb2.SampleTokensRequest(
                sampling_session_id=self._sampling_id, prompt=as_proto(one), sample_count=1, params=self._params
            )
            for one in inputs
        ]

    async def sample(self, prepared: Any) -> Timing:
        """See Way."""
        begun, first, count = time.perf_counter(), 0.0, 0
        async with aclosing(self._client.sample(prepared)) as events:  # type: ignore[type-var]
            async for event in events:
                if event.WhichOneof("event") == "delta":
                    first = first or time.perf_counter() - begun
                    count += len(decode_tokens(event.delta.tokens))
        return Timing(first, time.perf_counter() - begun, count)

    async def close(self) -> None:
        """See Way."""
        await self._client.finish_session(self._session_id)
        await self._client.close()


class Direct:
    """vLLM's AsyncLLM in this process, with rendered prompts.

    Attributes:
        render_s: Seconds of each render of a new image, one at a time.
        rerender_s: Seconds of each render of a known image.
        fetch_s: Seconds of each fetch of an image's tensors from the renderer.
        tensor_bytes: Bytes of the tensors of one image.
    """

    name = "direct"

    def __init__(self, llm: "AsyncLLM", running: Running, new_tokens: int) -> None:
        from fovea_sampler.engine import request_conversion

        self._llm = llm
        os.environ[SECRET_VARIABLE] = running.service_secret
        self._renderer = RendererClient(running.addresses["renderer"])
        self._maker = request_conversion.PromptMaker.of(llm)
        self._drawing = sampler_pb2.SamplingParams(
            max_tokens=new_tokens, temperature=1.0, top_p=1.0, top_k=-1, stop=sampler_pb2.StopCondition(ignore_eos=True)
        )
        self._params = request_conversion.sampling_params(self._spec(np.zeros(1, np.int32), ()), 0, (), None)
        self._numbers = itertools.count()
        self._seen: set[str] = set()
        self.render_s: list[float] = []
        self.rerender_s: list[float] = []
        self.fetch_s: list[float] = []
        self.tensor_bytes = 0

    async def prepare(self, inputs: Sequence[types.ModelInput]) -> list[Any]:
        """See Way."""
        return [await self._prompt(as_proto(one)) for one in inputs]

    async def sample(self, prepared: Any) -> Timing:
        """See Way."""
        begun, first, count = time.perf_counter(), 0.0, 0
        request_id = f"direct-{next(self._numbers)}"
        async with aclosing(self._llm.generate(prepared, self._params, request_id)) as outputs:
            async for output in outputs:
                first = first or time.perf_counter() - begun
                count += len(output.outputs[0].token_ids)
        return Timing(first, time.perf_counter() - begun, count)

    async def close(self) -> None:
        """See Way."""
        await self._renderer.close()

    async def _prompt(self, model_input: model_input_pb2.ModelInput) -> Any:
        rendered = await self._render(model_input)
        features, spans = [], []
        for span in rendered.spans:
            begun = time.perf_counter()
            fetched = await self._renderer.fetch_features([span.feature.digest])
            self.fetch_s.append(time.perf_counter() - begun)
            features.append(fetched[span.feature.digest])
            self.tensor_bytes = sum(array.nbytes for array in features[-1].values())
            spans.append(ImageSpan(span.offset, np.ones(span.length, np.bool_), span.feature))
        tokens = np.frombuffer(rendered.tokens, np.int32)
        return self._maker.make(self._spec(tokens, tuple(spans)), features)

    async def _render(self, model_input: model_input_pb2.ModelInput) -> model_input_pb2.RenderedInput:
        pictures = [chunk.image.data for chunk in model_input.chunks if chunk.WhichOneof("kind") == "image"]
        digest = hashlib.sha256(b"".join(pictures)).hexdigest()
        begun = time.perf_counter()
        rendered = await self._renderer.render(model_input)
        if pictures:
            (self.rerender_s if digest in self._seen else self.render_s).append(time.perf_counter() - begun)
        self._seen.add(digest)
        return rendered

    def _spec(self, tokens: "np.ndarray[Any, np.dtype[np.int32]]", spans: tuple[Any, ...]) -> Any:
        from fovea_sampler.engine_api import SampleSpec

        return SampleSpec(sampler_pb2.SampleRequest(sample_count=1), self._drawing, tokens, spans)


def as_proto(model_input: types.ModelInput) -> model_input_pb2.ModelInput:
    """Converts the SDK's input to Fovea's message."""
    found = model_input_pb2.ModelInput()
    for chunk in model_input.chunks:
        if isinstance(chunk, types.ImageChunk):
            picture = found.chunks.add().image
            picture.data, picture.format = bytes(chunk.data), model_input_pb2.IMAGE_FORMAT_JPEG
        else:
            assert isinstance(chunk, types.EncodedTextChunk)
            found.chunks.add().tokens.tokens = encode_tokens(chunk.tokens)
    return found
