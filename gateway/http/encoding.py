"""Compressing large answers for clients that read it."""

import asyncio
import gzip

import zstandard
from starlette.responses import Response

# Fast levels: token ids halve, log-probabilities hardly shrink at any level.
_ZSTD_LEVEL = 1
_GZIP_LEVEL = 1


def chosen(accept_encoding: str) -> str | None:
    """`zstd` or `gzip`, the first of them that a client reads; None if it reads neither."""
    accepted = {}
    for part in accept_encoding.split(","):
        name, _, quality = part.partition(";")
        accepted[name.strip().lower()] = quality.strip().lower()
    refused = {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return next((name for name in ("zstd", "gzip") if name in accepted and accepted[name] not in refused), None)


async def compress(response: Response, accept_encoding: str) -> Response:
    """The same answer, compressed if the client reads that."""
    encoding = chosen(accept_encoding)
    if encoding is None:
        return response
    body = await asyncio.to_thread(_compress, bytes(response.body), encoding)
    headers = {"Content-Encoding": encoding, "Vary": "Accept-Encoding"}
    return Response(body, media_type=response.media_type, headers=headers)


def _compress(body: bytes, encoding: str) -> bytes:
    if encoding == "zstd":
        return zstandard.ZstdCompressor(_ZSTD_LEVEL).compress(body)
    return gzip.compress(body, _GZIP_LEVEL)
