"""A refused request frees its whole body at once, before the next garbage collection."""

import gc

import psutil
import zstandard

from tests.contract.gateway.conftest import Stand

_BODY_BYTES = 2**26
_REQUESTS = 8


async def test_a_refused_body_is_freed_at_once(stand: Stand) -> None:
    bomb = zstandard.compress(bytes(_BODY_BYTES))
    process = psutil.Process()
    headers = {"Content-Encoding": "zstd", "Content-Type": "application/x-protobuf"}
    async with stand.http() as http:
        gc.collect()
        gc.disable()
        try:
            before = process.memory_info().rss
            for _ in range(_REQUESTS):
                response = await http.post("forward_backward", content=bomb, headers=headers)
                assert response.status_code == 413, response.text
            grown = process.memory_info().rss - before
        finally:
            gc.enable()
    assert grown < _REQUESTS * _BODY_BYTES / 2, f"{grown / 2**20:.0f} MiB stay"
