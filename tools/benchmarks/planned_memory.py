"""Peak memory of a trainer's rank against `fovea plan`, and the speed of long datums by layers that are recomputed.

`python -m benchmarks.planned_memory 2b 4b --directory /tmp/shapes` on one GPU. For each shape of benchmarks.shapes or
benchmarks.family_shapes, which is written if it is missing, an engine without server and gateway takes steps of an
adapter of rank 32 and of all parameters on ragged texts; a peak is compared with the planned one. For one text of each
of `--tokens` it compares steps with `trainer.recompute` auto and always, with an adapter.
"""

import argparse
import gc
import json
import os
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import family_shapes, shapes
from benchmarks.attention import MODEL, call_of, lengths_of, step
from benchmarks.figure import emit
from fovea.wire.errors import ResourceExhausted
from fovea_plan.trainer_plan import TrainerPlan
from fovea_trainer.command_queue import CreateModel, DeleteModel, ForwardBackward
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.training_engine import TrainingEngine

_LORA = LoraSettings(32, 32.0, 1, True, True, True, False)


def peak_of(engine: TrainingEngine, call: ForwardBackward) -> tuple[list[float], float]:
    """Returns the seconds of three steps after a first one, and the peak memory in GiB."""
    torch.cuda.reset_peak_memory_stats()
    seconds = [step(engine, call)[0] for _ in range(4)][1:]
    return seconds, torch.cuda.max_memory_allocated() / 2**30


def planned(directory: Path) -> dict[str, float]:
    """Returns the planned peaks in GiB by kind; 0 for one that the trainer refuses. Call it before ranks meet."""
    settings = TrainerSettings(model=str(directory), ranks=1)
    plan = TrainerPlan(settings, directory, torch.cuda.get_device_properties(0).total_memory)
    found = {"adapter": plan.adapter(_LORA).peak_bytes / 2**30}
    try:
        return found | {"full": plan.full().peak_bytes / 2**30}
    except ResourceExhausted:
        return found | {"full": 0.0}


def measure(shape: str, directory: Path, plan: dict[str, float], tokens: list[int]) -> list[dict[str, Any]]:
    """Returns rows of one shape."""
    settings = TrainerSettings(model=str(directory), ranks=1, recovery="", max_lora_rank=64, recorded_tokens=0)
    device = torch.device("cuda", 0)
    engine = TrainingEngine(settings, directory, ControlGroup(), device, None)
    engine.warm_up()
    ragged, rows = call_of(lengths_of(np.random.default_rng(11), 46181, 512), 1), []
    for kind, lora in (("adapter", _LORA), ("full", None)):
        row: dict[str, Any] = {"shape": shape, "kind": kind, "planned_gib": plan[kind]}
        try:
            engine.execute(CreateModel(MODEL, lora))
        except ResourceExhausted as error:
            rows.append({**row, "refused": error.message})
            continue
        seconds, row["peak_gib"] = peak_of(engine, ragged)
        emit("plan.memory", [row["peak_gib"]], "GiB", [plan[kind]] if plan[kind] else None, shape=shape, kind=kind)
        rows.append({**row, "seconds": statistics.median(seconds)})
        for length in tokens if lora else ():
            for recompute in ("auto", "always"):
                wanted = settings.model_copy(update={"recompute": recompute})
                with mock.patch.object(engine._memory_budget, "_settings", wanted):
                    seconds, peak = peak_of(engine, call_of([length], length))
                sizes: dict[str, Any] = {"shape": shape, "tokens": length, "recompute": recompute}
                emit("recompute.step", seconds, "s", **sizes, peak_gib=round(peak, 1))
                rows.append({**sizes, "seconds": statistics.median(seconds), "peak_gib": peak})
        engine.execute(DeleteModel(MODEL))
    return rows


def main() -> None:
    """Prints the figures and a table; writes the table to $OUT/planned_memory.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=[*shapes.SHAPES, *family_shapes.SHAPES], metavar="SHAPE")
    parser.add_argument("--directory", type=Path, default=Path("/tmp/shapes"))
    parser.add_argument("--tokens", type=int, nargs="*", default=[16384, 20480, 24576, 28672, 32768])
    options = parser.parse_args()
    plans = {}
    for shape in options.shapes:
        directory = options.directory / shape
        if not (directory / "config.json").exists():
            if shape in shapes.SHAPES:
                shapes.build(shape, directory, "cuda")
            else:
                family_shapes.build(shape, directory, "cuda", without_bytes=True, seed=0)
            torch.set_default_dtype(torch.float32)
            torch.cuda.empty_cache()
        plans[shape] = planned(directory)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        rows += measure(shape, options.directory / shape, plans[shape], options.tokens)
        gc.collect()
        torch.cuda.empty_cache()
    for row in rows:
        words = (
            f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
        print("  ".join(words))
    (Path(os.environ.get("OUT", ".")) / "planned_memory.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
