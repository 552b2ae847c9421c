"""Renderers. The gateway renders pure text itself; other inputs go to the renderer that probably has their images
cached.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping

import numpy as np

from fovea.api.v1 import model_input_pb2, renderer_pb2
from fovea.client import RendererClient
from fovea.runtime.tasks import Backoff
from fovea.wire import tensors
from fovea.wire.errors import ContextOverflow, FailedPrecondition, InvalidInput, ResourceExhausted, Unavailable
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.access.fair_queue import Turn
from fovea_gateway.replicas.discovery import Discovery
from fovea_gateway.replicas.replicas import CheckFiles, Replica, ReplicaLeft, Replicas, WeightOf, find_unlike

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 0.5
_MORE = 4
"""A renderer with at most this many calls never counts as busy."""


def least_token_count(model_input: model_input_pb2.ModelInput) -> int:
    """Returns the tokens of an unrendered input: exact if every image states its count, otherwise a lower bound."""
    count = 0
    for chunk in model_input.chunks:
        if chunk.WhichOneof("kind") == "tokens":
            count += len(chunk.tokens.tokens) // 4
        else:
            image = getattr(chunk, chunk.WhichOneof("kind") or "image")
            count += image.expected_token_count if image.HasField("expected_token_count") else 1
    return count


class Renderer(Replica):
    """The gateway's connection to one renderer."""

    def __init__(
        self,
        address: str,
        concurrency: int,
        on_change: Callable[[], None],
        check_files: CheckFiles,
        weight_of: WeightOf,
    ) -> None:
        super().__init__("renderer", address, concurrency, on_change, weight_of)
        self._check_files = check_files
        self.client: RendererClient = RendererClient(address)
        self.info: renderer_pb2.GetRendererInfoResponse | None = None

    async def ask(self) -> None:
        """Asks for the renderer's info. Raises FailedPrecondition if its model files differ from the trainer's."""
        info = await self.client.info(timeout_s=5.0)
        self._check_files(f"the renderer at {self.address}", info.model_files)
        self.info = info


class Renderers(Replicas[Renderer]):
    """All renderers of a base model. Call `start` before use.

    Args:
        discovery: Supplies their addresses.
        concurrency: The maximum number of calls in one renderer at a time. Further calls wait in the gateway.
        retry_deadline_s: Seconds that a render waits until a renderer answers.
        check_files: Checks that a renderer has the same model files as the trainer. Raises FailedPrecondition.
        weight_of: Returns an owner's weight for the division of the calls.
    """

    def __init__(
        self,
        discovery: Discovery,
        concurrency: int,
        retry_deadline_s: float,
        check_files: CheckFiles,
        weight_of: WeightOf,
    ) -> None:
        super().__init__(
            "renderer",
            discovery,
            lambda address, on_change: Renderer(address, concurrency, on_change, check_files, weight_of),
        )
        self._retry_deadline_s = retry_deadline_s
        self._info: renderer_pb2.GetRendererInfoResponse | None = None

    async def info(self, within_s: float = 0.0) -> renderer_pb2.GetRendererInfoResponse:
        """Returns the info of the renderers, which are all alike: of one that is still listed if there is one.

        Raises Unavailable if none answers in `within_s` seconds.
        """
        backoff = Backoff(within_s, longest_s=_LONGEST_PAUSE_S)
        while True:
            self._info = next((renderer.info for renderer in self.members if renderer.info is not None), self._info)
            if self._info is not None:
                return self._info
            if backoff.is_over:
                raise Unavailable("no renderer has answered yet")
            await backoff.pause()

    def check_files(self, who: str, files: Mapping[str, str]) -> None:
        """Raises FailedPrecondition that names the file if a renderer and another service differ in a model file."""
        for renderer in self.members:
            own = renderer.info.model_files if renderer.info is not None else {}
            if unlike := find_unlike(own, files):
                raise FailedPrecondition(
                    f"{who} has another {unlike} than the renderer at {renderer.address}: give both the same model"
                )

    async def render(
        self, owner: str, model_input: model_input_pb2.ModelInput, field: str
    ) -> model_input_pb2.RenderedInput:
        """Renders an owner's input. Text needs no call to a renderer unless it contains an id reserved for images.

        Raises InvalidInput that names `field` and the problem, ContextOverflow for an input longer than the context,
        and Unavailable if no renderer answers in time.
        """
        text = await self.render_text(model_input, field)
        if text is not None:
            return text
        rendered = await self._render_remotely(owner, model_input, field)
        await self._check(rendered, field)
        return rendered

    async def render_text(
        self, model_input: model_input_pb2.ModelInput, field: str
    ) -> model_input_pb2.RenderedInput | None:
        """Renders an input without a call to a renderer, or returns None if a renderer is needed.

        Raises the same errors as `render`.
        """
        if any(chunk.WhichOneof("kind") != "tokens" for chunk in model_input.chunks):
            return None
        tokens = b"".join(chunk.tokens.tokens for chunk in model_input.chunks)
        reserved = (await self.info(self._retry_deadline_s)).reserved_token_ids
        if np.isin(tensors.decode_tokens(tokens, field), reserved).any():
            return None
        rendered = model_input_pb2.RenderedInput(tokens=tokens)
        await self._check(rendered, field)
        return rendered

    async def _check(self, rendered: model_input_pb2.RenderedInput, field: str) -> None:
        info = await self.info(self._retry_deadline_s)
        ids = tensors.decode_tokens(rendered.tokens, field)
        if ids.size == 0:
            raise InvalidInput(f"{field} has no tokens; send at least one", field=field)
        outside = np.flatnonzero((ids < 0) | (ids >= info.vocabulary_size))
        if outside.size:
            position = int(outside[0])
            raise InvalidInput(
                f"{field} has token id {ids[position]} at position {position}; "
                f"the vocabulary is 0 .. {info.vocabulary_size - 1}",
                field=field,
            )
        if ids.size > info.max_context_length:
            raise ContextOverflow(
                f"{field} has {ids.size} tokens; the model's context window is {info.max_context_length}", field=field
            )

    async def _render_remotely(
        self, owner: str, model_input: model_input_pb2.ModelInput, field: str
    ) -> model_input_pb2.RenderedInput:
        backoff = Backoff(self._retry_deadline_s, longest_s=_LONGEST_PAUSE_S)
        failure = "none is known"
        while True:
            for renderer in self._by_affinity(model_input):
                try:
                    async with renderer.slot(Turn(owner, least_token_count(model_input))):
                        if renderer.up or not self.up:  # Otherwise it failed while this call waited.
                            return await renderer.client.render(model_input)
                except ReplicaLeft:
                    continue
                except (Unavailable, ResourceExhausted) as error:
                    if isinstance(error, Unavailable):
                        renderer.mark_down(str(error))
                    metrics.RENDER_RETRIES.labels(error.reason).inc()
                    failure = f"renderer {renderer.address}: {error.message}"
                except InvalidInput as error:
                    raise type(error)(f"{field}: {error.message}", error.field or field, **error.metadata) from None
            if backoff.is_over:
                raise Unavailable(f"no renderer answered within {self._retry_deadline_s:.0f} s: {failure}")
            await backoff.pause()

    def _by_affinity(self, model_input: model_input_pb2.ModelInput) -> list[Renderer]:
        """Returns the renderers in the order in which to try them: rendezvous hashing over the first image, busy ones
        last.

        All requests of a conversation share their first image, so all of its images reach the same cache.
        """
        renderers = self.up or self.members
        if len(renderers) < 2:
            return renderers
        image = next((chunk for chunk in model_input.chunks if chunk.WhichOneof("kind") != "tokens"), None)
        key = _image_key(image) if image is not None else b""
        ranked = sorted(renderers, key=lambda renderer: hashlib.sha256(key + renderer.address.encode()).digest())
        # Rendering an image again is cheap, so a warm cache justifies only a short wait.
        most = 2 * min(renderer.queued for renderer in renderers) + _MORE
        return sorted(ranked, key=lambda renderer: renderer.queued > most)


def _image_key(chunk: model_input_pb2.Chunk) -> bytes:
    """Returns a digest of the image's bytes. If the chunk only refers to the image, the digest is of its SHA-256 or
    URI.
    """
    reference = chunk.image_reference
    return hashlib.sha256(chunk.image.data or (reference.sha256 or reference.uri).encode()).digest()
