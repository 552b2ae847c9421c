"""FlashAttention 2 against FlashAttention 4 in the trainer: `python -m benchmarks.attention /tmp/4b-128k`.

On a Hopper GPU, in one run and in turns, the program measures both kernels:
* Agreement of outputs and gradients with float32, and the time forward and backward, by shape of heads and documents.
* A step of an adapter of rank 32 on the 4B shape with one text of 16k, 32k and 64k tokens, and with ragged texts. The
  engine runs in this process, without server and gateway. Both see the same texts; their log-probabilities and the norm
  of the gradient are compared.
* Recorded passes with FlashAttention 4: results before and after the recording must be equal.

The checkpoint of the 4B shape is written if it is missing, with a context of 131,072 tokens. FlashAttention 4 needs the
package flash-attn-4, as in requirements/gpu.txt.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import shapes
from benchmarks.figure import emit
from benchmarks.flops import H200_BF16_FLOPS, SIZES
from fovea.api.v1 import model_input_pb2, trainer_pb2
from fovea.wire import tensors
from fovea_trainer.batches.datum_decoding import DatumSize
from fovea_trainer.command_queue import CreateModel, ForwardBackward, OptimStep
from fovea_trainer.model import packed_attention
from fovea_trainer.model.document_masks import Packing
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.optimizer import Adam
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.training_engine import TrainingEngine

_CONTEXT = 131072
MODEL = "attention"
_VOCABULARY = 151_000


@dataclass(frozen=True)
class Case:
    """Attention of one layer.

    Args:
        query_heads, heads: Heads of queries, and of keys and values.
        channels: Head size.
        longest: Median length of ragged documents in tokens, or of a single document if it equals `tokens`.
    """

    tokens: int
    longest: int
    query_heads: int
    heads: int
    channels: int
    causal: bool = True
    window: int | None = None


CASES = (
    Case(8192, 512, 32, 8, 128),
    Case(8192, 64, 32, 8, 128),
    Case(8192, 512, 16, 16, 64),
    Case(8192, 512, 14, 2, 64),
    Case(8192, 1024, 16, 16, 64, causal=False),
    Case(8192, 1024, 16, 16, 72, causal=False),
    Case(8192, 512, 8, 4, 256),
    Case(8192, 2048, 8, 4, 256, window=512),
    Case(8192, 2048, 32, 8, 128, window=1024),
    Case(8192, 2048, 16, 4, 192),
    Case(16384, 16384, 32, 8, 128),
    Case(32768, 32768, 32, 8, 128),
    Case(16384, 16384, 16, 8, 256),
)


@contextmanager
def second() -> Iterator[None]:
    """Makes the trainer use FlashAttention 2."""
    with mock.patch.object(packed_attention, "flash_4", return_value=(None, "this is the reference")):
        yield


@contextmanager
def fourth() -> Iterator[None]:
    """Checks that the trainer uses FlashAttention 4."""
    function, reason = packed_attention.flash_4()
    if function is None:
        raise SystemExit(f"FlashAttention 4 cannot run: {reason}")
    yield


KERNELS = {"FA2": second, "FA4": fourth}


def lengths_of(rng: np.random.Generator, total: int, median: int) -> list[int]:
    """Returns log-normal lengths with a sum of `total`, or a single length if the median is the total."""
    if median >= total:
        return [total]
    found: list[int] = []
    while sum(found) < total:
        found.append(int(np.clip(rng.lognormal(np.log(median), 0.8), 2, 8 * median)))
    found[-1] -= sum(found) - total
    return found


def milliseconds(run: Callable[[], object]) -> float:
    """Returns the median time of a call."""
    found = []
    for _ in range(8):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(found[2:])


def compare(case: Case) -> dict[str, Any]:
    """Returns errors of outputs and gradients relative to float32, and times, of both kernels."""
    rng = np.random.default_rng(case.tokens + case.channels)
    lengths = lengths_of(rng, case.tokens, case.longest)
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    packing = Packing(bounds, case.tokens)
    torch.manual_seed(1)
    heads = (case.query_heads, case.heads, case.heads)
    given = [torch.randn(1, n, case.tokens, case.channels, device="cuda", dtype=torch.bfloat16) for n in heads]
    direction = torch.randn(1, case.tokens, case.query_heads, case.channels, device="cuda", dtype=torch.bfloat16)
    module = torch.nn.Module()

    def run(dtype: torch.dtype) -> list[Tensor]:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in given]
        query, key, value = inputs
        options: dict[str, Any] = {"cu_seq_lens_q": bounds, "max_length_q": max(lengths), "packing": packing}
        options |= {"is_causal": case.causal, "sliding_window": case.window}
        out, _ = packed_attention.packed_attention(module, query, key, value, **options)
        return [out.detach(), *torch.autograd.grad(out, inputs, direction.to(dtype))]

    expected = run(torch.float32) if case.tokens <= 16384 else None
    row: dict[str, Any] = {**vars(case), "documents": len(lengths)}
    for name, kernel in KERNELS.items():
        with kernel():
            begun = time.perf_counter()
            found = run(torch.bfloat16)
            torch.cuda.synchronize()
            row[f"{name} first s"] = round(time.perf_counter() - begun, 2)
            if expected is not None:
                row[f"{name} errors"] = [
                    float(f"{float((a.float() - b).norm() / b.norm()):.2e}")
                    for a, b in zip(found, expected, strict=True)
                ]
            row[f"{name} ms"] = round(milliseconds(lambda: run(torch.bfloat16)), 3)
    row["ratio"] = round(row["FA2 ms"] / row["FA4 ms"], 2)
    return row


def call_of(lengths: list[int], seed: int) -> ForwardBackward:
    """Returns a forward_backward call on random texts."""
    rng = np.random.default_rng(seed)
    datums = []
    for length in lengths:
        ids, targets = rng.integers(0, _VOCABULARY, (2, length))
        rendered = model_input_pb2.RenderedInput(tokens=tensors.encode_tokens(ids.astype(np.int32)))
        weights = np.full(length, 1 / length, np.float32)
        inputs = {"target_tokens": tensors.encode(targets), "weights": tensors.encode(weights)}
        datums.append(trainer_pb2.Datum(input=rendered, loss_inputs=inputs).SerializeToString())
    header = trainer_pb2.ForwardBackwardHeader(
        model_id=MODEL, loss_function="cross_entropy", backward=True, datum_count=len(datums)
    )
    return ForwardBackward(
        model_id=MODEL,
        header=header.SerializeToString(),
        backward=True,
        drop_gradients=True,
        datums=datums,
        sizes=[DatumSize(length, 0) for length in lengths],
    )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step(engine: TrainingEngine, call: ForwardBackward) -> tuple[float, np.ndarray, float]:
    """Returns the seconds of a step that changes nothing, its log-probabilities and the norm of the gradient."""
    _synchronize()
    begun = time.perf_counter()
    result = engine.execute(call)
    metrics, _ = engine.execute(OptimStep(MODEL, Adam(0.0, 0.9, 0.95, 1e-8, 0.0, 0.0)))
    _synchronize()
    seconds = time.perf_counter() - begun
    logprobs = np.concatenate([[], *(np.ravel(result.logprobs[index]) for index in sorted(result.logprobs))])
    return seconds, logprobs, metrics["grad_norm:mean"]


def measure_steps(engine: TrainingEngine, repeats: int) -> list[dict[str, Any]]:
    """Measures steps of both kernels in turns."""
    rows = []
    rng = np.random.default_rng(5)
    kinds = {"ragged": lengths_of(rng, 32768, 512), **{f"{n // 1024}k": [n] for n in (16384, 32768, 65536)}}
    for name, lengths in kinds.items():
        call, found = call_of(lengths, 7), {}
        seconds: dict[str, list[float]] = {kind: [] for kind in KERNELS}
        for turn in range(repeats + 1):
            for kind, kernel in KERNELS.items():
                with kernel():
                    took, logprobs, norm = step(engine, call)
                if turn:
                    seconds[kind].append(took)
                found[kind] = logprobs, norm
        difference = found["FA4"][0].astype(np.float64) - found["FA2"][0].astype(np.float64)
        flops = SIZES["4b"].flops(lengths, 0, False)
        sizes = {"shape": "4b", "rank": 32, "texts": name, "tokens": sum(lengths), "datums": len(lengths)}
        emit("attention.step", seconds["FA4"], "s", seconds["FA2"], **sizes)
        row: dict[str, Any] = {**sizes, **{kind: statistics.median(values) for kind, values in seconds.items()}}
        row |= {"tokens/s": sum(lengths) / row["FA4"], "mfu": flops / row["FA4"] / H200_BF16_FLOPS}
        row |= {"ratio": row["FA2"] / row["FA4"], "kl": float(np.mean(np.expm1(difference) - difference))}
        row["norm differs by"] = abs(found["FA4"][1] / found["FA2"][1] - 1)
        rows.append(row)
    return rows


def check_recorded(engine: TrainingEngine) -> dict[str, float]:
    """Returns the largest difference of log-probabilities between a pass and its recording, by size."""
    found = {}
    for count, length in ((64, 64), (300, 16), (4, 1024)):
        call = call_of(count * [length], 9)
        results = [step(engine, call)[1:] for _ in range(4)]
        found[f"{count} x {length}"] = max(float(np.abs(one[0] - results[0][0]).max()) for one in results[1:])
    return found


def prepared(directory: Path) -> None:
    """Writes the checkpoint of the 4B shape if it is missing, with a context of 131,072 tokens."""
    if (directory / "config.json").exists():
        return
    shapes.build("4b", directory, "cuda")
    torch.cuda.empty_cache()
    torch.set_default_dtype(torch.float32)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = _CONTEXT
    (directory / "config.json").write_text(json.dumps(config))


def load(directory: Path) -> TrainingEngine:
    """Returns a warmed-up trainer of the 4B shape with a model."""
    prepared(directory)
    device = torch.device("cuda", 0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
        device_id=device,
    )
    settings = TrainerSettings(model=str(directory), ranks=1, recovery="", max_lora_rank=64)
    begun = time.perf_counter()
    engine = TrainingEngine(settings, directory, ControlGroup(), device, None)
    loaded = time.perf_counter()
    engine.warm_up()
    print(f"loaded in {loaded - begun:.1f} s, warm after {time.perf_counter() - loaded:.1f} s more", flush=True)
    engine.execute(CreateModel(MODEL, LoraSettings(32, 32.0, 1, True, True, True, False)))
    return engine


def main() -> None:
    """Prints the figures, and tables at the end; writes them to $OUT/attention.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="folder of the 4B shape")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("layers", "steps"), help="measure one part only")
    options = parser.parse_args()
    begun = time.perf_counter()
    _, reason = packed_attention.flash_4()
    print(f"{reason}; first kernels after {time.perf_counter() - begun:.1f} s", flush=True)
    layers = []
    for case in () if options.only == "steps" else CASES:
        layers.append(compare(case))
        print(json.dumps(layers[-1]), flush=True)
    found: dict[str, Any] = {"layers": layers}
    if options.only != "layers":
        engine = load(options.directory)
        found |= {"steps": measure_steps(engine, options.repeats), "recorded": check_recorded(engine)}
    if out := os.environ.get("OUT"):
        (Path(out) / "attention.json").write_text(json.dumps(found, indent=1))
    names = f"{'tokens':>7} {'docs':>5} {'heads':>6} {'size':>4} {'win':>5} {'FA2 ms':>8} {'FA4 ms':>8} {'ratio':>5}"
    print(f"\n{names}  errors of out, q, k, v")
    for row in layers:
        heads = f"{row['query_heads']}/{row['heads']}"
        print(
            f"{row['tokens']:7} {row['documents']:5} {heads:>6} {row['channels']:4} {row['window'] or '-':>5} "
            f"{row['FA2 ms']:8.2f} {row['FA4 ms']:8.2f} {row['ratio']:5.2f}  "
            f"{row.get('FA2 errors', '')} {row.get('FA4 errors', '')}"
        )
    for row in found.get("steps", ()):
        print(
            f"4B LoRA 32, {row['texts']:>6}: FA2 {row['FA2']:.3f} s, FA4 {row['FA4']:.3f} s, {row['ratio']:.2f} times; "
            f"{row['tokens/s']:,.0f} tokens/s, {row['mfu']:.1%} MFU; kl {row['kl']:.1e}, "
            f"norm differs by {row['norm differs by']:.1e}"
        )
    if "recorded" in found:
        print(f"largest difference of a recorded pass: {found['recorded']}")


if __name__ == "__main__":
    main()
