"""Answers in OpenAI's format. A sampler plans what to sample, the gateway samples it, and the sampler formats the
answer.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fovea.api.v1 import gateway_pb2, model_input_pb2, sampler_pb2
from fovea.wire.conventions import MESSAGE_BYTES
from fovea.wire.errors import FoveaError, Internal, InvalidInput, PayloadTooLarge
from fovea_gateway.openai.message_images import MessageImage, take_images
from fovea_gateway.replicas.base_models import BaseModels
from fovea_gateway.sampling.sampling_session import SamplingSession
from fovea_gateway.sampling.sampling_sessions import Sampling

_TEXT_BYTES = MESSAGE_BYTES - 2**16
_CHUNK = re.compile(r"(?:prompt(?:\.|: ))?chunks\[(\d+)\](?:\.image(?:_reference)?)?")
_PREFIX = re.compile(r"^(sampling_params|params)\.")

Told = asyncio.Queue[sampler_pb2.AnswerOpenAIRequest | None]
"""Messages to the sampler; None ends the stream."""


@dataclass(frozen=True)
class Asked:
    """A request: its body without images, and its images."""

    model: str
    message: sampler_pb2.OpenAIRequest
    images: list[MessageImage]

    @classmethod
    def of(cls, route: "sampler_pb2.OpenAIRoute", body: dict[str, Any]) -> "Asked":
        """Reads a body, and removes its images.

        Raises InvalidInput or Unimplemented, which name the field of an image, and PayloadTooLarge.
        """
        model = body.get("model")
        if not isinstance(model, str) or not model:
            raise InvalidInput("model is missing: name a base model, or a tinker:// path", field="model")
        images = take_images(body)
        text = json.dumps(body, ensure_ascii=False).encode()
        if len(text) > _TEXT_BYTES:
            raise PayloadTooLarge(f"the request has {len(text)} bytes without its images; at most {_TEXT_BYTES}")
        return cls(model, sampler_pb2.OpenAIRequest(route=route, body=text, image_count=len(images)), images)


class OpenAIAnswers:
    """Answers requests to OpenAI's API."""

    def __init__(self, sampling: Sampling, base_models: BaseModels) -> None:
        self._sampling, self._base_models = sampling, base_models

    async def answer(self, owner: str, asked: Asked) -> AsyncGenerator[bytes]:
        """Yields the body of the answer in chunks. Closing the generator frees the engine.

        Raises NotFound for an unknown model, the sampler's errors about the request, and the errors of sampling.
        """
        sampling, max_side = await self._named(owner, asked.model)
        for image in asked.images:
            image.limit_side(max_side)
        sampler = self._base_models.get(sampling.base_model).samplers.least_busy()
        told: Told = asyncio.Queue()
        told.put_nowait(sampler_pb2.AnswerOpenAIRequest(request=asked.message))
        async with aclosing(sampler.client.answer_openai(_drain(told))) as steps:  # type: ignore[type-var]
            plan = (await anext(steps, sampler_pb2.AnswerOpenAIResponse())).plan
            work = asyncio.create_task(self._sample_all(sampling, plan, asked.images, told), name="openai")
            try:
                async for step in steps:
                    yield step.answer
            except FoveaError:
                # Once sampling has failed, the sampler fails too, for lack of input: report the first error.
                if work.done() and not work.cancelled() and (failure := work.exception()) is not None:
                    raise failure from None
                raise
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                told.put_nowait(None)  # otherwise gRPC's task waits for it forever

    async def _named(self, owner: str, model: str) -> tuple[SamplingSession, int]:
        try:
            return await self._sampling.named(owner, model)
        except FoveaError as error:
            raise type(error)(error.message, "model", **error.metadata) from None

    async def _sample_all(
        self, sampling: SamplingSession, plan: sampler_pb2.OpenAIPlan, images: list[MessageImage], told: Told
    ) -> None:
        """Samples every prompt and forwards the events to the sampler. If a prompt fails, the stream to the sampler
        ends.
        """
        tasks: list[asyncio.Task[None]] = []
        try:
            for index, prompt in enumerate(plan.prompts):
                _place(prompt, images)
                tasks.append(asyncio.create_task(self._sample(sampling, plan, index, told), name=f"openai {index}"))
            await asyncio.gather(*tasks)
        except FoveaError as error:
            told.put_nowait(None)
            raise _in_their_words(error, plan, images) from None
        except Exception:
            told.put_nowait(None)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, sampling: SamplingSession, plan: sampler_pb2.OpenAIPlan, index: int, told: Told) -> None:
        request = gateway_pb2.SampleTokensRequest(
            prompt=plan.prompts[index], sample_count=plan.sample_count, params=plan.params,
            top_sample_logprobs=plan.top_sample_logprobs,
        )  # fmt: skip
        # The alternatives (logprobs) of a whole sequence may not fit into one message.
        as_it_comes = plan.is_stream or plan.top_sample_logprobs > 0
        is_first = True
        async with aclosing(self._sampling.run(sampling, request, as_it_comes=as_it_comes)) as events:  # type: ignore[type-var]
            async for ids, event in events:
                kind = event.WhichOneof("event")
                sampled = sampler_pb2.SampledEvent(
                    prompt_index=index,
                    prompt_tokens=ids if is_first else b"",
                    event=sampler_pb2.SampleResponse(**{kind: getattr(event, kind)}),
                )
                is_first = False
                told.put_nowait(sampler_pb2.AnswerOpenAIRequest(sampled=sampled))


async def _drain(told: Told) -> AsyncIterator[sampler_pb2.AnswerOpenAIRequest]:
    while (message := await told.get()) is not None:
        yield message


def _place(prompt: model_input_pb2.ModelInput, images: list[MessageImage]) -> None:
    """Puts the images into the slots that the sampler left. Raises Internal if their numbers differ."""
    places = [chunk for chunk in prompt.chunks if chunk.WhichOneof("kind") == "image"]
    if len(places) != len(images):
        raise Internal(f"the sampler's prompt has room for {len(places)} images, but the request has {len(images)}")
    for chunk, image in zip(places, images, strict=True):
        chunk.CopyFrom(image.chunk)


def _in_their_words(error: FoveaError, plan: sampler_pb2.OpenAIPlan, images: list[MessageImage]) -> FoveaError:
    """Returns the error with its fields renamed to those of the client's request."""

    def field_of(match: re.Match[str]) -> str:
        index = int(match[1])
        if len(plan.prompts) != 1 or index >= len(plan.prompts[0].chunks):
            return match[0]
        before = [chunk for chunk in plan.prompts[0].chunks[: index + 1] if chunk.WhichOneof("kind") != "tokens"]
        is_image = plan.prompts[0].chunks[index].WhichOneof("kind") != "tokens"
        return images[len(before) - 1].field if is_image else "messages"

    field = _PREFIX.sub("", _CHUNK.sub(field_of, error.field or "")) or None
    return type(error)(_CHUNK.sub(field_of, error.message), field, **error.metadata)
