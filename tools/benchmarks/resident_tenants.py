"""Measures a trainer that holds many idle adapters: `python -m benchmarks.resident_tenants --model /tmp/shapes/4b`.

One tenant works: a large step, then a snapshot and its push to a receiver (gloo, on the same host). All others are
idle, each after one small step. The reference is the same work before the others existed. Figures: seconds of a step
and of a push beside the idle tenants against alone, seconds until an idle tenant's small step is done when its adapter
must come back, and the number of adapters on the host.

Idle adapters that do not fit on the device need pinned host memory, 12 bytes for each parameter: 256 of rank 32 on 4
billion parameters need up to 200 GiB. Without a GPU the tiny model runs, with `--model-memory-mib 4`.
"""

import argparse
import asyncio
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np

import fovea_tinyvlm
from benchmarks.figure import emit
from benchmarks.recovery import datums_of, trainer
from benchmarks.running import metric_total
from fovea.api.v1 import trainer_pb2, weights_pb2
from fovea.client import TrainerClient

_START_S = 600.0
_ADAM = trainer_pb2.AdamParams(learning_rate=1e-5)


class Tenant:
    """One model of a trainer."""

    def __init__(self, client: TrainerClient, model_id: str) -> None:
        self._client, self.model_id = client, model_id
        self._seq_id = 0

    async def step(self, datums: list[trainer_pb2.Datum]) -> float:
        """Returns the seconds of a forward_backward and an optim_step."""
        begun = time.perf_counter()
        header = trainer_pb2.ForwardBackwardHeader(
            model_id=self.model_id, loss_function="cross_entropy", backward=True, datum_count=len(datums)
        )
        header.seq_id = self._seq_id + 1
        self._seq_id += 2
        await self._client.forward_backward(header, datums)
        await self._client.optim_step(self.model_id, _ADAM, seq_id=self._seq_id)
        return time.perf_counter() - begun

    async def push(self, address: str) -> float:
        """Returns the seconds of a snapshot and its push."""
        begun = time.perf_counter()
        snapshot_id = f"{self.model_id}@{self._seq_id}"
        await self._client.take_snapshot(self.model_id, snapshot_id)
        await self._client.push_snapshot(snapshot_id, [address])
        return time.perf_counter() - begun


async def work(tenant: Tenant, datums: list[trainer_pb2.Datum], address: str, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of steps and pushes, after one of each that is not counted."""
    found: dict[str, list[float]] = {"step": [], "push": []}
    for _ in range(repeats + 1):
        found["step"].append(await tenant.step(datums))
        found["push"].append(await tenant.push(address))
    return {name: seconds[1:] for name, seconds in found.items()}


async def measure(options: argparse.Namespace, client: TrainerClient, metrics: str) -> dict[str, Any]:
    """Prints the figures and returns them."""
    from tests.e2e.trainer.receiving_sampler import ReceivingSampler

    receiver = ReceivingSampler()
    await receiver.start()
    lora = weights_pb2.LoraConfig(rank=options.rank, train_attention=True, train_mlp=True)
    rng = np.random.default_rng(5)
    large, small = datums_of(rng, options.tokens, options.length), datums_of(rng, 32, 32)
    tenants = [Tenant(client, f"m{number}") for number in range(options.tenants)]
    await client.create_model(tenants[0].model_id, lora)
    alone = await work(tenants[0], large, receiver.address, options.repeats)
    for tenant in tenants[1:]:
        await client.create_model(tenant.model_id, lora)
        await tenant.step(small)
    beside = await work(tenants[0], large, receiver.address, options.repeats)
    away = metric_total(metrics, "fovea_trainer_models_on_host")
    returning = [await tenant.step(small) for tenant in tenants[1 : 1 + options.repeats]]
    here = [await tenant.step(small) for tenant in tenants[1 : 1 + options.repeats]]
    await receiver.stop()
    sizes = {"model": options.model, "rank": options.rank, "tenants": options.tenants, "tokens": options.tokens}
    rows = [
        emit("trainer.resident.step", beside["step"], "s", alone["step"], **sizes),
        emit("trainer.resident.push", beside["push"], "s", alone["push"], **sizes),
        emit("trainer.resident.return", returning, "s", here, **sizes, on_host=away),
    ]
    for name in ("step", "push"):
        ratio = statistics.median(beside[name]) / statistics.median(alone[name])
        print(f"{name}: {ratio:.3f} times that of an empty trainer", file=sys.stderr)
    print(f"{away:.0f} of {options.tenants} adapters were on the host", file=sys.stderr)
    return {"rows": rows, "on_host": away}


async def run(options: argparse.Namespace, folder: pathlib.Path) -> None:
    """Starts a trainer, measures, and writes the figures below $OUT if that is set."""
    given = ["--model", options.model, "--ranks", "1", "--recovery", options.recovery]
    given += ["--max-models", str(max(256, options.tenants)), "--model-memory-mib", str(options.model_memory_mib)]
    async with trainer(given, folder / "trainer.log") as running:
        found = await measure(options, running.client, running.metrics)
    if out := os.environ.get("OUT"):
        await asyncio.to_thread(pathlib.Path(out, "resident_tenants.json").write_text, json.dumps(found))


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="checkpoint folder; empty for the tiny model")
    parser.add_argument("--tenants", type=int, default=256)
    parser.add_argument("--rank", type=int, default=32, help="rank of each adapter")
    parser.add_argument("--tokens", type=int, default=46_000, help="tokens of the large step")
    parser.add_argument("--length", type=int, default=1000, help="tokens of a text of the large step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--recovery", default="", help="folder of durable points; empty for none")
    parser.add_argument("--model-memory-mib", type=int, default=0, help="as of the trainer")
    options = parser.parse_args()
    options.model = options.model or str(fovea_tinyvlm.ensure())
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory(prefix="fovea-resident-") as folder:
        asyncio.run(run(options, pathlib.Path(folder)))


if __name__ == "__main__":
    main()
