"""Routes of OpenAI's API below /v1, and /v1/messages of Anthropic's API, with the errors of each."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fovea.api.v1 import gateway_pb2, sampler_pb2
from fovea.wire.errors import ContextOverflow, FoveaError, NotFound, Unauthenticated
from fovea_gateway.access.api_keys import SUBJECT, Scope
from fovea_gateway.checkpoints.checkpoint import SAMPLER, SCHEME, Checkpoint
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints, Search
from fovea_gateway.fronts.openai_answers import Asked, OpenAIAnswers
from fovea_gateway.http.endpoint import REQUEST_ID, Api, Endpoints, Json
from fovea_gateway.http.request_body import (
    ELEMENT_BYTES,
    check_json_elements,
    off_loop,
    off_loop_by_size,
    parse_loosely,
    read,
)

T = TypeVar("T")

_ELEMENTS = 2**20
"""The maximum number of tokens in a prompt of token ids, and more than the commas of any conversation."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 503: "overloaded_error"}
_MOST_LISTED = 1000
_STARTED = int(time.time())


def openai_error(error: FoveaError) -> Response:
    """Returns an error in OpenAI's format. Its `code` is OpenAI's if OpenAI has one for this error, otherwise Fovea's
    reason.
    """
    status = error.http_status
    code = error.reason.lower()
    if isinstance(error, ContextOverflow):
        code = "context_length_exceeded"
    elif isinstance(error, Unauthenticated):
        code = "invalid_api_key"
    elif isinstance(error, NotFound) and error.field == "model":
        code = "model_not_found"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"message": error.message, "type": kind, "param": error.field, "code": code}
    return Json({"error": body}, status_code=status, headers={"x-request-id": REQUEST_ID.get()})


def anthropic_error(error: FoveaError) -> Response:
    """Returns an error in the format of Anthropic's API."""
    status, field = error.http_status, f" (field {error.field})" if error.field else ""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    body = {"type": "error", "error": {"type": kind, "message": f"{error.message}{field}"}}
    name = REQUEST_ID.get()
    return Json(body | {"request_id": name}, status_code=status, headers={"request-id": name})


OPENAI = Api("/v1/", openai_error)
ANTHROPIC = Api("/v1/", anthropic_error)


class OpenAIRoutes:
    """Handlers of OpenAI's API.

    Args:
        served_models: Returns the served base models.
        max_body_bytes: The largest body, images included.
    """

    def __init__(
        self,
        answers: OpenAIAnswers,
        served_models: Callable[[], Awaitable[list[gateway_pb2.ServedModel]]],
        checkpoints: Checkpoints,
        max_body_bytes: int,
    ) -> None:
        self._answers, self._served_models, self._checkpoints = answers, served_models, checkpoints
        self._max_body_bytes = max_body_bytes

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.route("GET", "models", self.list_models, Scope.SAMPLE, OPENAI),
            endpoints.route("GET", "models/{model:path}", self.get_model, Scope.SAMPLE, OPENAI),
            endpoints.route("POST", "chat/completions", self.chat, Scope.SAMPLE, OPENAI),
            endpoints.route("POST", "completions", self.complete, Scope.SAMPLE, OPENAI),
            endpoints.route("POST", "responses", self.respond, Scope.SAMPLE, OPENAI),
            endpoints.route("POST", "messages", self.message, Scope.SAMPLE, ANTHROPIC),
        ]

    async def list_models(self, request: Request, owner: str) -> Response:
        """Lists the base models, and the newest of the caller's checkpoints to sample from, newest first."""
        checkpoints = await self._checkpoints.search(Search(owner, _MOST_LISTED, segment=SAMPLER))
        saved = [_checkpoint_json(one) for one in checkpoints]
        return Json({"object": "list", "data": [*await self._base_models(), *saved]})

    async def get_model(self, request: Request, owner: str) -> Response:
        """Returns a base model, or a checkpoint that the caller may read."""
        name = request.path_params["model"]
        if name.startswith(SCHEME):
            return Json(_checkpoint_json(await self._checkpoints.find_sampler(owner, name)))
        for model in await self._base_models():
            if model["id"] == name:
                return Json(model)
        raise NotFound(f"model {name!r} is not served; GET /v1/models lists those that are", field="model")

    async def chat(self, request: Request, owner: str) -> Response:
        return await self._answer(request, owner, sampler_pb2.OPEN_AI_ROUTE_CHAT_COMPLETIONS)

    async def complete(self, request: Request, owner: str) -> Response:
        return await self._answer(request, owner, sampler_pb2.OPEN_AI_ROUTE_COMPLETIONS)

    async def respond(self, request: Request, owner: str) -> Response:
        return await self._answer(request, owner, sampler_pb2.OPEN_AI_ROUTE_RESPONSES)

    async def message(self, request: Request, owner: str) -> Response:
        return await self._answer(request, owner, sampler_pb2.OPEN_AI_ROUTE_MESSAGES, ANTHROPIC)

    async def _answer(
        self, request: Request, owner: str, route: "sampler_pb2.OpenAIRoute", api: Api = OPENAI
    ) -> Response:
        blob = await read(request, self._max_body_bytes)
        # The body counts twice, for its text and for its images as bytes; each element counts as a Python object.
        count = await off_loop(check_json_elements, blob, _ELEMENTS)
        request.state.incoming.memory.take(2 * len(blob) + count * ELEMENT_BYTES)
        body = await off_loop(parse_loosely, blob, _ELEMENTS)
        is_stream = bool(body.get("stream"))
        asked = await off_loop_by_size(len(blob), Asked.of, route, body)
        SUBJECT.set(asked.model)
        pieces = self._answers.answer(owner, asked)
        headers = {"x-request-id": REQUEST_ID.get()}
        if not is_stream:
            whole = await _while_connected(request, _joined(pieces))
            return Response(whole, media_type="application/json", headers=headers)
        # Errors in the request are known before the first chunk, while the status can still be set.
        first = await _while_connected(request, anext(pieces, b""))
        headers["cache-control"] = "no-cache"
        has_names = route in (sampler_pb2.OPEN_AI_ROUTE_RESPONSES, sampler_pb2.OPEN_AI_ROUTE_MESSAGES)
        events = _streamed(first, pieces, b"event: error\n" if has_names else b"", api)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def _base_models(self) -> list[dict[str, Any]]:
        return [
            {
                "id": served.name,
                "object": "model",
                "created": _STARTED,
                "owned_by": "fovea",
                "max_model_len": served.max_context_length,
            }
            for served in await self._served_models()
        ]


def _checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "id": checkpoint.path,
        "object": "model",
        "created": int(checkpoint.created_at),
        "owned_by": checkpoint.owner,
        "root": checkpoint.base_model,
    }


async def _joined(pieces: AsyncGenerator[bytes]) -> bytes:
    async with aclosing(pieces):
        return b"".join([piece async for piece in pieces])


async def _streamed(first: bytes, pieces: AsyncGenerator[bytes], name: bytes, api: Api) -> AsyncGenerator[bytes]:
    """Yields the events. An error is the last event, since the status has been sent already."""
    async with aclosing(pieces):
        yield first
        try:
            async for piece in pieces:
                yield piece
        except FoveaError as error:
            yield name + b"data: " + bytes(api.answer_error(error).body) + b"\n\n"


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`, which is cancelled when the client disconnects. Raises ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_until_gone(request), name="client")
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
