"""Measures the bytes of losses that one gateway processes: `python -m benchmarks.gateway_bytes`.

Runs a real gateway process with fake services. Clients send forward_backward requests of about one MiB, each for a
model of its own, and wait for each result. Measures the time from the first request to the last result, and the
gateway's CPU time.
"""

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection as Pipe

import httpx
import psutil

from benchmarks.figure import emit
from benchmarks.gateway_polls import KEY, gateway, serve_fakes
from benchmarks.running import cpu_seconds
from tests.contract.gateway.requests import Rest, forward_backward_body, text_datum

_TOKENS, _DATUMS = 900, 70


async def measure(port: int, process: psutil.Process, clients: int, requests: int) -> tuple[float, float]:
    """Returns MiB per second and CPU seconds per MiB."""
    sent = 0

    async def run(http: httpx.AsyncClient) -> None:
        nonlocal sent
        rest = Rest(http)
        model_id = await rest.create_model()
        data = [text_datum(_TOKENS)] * _DATUMS
        for seq_id in range(1, requests + 1):
            body = forward_backward_body(model_id, seq_id, data)
            sent += len(body)
            accepted = await rest.send(body)
            answer = await rest.poll(accepted.json()["request_id"])
            if answer.status_code != 200 or "error" in answer.text[:100]:
                raise RuntimeError(answer.text[:500])

    headers = {"X-API-Key": KEY}
    base_url = f"http://127.0.0.1:{port}/api/v1/"
    begun, cpu = time.perf_counter(), cpu_seconds([process])
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=60) as http:
        await asyncio.gather(*(run(http) for _ in range(clients)))
    return sent / 2**20 / (time.perf_counter() - begun), (cpu_seconds([process]) - cpu) / (sent / 2**20)


async def run_all(fakes: Pipe, options: argparse.Namespace) -> None:
    """Measures and prints the figures."""
    addresses = await asyncio.to_thread(fakes.recv)
    async with gateway(addresses, ["-m", "fovea_gateway"]) as (port, process):
        found = [await measure(port, process, options.clients, options.requests) for _ in range(options.repeats)]
    sizes = {"clients": options.clients, "requests": options.requests, "datums": _DATUMS, "tokens": _TOKENS}
    emit("gateway.bytes.taken", [one[0] for one in found], "MiB/s", **sizes)
    emit("gateway.bytes.cpu", [one[1] for one in found], "s/MiB", **sizes)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_fakes, args=(theirs,), daemon=True)
    process.start()
    try:
        asyncio.run(run_all(ours, options))
    finally:
        ours.send(None)
        process.join(10)


if __name__ == "__main__":
    main()
