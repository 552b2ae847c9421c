"""One long datum on one GPU and on several together: `python -m benchmarks.long_datums /tmp/4b-128k --ranks 1 2`.

A step of an adapter of rank 32 on one datum with 16 pictures of 448 x 448, by number of ranks. Ranks of one trainer
share the datum; the engines run in processes of this program, without server and gateway. Every step runs the tower.
The checkpoint is that of `benchmarks.attention`, or any other; without a GPU the program runs on the CPU, for trials.
"""

import argparse
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing as processes

from benchmarks.attention import MODEL, prepared, step
from benchmarks.figure import emit
from benchmarks.flops import H200_BF16_FLOPS, SIZES
from fovea.api.v1 import trainer_pb2
from fovea.runtime.hosts import free_ports
from fovea.wire import tensors
from fovea.wire.errors import ResourceExhausted
from fovea.wire.tensors import FeatureTensors
from fovea_parity.documents import Content, DocumentMaker, picture
from fovea_parity.refusals import running_renderer
from fovea_trainer.batches.datum_decoding import decode_datum
from fovea_trainer.command_queue import CreateModel, DeleteModel, ForwardBackward
from fovea_trainer.losses import loss_of
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.training_engine import TrainingEngine

_SIDE = 448


def make_datum(
    maker: DocumentMaker, length: int, pictures: int, address: str, held: dict[str, FeatureTensors]
) -> trainer_pb2.Datum:
    """Returns a datum of `length` tokens: pictures with words between them, then random tokens."""
    contents: list[Content] = ["Look at these."]
    for seed in range(pictures):
        contents += [picture((_SIDE, _SIDE), 1000 * length + seed), " And "]
    document = maker.splice(contents)
    rng = np.random.default_rng(length)
    if (more := length - len(document.ids)) < 0:
        raise SystemExit(f"{pictures} pictures need {len(document.ids)} tokens, more than {length}")
    ids = np.concatenate([document.ids, rng.integers(0, 1000, more)]).astype(np.int32)
    found = document.rendered(address, held)
    found.tokens = tensors.encode_tokens(ids)
    if document.positions is not None:
        tail = document.positions.max() + 1 + np.arange(more)
        rows = np.concatenate([document.positions, np.tile(tail, (len(document.positions), 1))], axis=1)
        found.positions.CopyFrom(tensors.encode(rows.astype(np.int32)))
    inputs = {
        "target_tokens": tensors.encode(np.roll(ids, -1).astype(np.int64)),
        "weights": tensors.encode(np.full(length, 1 / length, np.float32)),
    }
    return trainer_pb2.Datum(input=found, loss_inputs=inputs)


def command_of(datum: bytes, engine: TrainingEngine) -> ForwardBackward:
    """Returns the call on one datum."""
    header = trainer_pb2.ForwardBackwardHeader(
        model_id=MODEL, loss_function="cross_entropy", backward=True, datum_count=1
    )
    size = decode_datum(trainer_pb2.Datum.FromString(datum), 0, loss_of(header), engine.limits).size
    return ForwardBackward(
        model_id=MODEL,
        header=header.SerializeToString(),
        backward=True,
        drop_gradients=True,
        datums=[datum],
        sizes=[size],
    )


def work(rank: int, ranks: int, port: int, directory: Path, datums: list[bytes], repeats: int, given: str) -> None:
    """Runs one rank. Rank 0 writes the seconds of the steps of each datum, or the refusal."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=5),
        device_id=device if on_gpu else None,
    )
    options = json.loads(given)
    settings = TrainerSettings(
        model=str(directory), ranks=ranks, recovery="", max_lora_rank=64, vision_memory_mib=0, **options
    )
    engine = TrainingEngine(settings, directory, ControlGroup(), device, None)
    engine.warm_up()
    engine.execute(CreateModel(MODEL, LoraSettings(32, 32.0, 1, True, True, True, False)))
    found: list[dict[str, Any]] = []
    for datum in datums:
        call = command_of(datum, engine)
        try:
            seconds = [step(engine, call)[0] for _ in range(repeats + 1)][1:]
            row: dict[str, Any] = {"seconds": seconds, "loss": engine.execute(call).metrics.get("loss:sum")}
        except ResourceExhausted as error:
            row = {"refused": error.message}
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        found.append({**row, "peak_gib": round(peak, 1)})
    engine.execute(DeleteModel(MODEL))
    if rank == 0:
        Path(os.environ["LONG_DATUMS"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Prints the figures and a table; writes the table to $OUT/long_datums.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="folder of the model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", default="{}", help="further settings of the trainer, as JSON")
    options = parser.parse_args()
    prepared(options.directory)
    out = Path(os.environ.get("OUT", "."))
    os.environ["LONG_DATUMS"] = str(out / "long_datums_of_one.json")
    maker, found = DocumentMaker(options.directory), {}
    with running_renderer() as (address, held):
        datums = [
            make_datum(maker, length, options.pictures, address, held).SerializeToString() for length in options.tokens
        ]
        for ranks in options.ranks:
            (port,) = free_ports(1)
            begun = time.perf_counter()
            arguments = (ranks, port, options.directory, datums, options.repeats, options.settings)
            processes.start_processes(work, arguments, ranks, start_method="spawn")  # type: ignore[attr-defined, no-untyped-call]
            found[ranks] = json.loads(Path(os.environ["LONG_DATUMS"]).read_text())
            print(f"{ranks} ranks: {time.perf_counter() - begun:.0f} s in all", flush=True)
    Path(os.environ["LONG_DATUMS"]).unlink()
    first = found[options.ranks[0]]
    for place, length in enumerate(options.tokens):
        for ranks, rows in found.items():
            row, reference = rows[place], first[place].get("seconds")
            if "refused" in row:
                print(f"{length:7} tokens, {ranks} ranks: {row['refused']}")
                continue
            sizes = {"tokens": length, "pictures": options.pictures, "ranks": ranks, "model": options.directory.name}
            emit("long_datums.step", row["seconds"], "s", reference, **sizes)
            took = statistics.median(row["seconds"])
            share = SIZES["4b"].flops([length], options.pictures, False) / took / H200_BF16_FLOPS / ranks
            faster = statistics.median(reference) / took if reference else float("nan")
            print(
                f"{length:7} tokens, {ranks} ranks: {took:.2f} s, {length / took:,.0f} tokens/s, {faster:.2f} times "
                f"{options.ranks[0]} rank, {share:.1%} MFU of the 4B shape, {row['peak_gib']} GiB, "
                f"loss {row['loss']:.5f}"
            )
    (out / "long_datums.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
