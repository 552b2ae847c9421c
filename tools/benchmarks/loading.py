"""Measures the loading of the base model: `python -m benchmarks.loading CHECKPOINT --ranks 1 2 --repeats 3`.

Measures the host memory of the largest rank, and the seconds until all ranks hold their shards. The reference is the
usual way, which Fovea used before: transformers reads the whole model in every rank, and FSDP keeps a shard of it. Each
run uses new processes. `allocated` is the memory that a process allocates while loading (RssAnon, sampled every 10 ms),
`resident` its peak resident memory, including imports and pages of mapped files (VmHWM).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.figure import emit

WAYS = ("parts", "whole")


class HostMemory:
    """Records the peak memory that this process allocates inside the context; `peak_bytes` excludes earlier memory."""

    def __enter__(self) -> "HostMemory":
        self._before = self._most = _status("RssAnon")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def peak_bytes(self) -> int:
        return self._most - self._before

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self._most = max(self._most, _status("RssAnon"))


def _status(entry: str) -> int:
    """Returns a memory count of this process from the kernel, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{entry}:")) * 1024


def make_experts(directory: Path, layers: int) -> None:
    """Writes layers with the sizes of Qwen3-30B-A3B and random weights in bfloat16, with one matrix per expert."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    model.save_pretrained(directory, max_shard_size="1GB")


def load(directory: Path, way: str, dtype: str, device: str, rank: int, ranks: int, meeting: str) -> None:
    """Runs one rank and prints its cost as JSON."""
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from fovea_trainer.model.packed_model import build_model
    from fovea_trainer.model.sharding import ShardedModel
    from fovea_trainer.model.weight_reading import read_weights
    from fovea_trainer.settings import TrainerSettings

    own = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(own)
    store = FileStore(meeting, ranks)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=ranks
    )
    mesh = init_device_mesh(device, (ranks,))
    dist.barrier()
    settings = TrainerSettings(model=str(directory), dtype=dtype)
    with HostMemory() as memory:
        begun = time.perf_counter()
        _, element, module = build_model(settings, directory, own)
        if way == "whole":
            kind: Any = AutoModelForImageTextToText if module.vision is not None else AutoModelForCausalLM
            module.hf = kind.from_pretrained(directory, dtype=element, attn_implementation="sdpa")
        sharded = ShardedModel(module, mesh, False)
        if way == "parts":
            read_weights(sharded.module.hf, directory, own)
        dist.barrier()
        seconds = time.perf_counter() - begun
    print(json.dumps({"seconds": seconds, "allocated": memory.peak_bytes, "resident": _status("VmHWM")}))
    dist.destroy_process_group()


def run_ranks(options: argparse.Namespace, way: str, ranks: int) -> dict[str, float]:
    """Runs all ranks and returns the largest of their figures. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "benchmarks.loading", str(options.model), "--dtype", options.dtype]
        command += ["--device", options.device, "--way", way, "--ranks", str(ranks), "--meeting", f"{scratch}/meeting"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        running = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        said = [process.communicate()[0] for process in running]
    for process in running:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
    found = [json.loads(lines.splitlines()[-1]) for lines in said]
    return {name: max(one[name] for one in found) for name in found[0]}


def measure(options: argparse.Namespace, ranks: int) -> None:
    """Prints the figures for a number of ranks, both ways in turns."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way in WAYS:
            found[way].append(run_ranks(options, way, ranks))
    size_bytes = sum(path.stat().st_size for path in options.model.glob("*.safetensors"))
    sizes = {"model": options.model.name, "bytes": size_bytes, "ranks": ranks}
    sizes |= {"dtype": options.dtype, "device": options.device}
    ours, theirs = (found[way] for way in WAYS)
    emit("loading.seconds", [run["seconds"] for run in ours], "s", [run["seconds"] for run in theirs], **sizes)
    for name in ("allocated", "resident"):
        mine, other = ([run[name] / 2**30 for run in runs] for runs in (ours, theirs))
        emit(f"loading.{name}", mine, "GiB", other, **sizes)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--make-experts", type=int, help="first write this many layers of Qwen3-30B-A3B to the folder")
    for name in ("--way", "--meeting"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        (ranks,) = options.ranks
        load(options.model, options.way, options.dtype, options.device, options.rank, ranks, options.meeting)
        return
    if options.make_experts:
        make_experts(options.model, options.make_experts)
    for ranks in options.ranks:
        measure(options, ranks)


if __name__ == "__main__":
    main()
