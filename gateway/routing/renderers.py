"""Renderers: text is spliced here, everything else by the renderer that most likely has it cached."""

import asyncio
import hashlib
import logging

import numpy as np

from fovea.api.v1 import model_input_pb2, renderer_pb2
from fovea.client import RendererClient
from fovea.wire import tensors
from fovea.wire.errors import ContextOverflow, InvalidInput, Unavailable
from gateway.discovery.discovery import Discovery

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


def least_token_count(model_input: model_input_pb2.ModelInput) -> int:
    """Tokens of an input that is not rendered yet: exact if every image says its count, else at least so many."""
    count = 0
    for chunk in model_input.chunks:
        if chunk.WhichOneof("kind") == "tokens":
            count += len(chunk.tokens.tokens) // 4
        else:
            image = getattr(chunk, chunk.WhichOneof("kind") or "image")
            count += image.expected_token_count if image.HasField("expected_token_count") else 1
    return count


class Renderers:
    """All renderers as one.

    Args:
        discovery: Where they are.
        concurrency: Calls in flight at once; the rest wait here.
        retry_deadline_s: How long a render waits for any renderer to answer.
    """

    def __init__(self, discovery: Discovery, concurrency: int, retry_deadline_s: float) -> None:
        self._discovery = discovery
        self._retry_deadline_s = retry_deadline_s
        self._clients: dict[str, RendererClient] = {}
        self._slots = asyncio.Semaphore(concurrency)
        self._info: renderer_pb2.GetRendererInfoResponse | None = None

    async def close(self) -> None:
        """Closes the channels."""
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    async def count_up(self) -> int:
        """How many answer that they serve."""
        clients = [self._client(address) for address in await self._discovery.renderers()]
        return sum(await asyncio.gather(*(client.is_serving() for client in clients)))

    async def info(self) -> renderer_pb2.GetRendererInfoResponse:
        """What the renderers serve; asked once. Raises Unavailable while none answers."""
        if self._info is None:
            address = (await self._discovery.renderers())[0]
            self._info = await self._client(address).info(timeout_s=5.0)
        return self._info

    async def render(self, model_input: model_input_pb2.ModelInput, field: str) -> model_input_pb2.RenderedInput:
        """Splices an input. Text needs no call, unless it holds an id that stands for an image.

        Raises InvalidInput naming `field` and what is wrong, ContextOverflow for an input above the context,
        Unavailable if no renderer answers in time.
        """
        rendered = await self._splice_text(model_input, field) or await self._render_remotely(model_input, field)
        await self._check(rendered, field)
        return rendered

    async def _splice_text(
        self, model_input: model_input_pb2.ModelInput, field: str
    ) -> model_input_pb2.RenderedInput | None:
        if any(chunk.WhichOneof("kind") != "tokens" for chunk in model_input.chunks):
            return None
        tokens = b"".join(chunk.tokens.tokens for chunk in model_input.chunks)
        reserved = (await self.info()).reserved_token_ids
        if np.isin(tensors.decode_tokens(tokens, field), reserved).any():
            return None
        return model_input_pb2.RenderedInput(tokens=tokens)

    async def _check(self, rendered: model_input_pb2.RenderedInput, field: str) -> None:
        info = await self.info()
        ids = tensors.decode_tokens(rendered.tokens, field)
        if ids.size == 0:
            raise InvalidInput(f"{field} has no tokens; at least one is needed", field=field)
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
        self, model_input: model_input_pb2.ModelInput, field: str
    ) -> model_input_pb2.RenderedInput:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._retry_deadline_s
        async with self._slots:
            while True:
                for address in await self._by_affinity(model_input):
                    try:
                        return await self._client(address).render(model_input)
                    except Unavailable as error:
                        logger.warning("renderer %s: %s", address, error)
                    except InvalidInput as error:
                        raise type(error)(f"{field}: {error.message}", error.field or field, **error.metadata) from None
                if loop.time() >= give_up_at:
                    raise Unavailable(f"no renderer answered within {self._retry_deadline_s:.0f} s")
                await asyncio.sleep(_RETRY_S)

    async def _by_affinity(self, model_input: model_input_pb2.ModelInput) -> list[str]:
        """Renderers in order of rendezvous hashing over the images, so that the same image meets the same cache."""
        addresses = await self._discovery.renderers()
        if len(addresses) == 1:
            return list(addresses)
        key = hashlib.sha256()
        for chunk in model_input.chunks:
            key.update(chunk.image.data or chunk.image_reference.sha256.encode())
        base = key.digest()
        return sorted(addresses, key=lambda address: hashlib.sha256(base + address.encode()).digest())

    def _client(self, address: str) -> RendererClient:
        if address not in self._clients:
            self._clients[address] = RendererClient(address)
        return self._clients[address]
