"""Measures the effect of snapshots with overflowing numbers on a neighbour, for three configurations of the sampler.

The configurations are: prefix caching off, a tiny KV cache, an fp8 KV cache. On a machine with a GPU:

    python -m benchmarks.overflow --out FOLDER [--shape tiny|4b] [--unmended]

For each configuration it starts the sampler alone, because the trainer rejects such weights, and pushes adapters of
1e30 and of 6e4 like a trainer. It samples with them while a neighbour samples the base model, prints a table and writes
overflow.json. With `--unmended`, blocks of the KV cache are not zeroed and non-finite answers pass, as before the fix.
Takes four minutes on one H200.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from fovea.api.v1 import sampler_pb2
    from fovea.client.inference import SamplerClient
    from tests.e2e.sampler.process import SamplerProcess

Sample = tuple[Any, bool]
"""Tokens, and whether their log-probabilities are finite."""
Row = dict[str, Any]

CONFIGURATIONS = {
    "defaults": [],
    "prefix caching off": [],
    "tiny cache": ["--max-context", "512"],
    "fp8 cache": ["--kv-cache-dtype", "fp8"],
}
TINY_CACHE_TOKENS = 1280
UNMENDED, NO_PREFIXES = "FOVEA_OVERFLOW_UNMENDED", "FOVEA_OVERFLOW_NO_PREFIXES"
RANK, NEIGHBOURS, NEW_TOKENS = 8, 24, 16
OFFENDERS, OFFENDER_TOKENS, ROUNDS = 32, 48, 3
START_S, MEASURE_S = 240, 150


def change_fovea() -> None:
    """Applies the changes that the environment asks for. vLLM's processes import this file again, so they are changed
    too.
    """
    if os.environ.get(UNMENDED):
        with suppress(ImportError):  # commits before the change lack the module
            from fovea_sampler.vllm_patches import fresh_blocks

            fresh_blocks.apply = lambda: None
    if os.environ.get(NO_PREFIXES):
        from fovea_sampler.engine import vllm_launch

        common = vllm_launch._common_arguments
        vllm_launch._common_arguments = lambda *given: common(*given) | {"enable_prefix_caching": False}


def serve() -> None:
    """Runs the sampler with the rest of the command line."""
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    if os.environ.get(UNMENDED):
        from fovea_sampler.engine import request_conversion

        request_conversion._check_finite = lambda *_: None
    from fovea_sampler.__main__ import main

    main()


@contextmanager
def running(
    model: Path, name: str, log: Path, arguments: list[str], unmended: bool, start_s: float
) -> Iterator["SamplerProcess"]:
    """Runs a sampler with this configuration, like in tests, but with this file as the module."""
    from tests.e2e.sampler.process import SamplerProcess

    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    # The sampler sets this too, but too late if `change_fovea` has already imported vLLM.
    environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    environment |= {UNMENDED: "1" if unmended else "", NO_PREFIXES: "1" if name == "prefix caching off" else ""}
    command = [sys.executable, __file__, "serve", "--model", str(model), "--metrics-port", "0", "--transfer", "gloo"]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True, env=environment)
    sampler = SamplerProcess(process)
    assert process.stderr is not None
    reader = threading.Thread(target=sampler.log.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        sampler.wait_for_line("ready .* after the start", start_s)
        yield sampler
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        reader.join(10)
        log.write_text("".join(sampler.log))


def adapter(model: Path, value: float) -> dict[str, "torch.Tensor"]:
    """Returns an adapter of all projections of attention and MLP layers, with equal elements."""
    import torch

    from fovea_sampler.engine.manifest_check import checkpoint_shapes

    found = {}
    for name, shape in checkpoint_shapes(model).items():
        if "language_model" in name and ".layers." in name and name.endswith("_proj.weight"):
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{prefix}.lora_A.weight"] = torch.full((RANK, shape[1]), value)
            found[f"{prefix}.lora_B.weight"] = torch.full((shape[0], RANK), value)
    return found


class Traffic:
    """Requests of the two tenants."""

    def __init__(self, client: "SamplerClient") -> None:
        self._client = client

    async def neighbour(self, number: int) -> Sample:
        """Returns greedy tokens of the base model and whether they are finite. Prompts end in the middle of a block."""
        from tests.e2e.sampler.asking import ask, rendered, request_for

        prompt = rendered([[20 + (7 * number + 3 * place) % 700 for place in range(5 + 3 * number)]])
        drawn = (
            await ask(
                self._client,
                request_for(prompt, cache_salt="alice", stop=_to_the_end(), max_tokens=NEW_TOKENS, temperature=0.0),
            )
        ).sequences[0]
        return drawn.tokens, all(abs(value) < 1e4 for value in drawn.logprobs)

    async def neighbours(self, at_once: bool) -> list[Sample]:
        """Samples all prompts: one at a time, because other batch sizes round differently, or all together."""
        if at_once:
            return await asyncio.gather(*map(self.neighbour, range(NEIGHBOURS)))
        return [await self.neighbour(number) for number in range(NEIGHBOURS)]

    async def offend(self, snapshot_id: str, number: int) -> str:
        """Samples from large weights and returns the outcome."""
        from fovea.wire.errors import FoveaError
        from tests.e2e.sampler.asking import ask, rendered, request_for

        prompt = rendered([[30 + (5 * number + place) % 600 for place in range(100)]])
        wanted = request_for(prompt, snapshot_id, 2, cache_salt="bob", stop=_to_the_end(), max_tokens=OFFENDER_TOKENS)
        try:
            answer = await ask(self._client, wanted)
        except FoveaError as error:
            return error.reason
        values = [value for one in answer.sequences for value in one.logprobs]
        return "answered, finite" if all(abs(value) < 1e30 for value in values) else "answered with NaN"

    async def tokens_per_s(self) -> float:
        """Returns the tokens per second of 64 sequences of the base model with 128 tokens each."""
        from tests.e2e.sampler.asking import ask, rendered, request_for

        wanted = [
            request_for(
                rendered([[number + 10] * 40]), stop=_to_the_end(), max_tokens=128, temperature=1.0, seed=number
            )
            for number in range(64)
        ]
        begun = time.perf_counter()
        await asyncio.gather(*(ask(self._client, one) for one in wanted))
        return 64 * 128 / (time.perf_counter() - begun)


def _to_the_end() -> "sampler_pb2.StopCondition":
    from fovea.api.v1 import sampler_pb2

    return sampler_pb2.StopCondition(ignore_eos=True)


def compared(found: Sequence[Sample], wanted: Sequence[Sample]) -> dict[str, int]:
    """Counts the samples that are right, and those that are at least finite."""
    same = sum(ours[0] == theirs[0] for ours, theirs in zip(found, wanted, strict=True))
    return {"right": same, "finite": sum(finite for _, finite in found), "of": len(found)}


async def measure(sampler: "SamplerProcess", model: Path) -> Row:
    """Measures one configuration: the neighbour before, during and after the offending requests."""
    from fovea.client.inference import SamplerClient
    from tests.e2e.sampler.sender import Sender

    async with SamplerClient(sampler.address) as client:
        traffic = Traffic(client)
        await traffic.neighbours(at_once=False)  # compiles the kernels
        wanted = await traffic.neighbours(at_once=False)
        row: Row = {"before": compared(await traffic.neighbours(at_once=False), wanted)}
        sender = await Sender(client).join()
        outcomes: dict[str, Counter[str]] = {}
        besides: list[tuple[Sample, Sample]] = []
        for value in (1e30, 6e4):
            tensors, outcomes[f"{value:g}"] = adapter(model, value), Counter()
            for number in range(ROUNDS):
                name = f"large-{value:g}-{number}@1"
                await sender.push(name, tensors, RANK)
                offenders = asyncio.gather(*(traffic.offend(name, one) for one in range(OFFENDERS)))
                beside, found = await asyncio.gather(traffic.neighbours(at_once=True), offenders)
                outcomes[f"{value:g}"] += Counter(found)
                besides += zip(beside, wanted, strict=True)
                await client.drop_snapshot(name)
        row["beside (batches differ)"] = compared([ours for ours, _ in besides], [theirs for _, theirs in besides])
        row["after"] = compared([*await traffic.neighbours(at_once=False)], wanted)
        row["after, again"] = compared([*await traffic.neighbours(at_once=False)], wanted)
        row["offender"] = {value: dict(found) for value, found in outcomes.items()}
        row["base tokens/s"] = round(await traffic.tokens_per_s())
        return row


def is_right(row: Row) -> bool:
    """Returns whether all samples of the neighbour are right; during the offending requests, where rounding differs,
    finite.
    """
    beside = row["beside (batches differ)"]
    after = (row["after"], row["after, again"])
    return bool(beside["finite"] == beside["of"]) and all(one["right"] == one["of"] for one in after)


def cache_mib(model: Path) -> int:
    """Returns the size of a KV cache for `TINY_CACHE_TOKENS` tokens, in MiB."""
    text = json.loads((model / "config.json").read_text())
    text = text.get("text_config", text)
    token_bytes = 2 * 2 * int(text["num_key_value_heads"]) * int(text["head_dim"]) * int(text["num_hidden_layers"])
    return max(16, int(-(-TINY_CACHE_TOKENS * token_bytes // 2**20)))


def built(shape: str) -> Path:
    """A model of this shape with random weights."""
    model = Path("/tmp/shapes") / shape
    if not (model / "config.json").exists():
        subprocess.run([sys.executable, "-m", "benchmarks.shapes", shape, str(model)], check=True)
    return model


def main() -> int:
    """Runs the configurations; ends with 1 if a neighbour got a wrong sample, or a configuration failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--model", type=Path, help="Checkpoint folder, instead of a shape.")
    parser.add_argument("--unmended", action="store_true")
    parser.add_argument(
        "--deadline-s", type=float, default=440, help="Seconds after which no further measurement starts."
    )
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=[*CONFIGURATIONS][1:])
    parser.add_argument(
        "--sampler", nargs=argparse.REMAINDER, default=["--eager"], help="Options of the sampler; must come last."
    )
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Row] = {}
    begun = time.monotonic()
    model = asked.model or built(asked.shape)

    def left(most_s: float) -> float:
        return max(0.0, min(most_s, float(asked.deadline_s) - time.monotonic() + begun))

    for name in asked.configurations:
        more = ["--kv-cache-mib", str(cache_mib(model))] if name == "tiny cache" else []
        log = asked.out / f"{name.replace(' ', '-')}{'-unmended' if asked.unmended else ''}.log"
        started = time.monotonic()
        try:
            options = [*CONFIGURATIONS[name], *more, *asked.sampler]
            with running(model, name, log, options, asked.unmended, left(START_S)) as sampler:
                rows[name] = asyncio.run(asyncio.wait_for(measure(sampler, model), left(MEASURE_S)))
        except Exception as error:  # measure the other configurations anyway
            rows[name] = {"failed": f"{type(error).__name__}: {str(error)[-1500:]}"}
        rows[name]["seconds"] = round(time.monotonic() - started, 1)
        print(json.dumps({name: rows[name]}), flush=True)
        file = "overflow-unmended.json" if asked.unmended else "overflow.json"
        (asked.out / file).write_text(
            json.dumps({"model": str(model), "unmended": asked.unmended, "rows": rows}, indent=1)
        )
    print(f"\n{'configuration':20} {'before':>8} {'beside':>12} {'after':>8} {'again':>8} {'tokens/s':>9}  offender")
    for name, row in rows.items():
        if "failed" in row:
            print(f"{name:20} FAILED {row['failed'][:200]}")
            continue
        after, again, beside = row["after"], row["after, again"], row["beside (batches differ)"]
        print(
            f"{name:20} {row['before']['right']:>5}/{row['before']['of']}"
            f" {beside['right']:>4}({beside['finite']})/{beside['of']} {after['right']:>5}/{after['of']}"
            f" {again['right']:>5}/{again['of']} {row['base tokens/s']:>9}  {row['offender']}"
        )
    print(f"{time.monotonic() - begun:.0f} s; beside: right (finite) of all; other batch sizes round differently")
    right = all("failed" not in row and is_right(row) for row in rows.values())
    return 0 if rows and right else 1


change_fovea()
if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    else:
        sys.exit(main())
