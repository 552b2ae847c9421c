"""Measure the processor time that one forward_backward costs the gateway: `python -m benchmarks.gateway_requests`.

A real gateway process runs between a client and fake services. The client sends requests to one model and fetches each
result as protobuf, as the SDK does. The time of the thread of the event loop and of all other threads is measured
apart. With `--reference`, the gateway of another checkout is measured in turns with this one.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
from collections import defaultdict
from multiprocessing.connection import Connection as Pipe

import httpx
import psutil

from benchmarks.figure import emit
from benchmarks.gateway_polls import KEY, gateway, serve_fakes
from tests.contract.gateway.requests import PROTOBUF, Rest, forward_backward_body, image_datum, text_datum

_PNG = b"\x89PNG\r\n\x1a\n"


async def measure(port: int, process: psutil.Process, options: argparse.Namespace, picture_bytes: int) -> list[float]:
    """Returns the milliseconds of the event loop's thread, and of the other threads, for one request."""
    if picture_bytes:
        rng = random.Random(7)
        data = [image_datum(data=_PNG + rng.randbytes(picture_bytes)) for _ in range(options.pictures)]
    else:
        data = [text_datum(options.tokens)] * options.datums
    base_url = f"http://127.0.0.1:{port}/api/v1/"
    async with httpx.AsyncClient(base_url=base_url, headers={"X-API-Key": KEY}, timeout=60) as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        bodies = [forward_backward_body(model_id, seq_id, data) for seq_id in range(1, options.requests + 1)]
        free = asyncio.Semaphore(options.in_flight)

        async def run(body: bytes) -> None:
            async with free:
                accepted = await rest.send(body)
                answer = await rest.poll(accepted.json()["request_id"], PROTOBUF)
                if answer.headers["content-type"] != PROTOBUF:
                    raise RuntimeError(answer.text[:500])

        await run(bodies[0])
        begun = _seconds(process)
        await asyncio.gather(*(run(body) for body in bodies[1:]))
        spent = {thread_id: seconds - begun[thread_id] for thread_id, seconds in _seconds(process).items()}
    loop_s = spent.pop(process.pid)
    return [1000 * seconds / (options.requests - 1) for seconds in (loop_s, sum(spent.values()))]


def _seconds(process: psutil.Process) -> defaultdict[int, float]:
    """Returns the processor seconds of a process by thread. The event loop runs in the thread with the process's id."""
    return defaultdict(float, {one.id: one.user_time + one.system_time for one in process.threads()})


async def run_all(fakes: Pipe, options: argparse.Namespace) -> None:
    """Measures and prints."""
    addresses = await asyncio.to_thread(fakes.recv)
    for picture_bytes in (0, *options.picture_bytes):
        found: dict[str, list[list[float]]] = {}
        for _ in range(options.repeats):
            for checkout in filter(None, (options.reference, os.getcwd())):
                async with gateway(addresses, ["-m", "fovea_gateway"], checkout) as (port, process):
                    found.setdefault(checkout, []).append(await measure(port, process, options, picture_bytes))
        sizes: dict[str, int] = {"in_flight": options.in_flight, "requests": options.requests}
        if picture_bytes:
            sizes |= {"datums": options.pictures, "picture_bytes": picture_bytes}
        else:
            sizes |= {"datums": options.datums, "tokens": options.tokens}
        for index, threads in enumerate(("loop", "other_threads")):
            values = {checkout: [one[index] for one in measured] for checkout, measured in found.items()}
            emit(f"gateway.requests.{threads}", values[os.getcwd()], "ms", values.get(options.reference), **sizes)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datums", type=int, default=16, help="Datums of text per request.")
    parser.add_argument("--tokens", type=int, default=128, help="Tokens of each datum of text.")
    parser.add_argument("--pictures", type=int, default=32, help="Datums with one picture per request.")
    parser.add_argument("--picture-bytes", type=int, nargs="*", default=[100_000], help="Sizes of a picture.")
    parser.add_argument("--requests", type=int, default=60, help="Requests per repeat.")
    parser.add_argument("--in-flight", type=int, default=24, help="Requests that wait for their result at once.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--reference", default="", help="The folder of another checkout to compare with.")
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
