"""Measures how many images a core renders: `python -m benchmarks.renderer --workers 1 2 --pictures 448 mixed`.

Compares a renderer process, called over gRPC, with the model's own Hugging Face image processor: the same encoded
files, decoded and processed in a loop in this process on one thread, in turns with the passes over the service.

A renderer with N workers runs on N cores if there are enough. Rates "a core" are images per CPU second of the service
and all its workers, without the client on the same machine. The bare processor has two kinds: `float32` as scripts
usually call it, and `uint8` without rescaling and normalising, which is the renderer's own work.
"""

import argparse
import asyncio
import io
import itertools
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from transformers import AutoImageProcessor

import fovea_tinyvlm
from benchmarks.figure import emit
from benchmarks.running import cpu_seconds, metric_total
from fovea.api.v1 import model_input_pb2, renderer_pb2, renderer_pb2_grpc
from fovea.client.inference import RendererClient
from fovea.runtime.hosts import free_ports
from fovea.wire.conventions import RENDERER_SERVICE
from fovea.wire.tensors import encode_tokens

# Less than the tensors of one cold pass, so the next pass finds none of them cached; more than those of `HELD` images.
CACHE_BYTES = 64 * 2**20
HELD = 10
IN_FLIGHT = 32
GROUP = 4
GRPC_PREFIX_BYTES = 5

_SHAPES = {
    "448": (("JPEG", 448, 448),),
    "mixed": (("JPEG", 640, 480), ("PNG", 224, 224), ("JPEG", 1024, 768), ("PNG", 448, 448), ("JPEG", 300, 400)),
}


@dataclass(frozen=True)
class Picture:
    """An encoded file, and a model input with it between two pieces of text."""

    data: bytes
    model_input: model_input_pb2.ModelInput


@dataclass(frozen=True)
class Service:
    """A renderer process."""

    client: RendererClient
    process: psutil.Process
    metrics_port: int

    def cpu_s(self) -> float:
        """Returns the CPU seconds that the service and its workers have used."""
        return cpu_seconds([self.process, *self.process.children(recursive=True)])

    def rendered_count(self) -> int:
        """Returns the number of images that workers have processed."""
        return int(
            metric_total(f"http://127.0.0.1:{self.metrics_port}/metrics", "fovea_renderer_images_rendered_total")
        )


def draw(rng: np.random.Generator, image_format: str, width: int, height: int) -> Picture:
    """Returns smooth colours under fine noise: a JPEG of about 1.5 bits per pixel, like a photograph."""
    coarse = Image.fromarray(rng.integers(0, 255, (height // 16, width // 16, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    pixels = (pixels + rng.integers(-4, 5, pixels.shape, dtype=np.int16)).clip(0, 255)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, image_format, quality=85)
    chunk = model_input_pb2.ImageChunk(data=file.getvalue(), format=f"IMAGE_FORMAT_{image_format}")
    text = [model_input_pb2.TokenChunk(tokens=encode_tokens(rng.integers(10, 900, 16))) for _ in range(2)]
    chunks = [
        model_input_pb2.Chunk(tokens=text[0]),
        model_input_pb2.Chunk(image=chunk),
        model_input_pb2.Chunk(tokens=text[1]),
    ]
    return Picture(file.getvalue(), model_input_pb2.ModelInput(chunks=chunks))


@asynccontextmanager
async def renderer(model: str, workers: int) -> AsyncIterator[Service]:
    """Runs a renderer with all its workers on at most as many cores as it has workers."""
    port, metrics_port = free_ports(2)
    flags = {
        "model": model, "port": port, "metrics-port": metrics_port, "workers": workers, "log-level": "WARNING",
        "feature-cache-bytes": CACHE_BYTES,
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "fovea_renderer", *arguments)
    counted = psutil.Process(process.pid)
    counted.cpu_affinity(cores_of(workers))  # before anything starts, so that all threads and children inherit it
    try:
        async with RendererClient(f"127.0.0.1:{port}") as client:
            while not await client.is_serving(RENDERER_SERVICE):
                if process.returncode is not None:
                    raise RuntimeError(f"the renderer ended with exit code {process.returncode}")
                await asyncio.sleep(0.2)
            yield Service(client, counted, metrics_port)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def cores_of(workers: int) -> list[int]:
    """Returns the cores for a renderer with this number of workers."""
    return sorted(os.sched_getaffinity(0))[:workers]


async def many(jobs: Sequence[Callable[[], Awaitable[Any]]]) -> None:
    """Runs all jobs, `IN_FLIGHT` at a time."""
    waiting = iter(jobs)

    async def work() -> None:
        for job in waiting:
            await job()

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))


async def measured(service: Service, jobs: Sequence[Callable[[], Awaitable[Any]]]) -> tuple[float, float]:
    """Returns jobs per second, and jobs per CPU second of the service."""
    cpu_s, begun = service.cpu_s(), time.perf_counter()
    await many(jobs)
    return len(jobs) / (time.perf_counter() - begun), len(jobs) / (service.cpu_s() - cpu_s)


class Bench:
    """The figures of one set of images.

    Args:
        kind: Kind of images, a key of `_SHAPES`.
        count: Images per cold pass.
        cached_count: Requests per cached pass.
    """

    def __init__(self, model: str, kind: str, count: int, cached_count: int) -> None:
        rng = np.random.default_rng(7)
        shapes = itertools.islice(itertools.cycle(_SHAPES[kind]), count)
        self._pictures = [draw(rng, *shape) for shape in shapes]
        self._held = [draw(rng, *shape) for shape in itertools.islice(itertools.cycle(_SHAPES[kind]), HELD)]
        self._kind = kind
        self._cached_count = cached_count
        self._processor: Any = AutoImageProcessor.from_pretrained(model)
        self._cold_rates: dict[int, list[float]] = {}

    def bare(self, **call: bool) -> float:
        """Returns images per CPU second of the Hugging Face processor, including decoding."""
        begun = time.process_time()
        for picture in self._pictures:
            image = Image.open(io.BytesIO(picture.data)).convert("RGB")
            with torch.inference_mode():
                self._processor([image], return_tensors="pt", **call)
        return len(self._pictures) / (time.process_time() - begun)

    async def cold(self, service: Service) -> tuple[float, float]:
        """Measures a pass in which every image is processed."""
        before = service.rendered_count()
        found = await measured(service, [self._render(service, picture) for picture in self._pictures])
        if service.rendered_count() - before != len(self._pictures):
            raise RuntimeError("some images of a cold pass were cached already; use more images")
        return found

    async def cached(self, service: Service) -> tuple[float, float]:
        """Measures a pass in which no image is processed."""
        await many([self._render(service, picture) for picture in self._held])
        before = service.rendered_count()
        jobs = [
            self._render(service, picture)
            for picture in itertools.islice(itertools.cycle(self._held), self._cached_count)
        ]
        found = await measured(service, jobs)
        if service.rendered_count() != before:
            raise RuntimeError("some images of a cached pass were processed")
        return found

    async def grouped(self, service: Service) -> tuple[float, float]:
        """Measures a pass in which no image is processed and a request has several."""
        groups = [self._held[start : start + GROUP] for start in range(0, len(self._held) - GROUP + 1, GROUP)]
        inputs = [
            model_input_pb2.ModelInput(chunks=[chunk for picture in group for chunk in picture.model_input.chunks])
            for group in groups
        ]
        for each in inputs:
            await service.client.render(each)

        def job(model_input: model_input_pb2.ModelInput) -> Callable[[], Awaitable[Any]]:
            return lambda: service.client.render(model_input)

        jobs = [job(each) for each in itertools.islice(itertools.cycle(inputs), self._cached_count // GROUP)]
        rate, rate_a_core = await measured(service, jobs)
        return GROUP * rate, GROUP * rate_a_core

    async def called(self, service: Service) -> tuple[float, float]:
        """Measures nearly empty gRPC calls of the same service."""
        return await measured(service, [service.client.info] * self._cached_count)

    async def fetched(self, service: Service) -> tuple[float, float]:
        """Measures fetches of cached tensors by digest."""
        answers = [await service.client.render(picture.model_input) for picture in self._held]
        digests = itertools.cycle([answer.spans[0].feature.digest for answer in answers])

        def job(digest: str) -> Callable[[], Awaitable[Any]]:
            return lambda: service.client.fetch_features([digest])

        return await measured(service, [job(digest) for digest in itertools.islice(digests, self._cached_count // 4)])

    async def wire(self, service: Service) -> None:
        """Returns all bytes that one image costs in gRPC messages between client, renderer and one consumer."""
        stub = renderer_pb2_grpc.RendererServiceStub(service.client.channel)
        totals: dict[str, list[float]] = defaultdict(list)
        for picture in self._held[: len(_SHAPES[self._kind])]:
            request = renderer_pb2.RenderRequest(input=picture.model_input)
            answer = await stub.Render(request)
            feature = answer.rendered.spans[0].feature
            fetch = renderer_pb2.FetchFeaturesRequest(digests=[feature.digest])
            messages = [request, answer, fetch, *[piece async for piece in stub.FetchFeatures(fetch)]]
            totals["total"].append(sum(GRPC_PREFIX_BYTES + message.ByteSize() for message in messages))
            totals["image"].append(len(picture.data))
            totals["tensors"].append(feature.size_bytes)
            text = sum(len(chunk.tokens.tokens) for chunk in picture.model_input.chunks)
            totals["ids"].append(text + len(answer.rendered.tokens) + len(answer.rendered.positions.data))
        sums = {name: sum(values) for name, values in totals.items()}
        framing = sums["total"] - sums["image"] - sums["tensors"] - sums["ids"]
        once = [image + tensors for image, tensors in zip(totals["image"], totals["tensors"], strict=True)]
        shares = {name: sums[name] / len(once) for name in ("image", "tensors", "ids")}
        shares["framing"] = framing / len(once)
        emit("renderer.wire", totals["total"], "bytes/image", once, pictures=self._kind, **shares)

    async def run(self, model: str, workers: int, repeats: int) -> None:
        """Measures a renderer with this number of workers and prints the figures."""
        found: dict[str, list[float]] = defaultdict(list)
        async with renderer(model, workers) as service:
            await self.cold(service)
            for _ in range(repeats):
                found["float32"].append(self.bare())
                for name in ("cold", "cached", "grouped", "called", "fetched"):
                    measure: Callable[[Service], Awaitable[tuple[float, float]]] = getattr(self, name)
                    rate, rate_a_core = await measure(service)
                    found[f"{name}.rate"].append(rate)
                    found[f"{name}.core"].append(rate_a_core)
                found["uint8"].append(self.bare(do_rescale=False, do_normalize=False))
            await self.wire(service)
        self._emit(workers, found)

    def _emit(self, workers: int, found: dict[str, list[float]]) -> None:
        sizes: dict[str, Any] = {"pictures": self._kind, "workers": workers, "cores": len(cores_of(workers))}
        self._cold_rates[workers] = found["cold.rate"]
        for kind in ("float32", "uint8"):
            emit("renderer.cold.core", found["cold.core"], "images/core-s", found[kind], **sizes, reference_is=kind)
        first = min(self._cold_rates)
        emit(
            "renderer.cold",
            found["cold.rate"],
            "images/s",
            self._cold_rates[first],
            **sizes,
            reference_is=f"{first} workers",
        )
        for what in ("core", "rate"):
            unit = "images/core-s" if what == "core" else "images/s"
            suffix = ".core" if what == "core" else ""
            calls = found[f"called.{what}"]
            emit(f"renderer.cached{suffix}", found[f"cached.{what}"], unit, calls, **sizes, reference_is="empty calls")
            emit(f"renderer.grouped{suffix}", found[f"grouped.{what}"], unit, None, **sizes, images_a_request=GROUP)
            emit(f"renderer.fetched{suffix}", found[f"fetched.{what}"], unit, None, **sizes)

    @staticmethod
    def _render(service: Service, picture: Picture) -> Callable[[], Awaitable[Any]]:
        return lambda: service.client.render(picture.model_input)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="Model folder. Default: the tiny Qwen3-VL.")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pictures", nargs="+", choices=sorted(_SHAPES), default=sorted(_SHAPES))
    parser.add_argument("--count", type=int, default=256, help="Images per cold pass.")
    parser.add_argument("--cached-count", type=int, default=2048, help="Requests per cached pass.")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = options.model or str(fovea_tinyvlm.ensure("qwen3_vl"))
    for kind in options.pictures:
        bench = Bench(model, kind, options.count, options.cached_count)
        for workers in options.workers:
            asyncio.run(bench.run(model, workers, options.repeats))


if __name__ == "__main__":
    main()
