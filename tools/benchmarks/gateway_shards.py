"""Measures how many samples several gateways answer: `python -m benchmarks.gateway_shards --gateways 1 2 4`.

Runs gateway processes with one shard each on a PostgreSQL, as many routers, and fake samplers in processes of their
own. A single gateway has no router. Each client is a process with the official SDK and a session of its own; it submits
all its samples and waits for them. A warning says if the machine has too few cores for the processes, so that they, and
not the gateways, limit the figure. A process that fails or does not answer within `--limit-s` ends the program with an
error.
"""

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

import fovea
from benchmarks.figure import emit
from fovea.runtime.hosts import free_ports
from tests.postgresql import Server, running_postgresql

fovea.bypass_proxies()

KEY, MODEL = "tml-local", "fovea/fake-vl"
_START_S = 120
_CORES = os.cpu_count() or 1


def serve_fakes(pipe: Pipe, sampler_only: bool) -> None:
    """Runs a fake sampler, or a renderer and a trainer, until the pipe closes. Sends their addresses."""

    async def serve() -> None:
        from tests.contract.gateway.fakes import FakeRenderer, FakeSampler, FakeTrainer

        fakes = [FakeSampler()] if sampler_only else [FakeRenderer(), FakeTrainer(lambda: [])]
        for fake in fakes:
            await fake.start()
        pipe.send([fake.address for fake in fakes])
        await asyncio.to_thread(pipe.recv)
        for fake in fakes:
            await fake.stop()

    asyncio.run(serve())


def sample(pipe: Pipe, url: str, count: int, limit_s: float) -> None:
    """Runs one client: says that it is ready, waits for the start, and sends the seconds until its last sample."""
    os.environ["TINKER_TELEMETRY"] = "0"
    import tinker

    with tinker.ServiceClient(base_url=url, api_key=KEY) as client:
        sampling = client.create_sampling_client(base_model=MODEL).result(limit_s)
        prompt, params = tinker.ModelInput.from_ints([1, 2, 3]), tinker.SamplingParams(max_tokens=4)
        sampling.sample(prompt, 1, params).result(limit_s)
        pipe.send("ready")
        pipe.recv()
        begun = time.perf_counter()
        futures = [sampling.sample(prompt, 1, params) for _ in range(count)]
        for future in futures:
            future.result(limit_s)
        pipe.send(time.perf_counter() - begun)
        pipe.recv()  # its CPU seconds are read first


def receive(pipe: Pipe, limit_s: float) -> Any:
    """Returns a client's next message. Raises SystemExit if it has ended, or sends none in time."""
    try:
        if pipe.poll(limit_s):
            return pipe.recv()
    except EOFError:
        raise SystemExit("a client failed: its error stands above") from None
    raise SystemExit(f"a client took more than {limit_s:.0f} s: lower --samples or --clients, or raise --limit-s")


@asynccontextmanager
async def running(command: Sequence[str], port: int) -> AsyncIterator[psutil.Process]:
    """Runs a Python program until the block ends; waits until its REST port answers. Raises SystemExit if it ends."""
    process = await asyncio.create_subprocess_exec(sys.executable, *command)
    try:
        async with httpx.AsyncClient(headers={"X-API-Key": KEY}) as http:
            async with asyncio.timeout(_START_S):
                while not await _answers(http, port):
                    if process.returncode is not None:
                        raise SystemExit(f"{' '.join(command[:2])} ended with code {process.returncode}")
                    await asyncio.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def _answers(http: httpx.AsyncClient, port: int) -> bool:
    try:
        return (await http.get(f"http://127.0.0.1:{port}/api/v1/sessions")).status_code == 200
    except httpx.TransportError:
        return False


@asynccontextmanager
async def cluster(
    server: Server, fakes: Sequence[str], gateways: int
) -> AsyncIterator[tuple[list[str], list[psutil.Process]]]:
    """Runs gateways and as many routers. Yields the URLs for clients, and the processes."""
    renderer, trainer, *samplers = fakes
    url = server.new_url()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes, ports = [], []
        for _ in range(gateways):
            (port,) = free_ports(1)
            ports.append(port)
            flags = {
                "model-name": MODEL, "model": "/models/fake", "renderer": renderer, "trainer": trainer, "port": port,
                "state-dir": folder, "log-level": "WARNING", "database-url": url, "shards": gateways,
            }  # fmt: skip
            command = ["-m", "fovea_gateway", *(f"--{name}={value}" for name, value in flags.items())]
            command += [f"--sampler={address}" for address in samplers]
            processes.append(await stack.enter_async_context(running(command, port)))
        if gateways > 1:
            ports = free_ports(gateways)
        for port in ports if gateways > 1 else ():
            flags = {"port": port, "database-url": url, "log-level": "WARNING"}
            command = ["-m", "fovea_gateway.fronts.router", *(f"--{name}={value}" for name, value in flags.items())]
            processes.append(await stack.enter_async_context(running(command, port)))
        yield [f"http://127.0.0.1:{port}" for port in ports], processes


class Found(NamedTuple):
    """The figures of one run: samples per second, seconds of the slowest client by those of the fastest, and
    milliseconds of CPU per sample: of gateways and routers, of clients, and of PostgreSQL and the fake services.
    """

    samples: float
    slowest_to_fastest: float
    cpu: float
    cpu_of_clients: float
    cpu_of_services: float


async def measure(server: Server, fakes: Sequence[str], gateways: int, options: argparse.Namespace) -> Found:
    """Returns the figures for a number of gateways."""
    context, seconds = multiprocessing.get_context("spawn"), list[float]()
    async with cluster(server, fakes, gateways) as (urls, processes):
        clients = []
        for number in range(options.clients):
            ours, theirs = context.Pipe()
            arguments = (theirs, urls[number % len(urls)], options.samples, options.limit_s)
            process = context.Process(target=sample, args=arguments, daemon=True)
            process.start()
            theirs.close()  # otherwise a client that fails would never close its pipe
            clients.append((ours, process))
        for pipe, _ in clients:
            await asyncio.to_thread(receive, pipe, options.limit_s)
        parts = [processes, [psutil.Process(process.pid) for _, process in clients], _services(clients)]
        begun, before = time.perf_counter(), [_cpu_s(part) for part in parts]
        for pipe, _ in clients:
            pipe.send("start")
        seconds = [await asyncio.to_thread(receive, pipe, options.limit_s) for pipe, _ in clients]
        whole = time.perf_counter() - begun
        spent = [_cpu_s(part) - seconds for part, seconds in zip(parts, before, strict=True)]
        for pipe, process in clients:
            pipe.send("end")
            await asyncio.to_thread(process.join)
    count = options.clients * options.samples
    found = Found(count / whole, max(seconds) / min(seconds), *(1000 * each / count for each in spent))
    print(
        f"{gateways} gateways: {found.samples:.0f} samples/s, {found.cpu:.1f} ms of CPU each, and"
        f" {found.cpu_of_clients:.1f} ms of clients, {found.cpu_of_services:.1f} ms of PostgreSQL and fakes",
        file=sys.stderr,
        flush=True,
    )
    return found


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _services(clients: Sequence[tuple[Pipe, Any]]) -> list[psutil.Process]:
    """Returns PostgreSQL's processes and the fake services: this program's children besides clients and gateways."""
    known = {process.pid for _, process in clients}
    children = [one for one in psutil.Process().children(recursive=True) if one.pid not in known]
    return [one for one in children if not {"fovea_gateway", "fovea_gateway.fronts.router"} & {*one.cmdline()}]


def show(gateways: int, found: Sequence[Found], options: argparse.Namespace) -> None:
    """Prints the figures for a number of gateways."""
    sizes = {name: getattr(options, name) for name in ("clients", "samplers", "samples")} | {"gateways": gateways}
    units = {"samples": "samples/s", "slowest_to_fastest": "ratio"}
    for name, unit in ((name, units.get(name, "ms/sample")) for name in Found._fields):
        emit(f"gateway.shards.{name}", [getattr(each, name) for each in found], unit, **sizes)
    needed = gateways + (gateways if gateways > 1 else 0) + options.clients + options.samplers + 1
    if needed > _CORES:
        print(
            f"warning: {needed} processes of gateways, routers, clients, samplers and PostgreSQL share {_CORES} cores,"
            " so the cores limit these figures: compare the CPU per sample, or use a machine with more cores",
            file=sys.stderr,
        )


async def run_all(server: Server, fakes: Sequence[Pipe], options: argparse.Namespace) -> None:
    """Measures and prints all figures."""
    addresses = [address for pipe in fakes for address in await asyncio.to_thread(pipe.recv)]
    found = [
        [await measure(server, addresses, one, options) for one in options.gateways] for _ in range(options.repeats)
    ]
    for gateways, figures in zip(options.gateways, zip(*found, strict=True), strict=True):
        show(gateways, figures, options)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2, 4], help="Numbers of gateways to measure.")
    parser.add_argument("--clients", type=int, default=min(8, _CORES), help="Processes with the SDK.")
    parser.add_argument("--samplers", type=int, default=4, help="Fake samplers.")
    parser.add_argument("--samples", type=int, default=500, help="Samples of each client.")
    parser.add_argument("--repeats", type=int, default=3, help="Runs with each number of gateways, in turns.")
    parser.add_argument("--limit-s", type=float, default=240, help="Seconds in which clients must start, and end.")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    fakes = []
    with running_postgresql() as server:
        for number in range(1 + options.samplers):
            ours, theirs = multiprocessing.Pipe()
            process = context.Process(target=serve_fakes, args=(theirs, number > 0), daemon=True)
            process.start()
            fakes.append((ours, process))
        try:
            asyncio.run(run_all(server, [pipe for pipe, _ in fakes], options))
        finally:
            for pipe, process in fakes:
                pipe.send(None)
                process.join(10)


if __name__ == "__main__":
    main()
