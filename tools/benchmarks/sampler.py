"""Measures Fovea's cost over vLLM itself: `python -m benchmarks.sampler --up STATE_DIR/up.json`.

The reference is an AsyncLLM that this program starts with the settings of the running sampler, read from its process,
and calls directly with rendered prompts. Fovea is called over gRPC (streamed) and through the official SDK over REST.
All run on the same machine in turns, never at once. Both engines must fit: on one GPU start Fovea with
FOVEA_SAMPLER_GPU_MEMORY_FRACTION=0.4, and with FOVEA_SAMPLER_MAX_SEQUENCES=256 for 256 requests in flight.

`--kinds`: text; image, with a new image in each prompt; seen, with one of eight images that were rendered and encoded
before, as in samples of a group. Rendering and the transfer of tensors are measured separately. The added latency is
the difference to the reference with one request in flight, in total and to the first token.
"""

import argparse
import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figure import emit, quantile
from benchmarks.running import Running, busy

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from benchmarks.sampler_ways import Timing, Way
    from fovea_sampler.settings import SamplerSettings

_SEEN_PICTURES = 8
_LEAST_REQUESTS = 8


@dataclass
class Rounds:
    """Measurements of one way under one load, one entry per round, in seconds."""

    token_rates: list[float] = field(default_factory=list)
    latencies: list[list[float]] = field(default_factory=list)
    first_tokens: list[list[float]] = field(default_factory=list)
    cores: list[dict[str, float]] = field(default_factory=list)

    def add(self, timings: Sequence["Timing"], seconds: float, cores: dict[str, float]) -> None:
        """Adds the measurements of one round."""
        self.token_rates.append(sum(one.token_count for one in timings) / seconds)
        self.latencies.append([one.whole for one in timings])
        self.first_tokens.append([one.first_token for one in timings])
        self.cores.append(cores)

    def latency(self, share: float) -> list[float]:
        """Returns a quantile of the latency per round."""
        return [quantile(one, share) for one in self.latencies]

    def first_token(self) -> list[float]:
        """Returns the median time to the first token per round."""
        return [quantile(one, 0.5) for one in self.first_tokens]


class Load:
    """Generates prompts of one kind."""

    def __init__(self, bench: Any, kind: str, options: argparse.Namespace) -> None:
        import numpy as np

        from benchmarks.client import noise

        self._bench, self._length = bench, options.prompt_tokens
        self._side = 0 if kind == "text" else options.image_side
        self._rng = np.random.default_rng()  # a second run must not find caches filled by the first
        self._pictures = [noise(self._rng, self._side) for _ in range(_SEEN_PICTURES)] if kind == "seen" else []

    def prompts(self, count: int) -> list[Any]:
        """Returns new prompts, all with different text."""
        if not self._pictures:
            return [self._bench.prompt(self._rng, self._length, self._side) for _ in range(count)]
        return [
            self._bench.after_picture(
                self._pictures[index % _SEEN_PICTURES], self._side, self._bench.tokens(self._rng, self._length)
            )
            for index in range(count)
        ]


async def drive(way: "Way", prepared: Sequence[Any], in_flight: int) -> tuple[list["Timing"], float]:
    """Samples all prompts with `in_flight` at once. Returns their timings and the total seconds."""
    waiting = iter(prepared)
    timings: list[Timing] = []

    async def work() -> None:
        for one in waiting:
            timings.append(await way.sample(one))  # noqa: PERF401 - the iterator is shared

    begun = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    return timings, time.perf_counter() - begun


async def measure(
    ways: Sequence["Way"], load: Load, in_flight: int, running: Running, options: argparse.Namespace
) -> dict[str, Rounds]:
    """Runs all ways in turns, starting with a different one each time."""
    found: dict[str, Rounds] = defaultdict(Rounds)
    count = max(options.waves * in_flight, _LEAST_REQUESTS)
    for repeat in range(options.repeats):
        turn = repeat % len(ways)
        for way in [*ways[turn:], *ways[:turn]]:
            prepared = await way.prepare(load.prompts(count))
            with running.cores() as cores:
                timings, seconds = await drive(way, prepared, in_flight)
            wrong = {one.token_count for one in timings} - {options.new_tokens}
            if wrong:
                raise RuntimeError(f"{way.name} returned {wrong} tokens instead of {options.new_tokens}")
            found[way.name].add(timings, seconds, cores)
    return found


def report(found: dict[str, Rounds], kind: str, in_flight: int, options: argparse.Namespace) -> None:
    """Prints the figures of one load."""
    direct = found.pop("direct")
    for name, rounds in found.items():
        sizes = {
            "kind": kind,
            "in_flight": in_flight,
            "prompt_tokens": options.prompt_tokens,
            "new_tokens": options.new_tokens,
            "requests": sum(map(len, rounds.latencies)),
            "image_side": 0 if kind == "text" else options.image_side,
        }
        cores = {"busy_cores": busy(rounds.cores), "reference_busy_cores": busy(direct.cores)}
        emit(f"sampler.tokens.{name}", rounds.token_rates, "token/s", direct.token_rates, **sizes, **cores)
        for share, label in ((0.5, "p50"), (0.99, "p99")):
            emit(f"sampler.latency.{label}.{name}", rounds.latency(share), "s", direct.latency(share), **sizes)
        if name == "grpc":
            emit(f"sampler.first_token.p50.{name}", rounds.first_token(), "s", direct.first_token(), **sizes)
        if in_flight == 1:
            _report_added(f"sampler.added.whole.{name}", rounds.latency(0.5), direct.latency(0.5), sizes)
            if name == "grpc":
                _report_added(f"sampler.added.first_token.{name}", rounds.first_token(), direct.first_token(), sizes)


def _report_added(figure: str, values: Sequence[float], reference: Sequence[float], sizes: dict[str, Any]) -> None:
    added = [1000 * (value - other) for value, other in zip(values, reference, strict=True)]
    emit(figure, added, "ms", **sizes)


def settings_of(pid: int) -> "SamplerSettings":
    """Returns the settings of a running sampler, and adopts its environment, so that the engines are equal."""
    import psutil

    process = psutil.Process(pid)
    same = ("FOVEA_SAMPLER_", "VLLM_", "CUDA_VISIBLE_DEVICES", "OMP_", "GOMP_", "HF_HUB_OFFLINE")
    os.environ.update({name: value for name, value in process.environ().items() if name.startswith(same)})
    from fovea_sampler.settings import SamplerSettings

    command = process.cmdline()
    return SamplerSettings.from_command_line("fovea_sampler", command[command.index("fovea_sampler") + 1 :])


async def run(llm: "AsyncLLM", running: Running, options: argparse.Namespace) -> None:
    """Measures and prints the figures."""
    from benchmarks.client import Bench
    from benchmarks.sampler_ways import Direct, Grpc, Sdk

    bench = await asyncio.to_thread(Bench.open, running.base_url, options.api_key)
    direct = Direct(llm, running, options.new_tokens)
    grpc = Grpc(running, options.api_key, options.new_tokens)
    sdk = await asyncio.to_thread(Sdk, bench, options.new_tokens)
    ways: list[Way] = [direct, *(way for way in (grpc, sdk) if way.name in options.ways)]
    for kind in options.kinds:
        load = Load(bench, kind, options)
        for way in ways:
            await drive(way, await way.prepare(load.prompts(max(options.in_flight))), max(options.in_flight))
        for in_flight in options.in_flight:
            report(await measure(ways, load, in_flight, running, options), kind, in_flight, options)
    sizes = {"image_side": options.image_side, "tensor_bytes": direct.tensor_bytes}
    for name, values in {"new": direct.render_s, "seen": direct.rerender_s, "transfer": direct.fetch_s}.items():
        if values:
            emit(f"sampler.render.{name}", values, "s", **sizes)
    for way in ways:
        await way.close()
    await asyncio.to_thread(bench.service.close, "success")


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up", type=Path, default=Path(".fovea/up.json"), help="file written by `fovea up`")
    parser.add_argument("--api-key", default="tml-local")
    parser.add_argument("--kinds", nargs="+", choices=["text", "image", "seen"], default=["text", "image", "seen"])
    parser.add_argument("--ways", nargs="+", choices=["grpc", "sdk"], default=["grpc", "sdk"])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=128, help="text tokens of a prompt, without the image")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--image-side", type=int, default=448)
    parser.add_argument("--waves", type=int, default=2, help="requests per round for each one in flight")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--reference-gpu", help="device of the reference. Default: the sampler's, which then needs room for both"
    )
    parser.add_argument(
        "--gpu-memory-fraction", type=float, help="memory fraction of the reference. Default: the sampler's"
    )
    options = parser.parse_args()
    running = Running.read(options.up)
    settings = settings_of(running.pids["sampler"])
    if options.gpu_memory_fraction:
        settings = settings.model_copy(update={"gpu_memory_fraction": options.gpu_memory_fraction})
    if options.reference_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.reference_gpu
    if settings.max_sequences < max(options.in_flight):
        sys.exit(f"start Fovea with FOVEA_SAMPLER_MAX_SEQUENCES={max(options.in_flight)}; it has fewer")
    # As in fovea_sampler, fork the engine before torch, gRPC or the SDK start threads.
    from fovea_sampler.engine import vllm_launch

    vllm_launch.prepare_environment(settings)
    capacity = vllm_launch.measure_adapter_capacity(settings)
    llm = vllm_launch.launch(vllm_launch.engine_config(settings, capacity))
    try:
        asyncio.run(run(llm, running, options))
    finally:
        llm.shutdown()


if __name__ == "__main__":
    main()
