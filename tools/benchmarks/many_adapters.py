"""Measures a sampler with many adapters on one GPU: `python -m benchmarks.many_adapters MODEL --out DIRECTORY`.

Starts one sampler without a gateway. Pushes adapters of random weights through the GPU's memory, as a trainer on the
same GPU does. `--in-flight` clients then sample as fast as they get answers, from 1, 16 and 64 adapters in turns. The
last part holds `--known` adapters, samples from as many as there are clients, and pushes new versions of those
meanwhile. Prints a table and writes `many_adapters.jsonl` with each figure. If MODEL does not exist, it is built with
the shape that its name states (`benchmarks.shapes`). Run the same file in another checkout to compare.

`--kernels` measures the kernels alone: microseconds of one layer's adapters, for this checkout and for vLLM's kernels.
"""

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from benchmarks.adapters import THROUGH, random_adapter
from benchmarks.figure import machine, quantile
from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.client.inference import SamplerClient
from fovea.wire.errors import FoveaError
from fovea.wire.manifest import buckets, padded_bytes
from fovea_weights.weight_transfer import SharedGpuGroup
from tests.e2e.sampler.asking import ask, rendered, request_for
from tests.e2e.sampler.process import SamplerProcess, running_sampler
from tests.e2e.sampler.sender import manifest_of

_TIMEOUT_S = 120.0
_BUCKET_BYTES = 256 << 20
MIXED = (8, 16, 32, 64)


class GpuSender:
    """The trainer's side of pushes from this GPU, or over gloo without one."""

    def __init__(self, client: SamplerClient, device: torch.device) -> None:
        self._client = client
        self._device = device
        self._group_id = f"group-{uuid.uuid4().hex[:8]}"

    async def join(self) -> "GpuSender":
        """Forms the group."""
        timeout = timedelta(seconds=_TIMEOUT_S)
        self._store = TCPStore("127.0.0.1", 0, 2, True, timeout, wait_for_workers=False)
        request = sampler_pb2.JoinTransferGroupRequest(
            group_id=self._group_id, master_address="127.0.0.1", master_port=self._store.port, rank_offset=1,
            world_size=2, timeout_s=_TIMEOUT_S,
        )  # fmt: skip
        prefixed = PrefixStore(self._group_id, self._store)
        make: Any
        if self._device.type == "cuda":
            make = asyncio.to_thread(SharedGpuGroup.meet, prefixed, 0, 2, timeout, self._device)
        else:
            make = asyncio.to_thread(dist.ProcessGroupGloo, prefixed, 0, 2, timeout)
        self._group: Any = (await asyncio.gather(make, self._client.join_transfer_group(request)))[0]
        return self

    async def push(self, manifest: weights_pb2.SnapshotManifest, flat: torch.Tensor) -> float:
        """Pushes the bytes of a snapshot; returns the seconds until it can be sampled from."""
        begun = time.perf_counter()
        request = sampler_pb2.ReceiveSnapshotRequest(group_id=self._group_id, manifest=manifest, timeout_s=_TIMEOUT_S)
        async for response in self._client.receive_snapshot(request):
            if response.WhichOneof("phase") == "ready":
                await asyncio.to_thread(self._broadcast, manifest, flat)
        return time.perf_counter() - begun

    def _broadcast(self, manifest: weights_pb2.SnapshotManifest, flat: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=_TIMEOUT_S)
        start = 0
        for specs in buckets(manifest.tensors, manifest.bucket_bytes):
            size = sum(map(padded_bytes, specs))
            self._group.broadcast([flat[start : start + size]], options).wait(options.timeout)
            start += size


class Adapters:
    """Adapters of random weights of one model, on the device."""

    def __init__(self, model: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self._first: dict[int, dict[str, torch.Tensor]] = {}

    def make(self, name: str, rank: int, number: int) -> tuple[weights_pb2.SnapshotManifest, torch.Tensor]:
        """Returns the manifest and the bytes of an adapter. Different numbers give different weights."""
        if rank not in self._first:
            drawn = random_adapter(self._model, rank, self._dtype, seed=rank)
            self._first[rank] = {key: one.to(self._device) for key, one in drawn.items()}
        tensors: Mapping[str, torch.Tensor] = {key: one.roll(number) for key, one in self._first[rank].items()}
        manifest = manifest_of(name, tensors, rank)
        manifest.bucket_bytes = _BUCKET_BYTES
        return manifest, torch.cat([one.contiguous().view(torch.uint8).reshape(-1) for one in tensors.values()])


class Load:
    """Clients that sample one adapter each, one request after another. `names` may change while they run."""

    def __init__(self, client: SamplerClient, names: Sequence[str], options: argparse.Namespace) -> None:
        self._client, self.names, self._options = client, list(names), options
        self.token_count = 0
        self.failures: list[str] = []

    async def run(self, requests: int) -> float:
        """Returns the tokens/s of all clients, each with this many requests."""
        self.token_count, begun = 0, time.perf_counter()
        await asyncio.gather(*(self._client_of(number, requests) for number in range(self._options.in_flight)))
        return self.token_count / (time.perf_counter() - begun)

    async def _client_of(self, number: int, requests: int) -> None:
        for turn in range(requests):
            ids = [5 + number, 70 + turn, *range(10, 8 + self._options.prompt_tokens)]
            name = self.names[number % len(self.names)]
            # Clients start at different lengths, so that their requests do not end all in one step.
            length = (
                self._options.tokens if turn else 1 + self._options.tokens * (number + 1) // self._options.in_flight
            )
            asked = request_for(rendered([ids]), name, max_tokens=length, temperature=0.0, stop=THROUGH, at_once=True)
            try:
                await ask(self._client, asked)
                self.token_count += length
            except FoveaError as error:
                self.failures.append(f"{type(error).__name__}: {error.message}")


class Report:
    """The figures so far: a table on the screen, lines of JSON in a file."""

    def __init__(self, out: Path | None) -> None:
        self._out = out

    def add(self, figure: str, values: Sequence[float], unit: str, **sizes: Any) -> None:
        """Adds a figure with its repeats; the table shows the median."""
        value = quantile(values, 0.5)
        print(
            f"{figure:34} {value:10.4g} {unit:9} {' '.join(f'{key}={one}' for key, one in sizes.items())}", flush=True
        )
        if self._out is not None:
            line = {"figure": f"many_adapters.{figure}", "value": value, "values": list(values), "unit": unit}
            with (self._out / "many_adapters.jsonl").open("a") as file:
                file.write(json.dumps(line | {"sizes": sizes, "machine": machine()}) + "\n")


async def measure(sampler: SamplerProcess, options: argparse.Namespace, device: torch.device, report: Report) -> None:
    """Measures all parts on a running sampler."""
    async with SamplerClient(sampler.address) as client:
        dtype = getattr(torch, (await client.info()).dtype)
        adapters = Adapters(options.model, dtype, device)
        sender = await GpuSender(client, device).join()
        most = max(options.counts)
        names = [f"tenant-{number}@1" for number in range(most)]
        pushes = [await sender.push(*adapters.make(name, options.rank, at)) for at, name in enumerate(names)]
        report.add("push_idle", pushes, "s", p95=round(quantile(pushes, 0.95), 3), adapters=most, rank=options.rank)
        for count in [0, *options.counts]:
            load = Load(client, names[:count] or [""], options)
            await load.run(1)
            rates = [await load.run(options.requests) for _ in range(options.repeats)]
            report.add("sample", rates, "tokens/s", adapters=count, in_flight=options.in_flight, rank=options.rank,
                       failures=len(load.failures))  # fmt: skip
        await measure_mixed(client, sender, adapters, options, report)
        await measure_known(client, sender, adapters, options, report)
    for metric in ("fovea_sampler_requests_waiting_for_slot", "fovea_sampler_slot_wait_seconds_count"):
        if metric in sampler.metrics_page():
            report.add(metric.removeprefix("fovea_sampler_"), [sampler.metric(metric)], "requests")


async def measure_mixed(
    client: SamplerClient, sender: GpuSender, adapters: Adapters, options: argparse.Namespace, report: Report
) -> None:
    """Samples from adapters of ranks 8 to 64."""
    names = [f"mixed-{number}@1" for number in range(options.in_flight)]
    for number, name in enumerate(names):
        await sender.push(*adapters.make(name, MIXED[number % len(MIXED)], number))
    load = Load(client, names, options)
    await load.run(1)
    rates = [await load.run(options.requests) for _ in range(options.repeats)]
    report.add("sample_mixed", rates, "tokens/s", adapters=len(names), ranks=MIXED, failures=len(load.failures))
    for name in names:
        await client.drop_snapshot(name)


async def measure_known(
    client: SamplerClient, sender: GpuSender, adapters: Adapters, options: argparse.Namespace, report: Report
) -> None:
    """Holds many adapters, samples from a part of them, and pushes new versions of that part meanwhile."""
    if not options.known:
        return
    known = [f"known-{number}@1" for number in range(options.known)]
    begun = time.perf_counter()
    for number, name in enumerate(known):
        await sender.push(*adapters.make(name, options.known_rank, number))
    report.add("push_known", [(time.perf_counter() - begun) / len(known)], "s each", adapters=len(known))
    hot = known[:: max(1, len(known) // options.in_flight)][: options.in_flight]
    load = Load(client, hot, options)
    await load.run(1)
    rate = await load.run(options.requests)
    report.add("sample_hot", [rate], "tokens/s", known=len(known), hot=len(hot), failures=len(load.failures))
    running = asyncio.create_task(load.run(2 * options.requests))
    seconds: list[float] = []
    while not running.done():
        at = len(seconds) % len(hot)
        name = f"{hot[at].partition('@')[0]}@{2 + len(seconds) // len(hot)}"
        seconds.append(await sender.push(*adapters.make(name, options.known_rank, 7 * len(seconds) + 1)))
        load.names[at] = name
        await asyncio.sleep(options.push_pause_s)
    rate = await running
    report.add("sample_hot_with_pushes", [rate], "tokens/s", pushes=len(seconds), failures=len(load.failures))
    report.add("push_under_load", seconds, "s", p95=round(quantile(seconds, 0.95), 3), held=len(
        (await client.info()).adapter_snapshot_ids))  # fmt: skip
    for failure in sorted(set(load.failures))[:5]:
        print("  failed:", failure[:200])


LAYER = {
    "qkv": (2560, (4096, 1024, 1024)),
    "o": (4096, (2560,)),
    "gate_up": (2560, (9728, 9728)),
    "down": (9728, (2560,)),
}
"""Input width and output widths of the four projections of a layer of the 4B shape."""


def measure_kernels(report: Report, slots: int = 64, rank: int = 64) -> None:
    """Measures the adapters of one layer in CUDA graphs, with all slots of the largest rank."""
    from vllm.lora.ops.triton_ops import lora_expand, lora_shrink

    from benchmarks import adapter_kernels

    for ours, add in adapter_kernels.ways(lora_shrink, lora_expand):
        for rows, active, own_rank in ((64, 1, 32), (64, 16, 32), (64, 64, 32), (64, 64, 64), (2048, 64, 32)):
            us = adapter_kernels.microseconds(LAYER, slots, rank, rows, active, own_rank, add)
            report.add("kernels", [us], "us/layer", whose=ours, rows=rows, adapters=active, rank=own_rank)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint directory; its name is a shape if it does not exist")
    parser.add_argument("--out", type=Path, help="folder of many_adapters.jsonl")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 16, 64], help="numbers of adapters")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=3, help="requests of each client in a round")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--known", type=int, default=512, help="adapters held at once; 0 leaves that part out")
    parser.add_argument("--known-rank", type=int, default=32)
    parser.add_argument("--push-pause-s", type=float, default=0.1, help="seconds between pushes under load")
    parser.add_argument("--kernels", action="store_true", help="measure the kernels alone")
    parser.add_argument("--sampler", default="", help="further options of the sampler, separated by spaces")
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    report = Report(options.out)
    if options.kernels:
        measure_kernels(report)
        return
    if not (options.model / "config.json").exists():
        from benchmarks import shapes

        shapes.build(options.model.name, options.model, device.type)
    settings = ["--port", "0", "--transfer", "cuda_ipc" if device.type == "cuda" else "gloo"]
    settings += ["--full-push-room", "never", "--max-adapters", "1024", *options.sampler.split()]
    begun = time.perf_counter()
    with running_sampler(options.model, *settings) as sampler:
        room = sampler.wait_for_line("adapters: .* in one batch").strip().partition("adapters: ")[2]
        print(room)
        report.add("ready", [time.perf_counter() - begun], "s", room=room)
        asyncio.run(measure(sampler, options, device, report))


if __name__ == "__main__":
    main()
