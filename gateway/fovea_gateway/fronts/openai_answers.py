"""Answers in OpenAI's format. A sampler plans what to sample, the gateway samples, and the sampler formats the answer.

Images are removed from the messages first, since only the renderer reads them."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fovea.api.v1 import gateway_pb2, model_input_pb2, sampler_pb2
from fovea.wire.conventions import MESSAGE_BYTES, QUESTION, SYSTEM_PROMPT, picture_side
from fovea.wire.errors import FoveaError, Internal, InvalidInput, NotFound, PayloadTooLarge, Unimplemented
from fovea_gateway.checkpoints.checkpoint import SCHEME
from fovea_gateway.http.model_inputs import decode_image
from fovea_gateway.replicas.base_models import BaseModels
from fovea_gateway.sampling.sample_runner import SamplingSession
from fovea_gateway.sampling.sampling_sessions import Sampling

_COUNTS_S = 5.0
_TEXT_BYTES = MESSAGE_BYTES - 2**16
_CHUNK = re.compile(r"(?:prompt(?:\.|: ))?chunks\[(\d+)\](?:\.image(?:_reference)?)?")
_PREFIX = re.compile(r"^(sampling_params|params)\.")

_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": model_input_pb2.IMAGE_FORMAT_PNG,
    b"\xff\xd8\xff": model_input_pb2.IMAGE_FORMAT_JPEG,
}
_ENDINGS = {
    ".png": model_input_pb2.IMAGE_FORMAT_PNG,
    ".jpg": model_input_pb2.IMAGE_FORMAT_JPEG,
    ".jpeg": model_input_pb2.IMAGE_FORMAT_JPEG,
}
_IMAGE_FIELDS = {"image_url": "image_url", "input_image": "image_url", "image": "source"}
"""The field of an image by the type of its part: of chat completions, the Responses API, and Anthropic's API."""
_DETAILS = (None, "auto", "high")
"""A request cannot choose the size: the checkpoint's own limit applies, then the model's processor."""


class MessageImage(NamedTuple):
    """An image, and the field that contained it."""

    field: str
    chunk: model_input_pb2.Chunk

    def limit_side(self, max_side: int) -> None:
        """Tells the renderer to shrink the image to `max_side` pixels on its longer side; 0 leaves the size
        unchanged.
        """
        image = self.chunk.image if self.chunk.WhichOneof("kind") == "image" else self.chunk.image_reference
        image.max_side = max_side


Told = asyncio.Queue[sampler_pb2.AnswerOpenAIRequest | None]
"""Messages to the sampler; None ends the stream."""


@dataclass(frozen=True)
class Asked:
    """A client's request, split into its body without images and its images."""

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
    """The answers to requests of OpenAI's API."""

    def __init__(self, sampling: Sampling, base_models: BaseModels) -> None:
        self._sampling, self._base_models = sampling, base_models

    async def answer(self, owner: str, asked: Asked) -> AsyncGenerator[bytes]:
        """Yields the body of the answer in chunks. Closing the generator frees the engine.

        Raises NotFound for an unknown model, the sampler's errors about the request, and the errors of sampling.
        """
        sampling, metadata = await self._named(owner, asked.model)
        for image in asked.images:
            image.limit_side(picture_side(metadata) or 0)
        sampler = self._base_models.get(sampling.base_model).samplers.least_busy()
        told: Told = asyncio.Queue()
        told.put_nowait(sampler_pb2.AnswerOpenAIRequest(request=_with_question(asked.message, metadata)))
        async with aclosing(sampler.client.answer_openai(_drain(told))) as steps:  # type: ignore[type-var]
            plan = (await anext(steps, sampler_pb2.AnswerOpenAIResponse())).plan
            work = asyncio.create_task(self._sample_all(sampling, plan, asked.images, told), name="openai")
            try:
                async for step in steps:
                    yield step.answer
                # The sampler may send the last counts of tokens, which are charged, after the end of the answer.
                await asyncio.wait((work,), timeout=_COUNTS_S)
            except FoveaError:
                # Once sampling has failed, the sampler fails too, for lack of input: report the first error.
                if work.done() and not work.cancelled() and (failure := work.exception()) is not None:
                    raise failure from None
                raise
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                told.put_nowait(None)  # otherwise gRPC's task waits for it forever

    async def _named(self, owner: str, model: str) -> tuple[SamplingSession, Mapping[str, str]]:
        try:
            return await self._sampling.named(owner, model)
        except FoveaError as error:
            is_name = isinstance(error, NotFound) and not model.startswith(SCHEME)
            hint = ", or a checkpoint's path (tinker://RUN/sampler_weights/NAME)" if is_name else ""
            raise type(error)(error.message + hint, "model", **error.metadata) from None

    async def _sample_all(
        self, sampling: SamplingSession, plan: sampler_pb2.OpenAIPlan, images: list[MessageImage], told: Told
    ) -> None:
        """Samples every prompt, for the sampler that writes the answer. If a prompt fails, the stream to it ends."""
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
            top_sample_logprobs=plan.top_sample_logprobs, sampled_support=plan.sampled_support,
        )  # fmt: skip
        # The alternatives (logprobs) or the supports of a whole sequence may not fit into one message.
        as_it_comes = plan.is_stream or plan.top_sample_logprobs > 0 or plan.sampled_support
        answer = sampler_pb2.OpenAIAnswer(answer_id=plan.answer_id, prompt_index=index)
        is_first = True
        async with aclosing(self._sampling.run(sampling, request, answer, as_it_comes=as_it_comes)) as events:  # type: ignore[type-var]
            async for ids, event in events:
                if event.WhichOneof("event") != "delta":
                    continue
                # Another sampler than the one that writes the answer drew these tokens.
                sampled = sampler_pb2.SampledEvent(
                    prompt_index=index,
                    prompt_tokens=ids if is_first else b"",
                    event=sampler_pb2.SampleResponse(delta=event.delta),
                )
                is_first = False
                told.put_nowait(sampler_pb2.AnswerOpenAIRequest(sampled=sampled))


def _with_question(request: sampler_pb2.OpenAIRequest, metadata: Mapping[str, str]) -> sampler_pb2.OpenAIRequest:
    """Returns a chat of one image and nothing else with the texts of the checkpoint's training; any other unchanged."""
    question, system = metadata.get(QUESTION), metadata.get(SYSTEM_PROMPT)
    if not question or request.image_count != 1 or request.route != sampler_pb2.OPEN_AI_ROUTE_CHAT_COMPLETIONS:
        return request
    body = json.loads(request.body)
    match body.get("messages"):
        case [{"role": "user", "content": [{"type": "image_url"}] as content}]:
            content.append({"type": "text", "text": question})
            if system:
                body["messages"].insert(0, {"role": "system", "content": system})
        case _:
            return request
    text = json.dumps(body, ensure_ascii=False).encode()
    return sampler_pb2.OpenAIRequest(route=request.route, body=text, image_count=request.image_count)


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


def take_images(body: dict[str, Any]) -> list[MessageImage]:
    """Removes the images from a request's conversation and returns them in order. An empty part remains for each.

    Conversations are `messages`, or `input` in the Responses API. Raises InvalidInput or Unimplemented, which name the
    field, for values that are not images or cannot be fetched.
    """
    images: list[MessageImage] = []
    try:
        for name in ("messages", "input"):
            items = body.get(name)
            for index, item in enumerate(items if isinstance(items, list) else ()):
                images += _images_of(item, f"{name}.{index}")
    except RecursionError:
        raise InvalidInput("the conversation nests too deeply") from None
    return images


def _images_of(item: Any, path: str) -> Iterator[MessageImage]:
    """Removes the images from the parts of a message, or of a tool's result."""
    for name in ("content", "output"):
        parts = item.get(name) if isinstance(item, dict) else None
        for place, part in enumerate(parts if isinstance(parts, list) else ()):
            field = f"{path}.{name}.{place}"
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in _IMAGE_FIELDS:
                field = f"{field}.{_IMAGE_FIELDS[kind]}"
                yield MessageImage(field, _read_image(_openai_image(part), field))
                part.clear()
                part.update(type="image_url", image_url=None, uuid="0")
            else:
                yield from _images_of(part, field)


def _openai_image(part: dict[str, Any]) -> Any:
    """Returns the image of a part in the form of chat completions."""
    if part["type"] == "image_url":
        return part.get("image_url")
    if part["type"] == "input_image":
        return {"url": part.get("image_url"), "detail": part.get("detail")}
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return source


def _read_image(value: Any, field: str) -> model_input_pb2.Chunk:
    url, detail = (value.get("url"), value.get("detail")) if isinstance(value, dict) else (value, None)
    if not isinstance(url, str):
        raise InvalidInput(f"{field}.url is missing; send data:image/png;base64,... there", field=f"{field}.url")
    if detail not in _DETAILS:
        raise Unimplemented(
            f"{field}.detail is {detail!r}, which is not supported: leave it out, and send a smaller image instead",
            field=f"{field}.detail",
        )
    scheme, _, rest = url.partition(":")
    if scheme == "data":
        return _read_data(rest, f"{field}.url")
    if scheme in ("http", "https"):
        return _refer(url, f"{field}.url")
    raise InvalidInput(f"{field}.url begins with {url[:20]!r}; send data:image/png;base64,...", field=f"{field}.url")


def _read_data(rest: str, field: str) -> model_input_pb2.Chunk:
    kind, _, text = rest.partition(",")
    if not kind.endswith(";base64"):
        raise InvalidInput(f"{field} is not base64; send data:image/png;base64,...", field=field)
    data = decode_image(text, field)
    found = next((image_format for start, image_format in _SIGNATURES.items() if data.startswith(start)), None)
    if found is None:
        raise InvalidInput(f"{field} ({kind.removesuffix(';base64')}) is neither PNG nor JPEG; convert it", field=field)
    return model_input_pb2.Chunk(image=model_input_pb2.ImageChunk(data=data, format=found))


def _refer(url: str, field: str) -> model_input_pb2.Chunk:
    """Returns a reference to an image by its URL. The renderer fetches the image if its operator listed the host;
    otherwise it reports an error.
    """
    try:
        path = urlsplit(url).path.lower()
    except ValueError as error:
        raise InvalidInput(f"{field} is not a URL: {error}", field=field) from None
    found = next((image_format for ending, image_format in _ENDINGS.items() if path.endswith(ending)), None)
    if found is None:
        raise InvalidInput(
            f"{field} does not end with .png, .jpg or .jpeg, so its format is unknown; send the bytes, as "
            "data:image/png;base64,...",
            field=field,
        )
    return model_input_pb2.Chunk(image_reference=model_input_pb2.ImageReference(uri=url, format=found))
