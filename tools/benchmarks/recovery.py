"""Measures the cost of durable points: `python -m benchmarks.recovery [--model DIR] [--rank 32] [--tokens 32768]`.

Two trainers of one model run side by side, one with recovery and one without. They take turns with blocks of steps of
forward_backward and optim_step on the same texts. In a block, every step but the first overlaps with the writing of the
previous one. Between blocks everything is made durable, so that neither trainer pays for the other. Figures: seconds of
a step with recovery against without, seconds and bytes of a point, and the time of parking and restoring.

On a GPU both share it, each with half of its memory: `--model /tmp/shapes/4b --memory-limit-mib 60000`.
"""

import argparse
import asyncio
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np

import fovea_tinyvlm
from benchmarks.figure import emit
from benchmarks.running import metric_total
from fovea.api.v1 import model_input_pb2, trainer_pb2, weights_pb2
from fovea.client import TrainerClient
from fovea.runtime.hosts import free_ports
from fovea.wire import tensors

_MODEL = "m"
_START_S = 600.0
_VOCABULARY = 1000


@dataclass
class Trainer:
    """A running trainer, and the number of commands of its model."""

    client: TrainerClient
    metrics: str
    seq_id: int = 0

    async def step(self, datums: Sequence[trainer_pb2.Datum]) -> float:
        """Returns the seconds of a step."""
        header = trainer_pb2.ForwardBackwardHeader(
            model_id=_MODEL, loss_function="cross_entropy", backward=True, datum_count=len(datums)
        )
        header.seq_id = self.seq_id + 1
        self.seq_id += 2
        begun = time.perf_counter()
        await self.client.forward_backward(header, datums)
        await self.client.optim_step(_MODEL, trainer_pb2.AdamParams(learning_rate=1e-5), seq_id=self.seq_id)
        return time.perf_counter() - begun

    async def settle(self) -> None:
        """Waits until its model is durable, if it has recovery."""
        info = await self.client.info()
        while info.keeps_recovery and info.durable_seq_ids.get(_MODEL, 0) < self.seq_id:
            await asyncio.sleep(0.05)
            info = await self.client.info()


@asynccontextmanager
async def trainer(given: Sequence[str], log: pathlib.Path) -> AsyncIterator[Trainer]:
    """Runs a trainer with these options inside the context."""
    port, metrics = free_ports(2)
    arguments = [*given, "--port", str(port), "--metrics-port", str(metrics)]
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fovea_trainer", *arguments, stdout=output, stderr=output
        )
    client = TrainerClient(f"127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + _START_S
        while not await client.is_serving("fovea.api.v1.TrainerService"):
            if process.returncode is not None or time.monotonic() > deadline:
                raise RuntimeError(await asyncio.to_thread(log.read_text))
            await asyncio.sleep(0.5)
        yield Trainer(client, f"http://127.0.0.1:{metrics}/metrics")
    finally:
        await client.close()
        if process.returncode is None:
            process.terminate()
        await process.wait()


def datums_of(rng: np.random.Generator, tokens: int, length: int) -> list[trainer_pb2.Datum]:
    """Returns texts of one length with `tokens` tokens in total."""
    found = []
    for _ in range(max(1, tokens // length)):
        ids, targets = rng.integers(0, _VOCABULARY, (2, length))
        rendered = model_input_pb2.RenderedInput(tokens=tensors.encode_tokens(ids.astype(np.int32)))
        inputs = {"target_tokens": tensors.encode(targets), "weights": tensors.encode(np.ones(length, np.float32))}
        found.append(trainer_pb2.Datum(input=rendered, loss_inputs=inputs))
    return found


async def measure(options: argparse.Namespace, folder: pathlib.Path) -> None:
    """Prints the figures."""
    lora = weights_pb2.LoraConfig(
        rank=options.rank, train_attention=True, train_mlp=True, train_unembedding=options.unembedding
    )
    given = ["--model", options.model, "--ranks", str(options.ranks)]
    given += ["--memory-limit-mib", str(options.memory_limit_mib)]
    async with AsyncExitStack() as stack:
        ways = [
            await stack.enter_async_context(trainer([*given, "--recovery", kept], folder / f"{bool(kept)}.log"))
            for kept in (str(folder / "recovery"), "")
        ]
        for one in ways:
            await one.client.create_model(_MODEL, lora if options.rank else None)
        datums = datums_of(np.random.default_rng(5), options.tokens, options.length)
        seconds: list[list[float]] = [[], []]
        for block in range(options.blocks + 1):  # the first block warms up
            for one, spent in zip(ways, seconds, strict=True):
                found = [await one.step(datums) for _ in range(options.steps + 1)]
                spent += found[1:] if block else []
                await one.settle()
        kept = ways[0]
        sizes = {"model": options.model, "lora_rank": options.rank, "tokens": options.tokens, "steps": options.steps}
        emit("trainer.recovery.step", seconds[0], "s", seconds[1], **sizes)
        count = metric_total(kept.metrics, "fovea_trainer_durable_seconds_count")
        total = metric_total(kept.metrics, "fovea_trainer_durable_seconds_sum")
        written = metric_total(kept.metrics, "fovea_trainer_durable_bytes_total", kind="state")
        emit("trainer.recovery.point", [total / count], "s", bytes=written / count, points=count, of=kept.seq_id // 2)
        begun = time.perf_counter()
        parked = await kept.client.park_model(_MODEL)
        parking = time.perf_counter() - begun
        await kept.client.restore_model(_MODEL, lora if options.rank else None)
        restoring = time.perf_counter() - begun - parking
        emit("trainer.recovery.park", [parking], "s", bytes=parked.size_bytes)
        emit("trainer.recovery.restore", [restoring], "s", bytes=parked.size_bytes)
        for one in ways:
            await one.client.delete_model(_MODEL)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="checkpoint folder; empty for the tiny model")
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapter; 0 trains all parameters")
    parser.add_argument("--unembedding", action="store_true", help="also adapt the unembedding")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each trainer")
    parser.add_argument("--memory-limit-mib", type=int, default=0, help="memory limit of each rank")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a text")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a block")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--state", type=pathlib.Path, help="folder for durable points. Default: a temporary folder")
    options = parser.parse_args()
    options.model = options.model or str(fovea_tinyvlm.ensure())
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory(prefix="fovea-recovery-", dir=options.state) as folder:
        asyncio.run(measure(options, pathlib.Path(folder)))


if __name__ == "__main__":
    main()
