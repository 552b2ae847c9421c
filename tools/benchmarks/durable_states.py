"""Measures how fast the states of many adapters become durable: `python -m benchmarks.durable_states --folder DIR`.

The real keeper, queue and writer of a trainer's rank 0 run on the CPU. Each adapter changes once in a round, and a
thread copies states as the rank's thread does, after a pause for the command that runs when the copy is asked for.
With `--python`, another thread runs Python all the time, as the launch of kernels does. The figure is the bytes of all
states over the seconds until all are durable. `--reference` names a checkout of another revision, which runs in turns
with this one and is the figure's reference. The other figure is the speed of `dd` with fdatasync.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.figure import emit
from fovea_trainer.command_queue import CommandQueue, KeepState, Shutdown, resolve
from fovea_trainer.model.lora import LoraInjector, LoraSettings
from fovea_trainer.model.model_family import LoraTarget, Role
from fovea_trainer.model.trained_model import AdapterModel
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.recovery.recovery_folder import RecoveryFolder
from fovea_trainer.recovery.recovery_keeper import RecoveryKeeper
from fovea_trainer.recovery.recovery_writer import RecoveryWriter
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.weights.snapshot_store import SnapshotStore

_CPU = torch.device("cpu")
_WIDTH, _RANK = 2048, 16


def models_of(count: int, state_mib: int) -> list[AdapterModel]:
    """Returns adapters with states of this size, in tensors of 128 KiB."""
    modules = state_mib * 2**20 // (2 * _WIDTH * _RANK * 4 * 3)
    linear = nn.Linear(_WIDTH, _WIDTH, bias=False, device="meta")
    targets = [LoraTarget(f"model.layers.{number}.mlp.up_proj", linear, Role.MLP, False) for number in range(modules)]
    lora = LoraSettings(_RANK, 32.0, 1, True, True, False, False)
    return [
        AdapterModel(f"m{number}", lora, targets, LoraInjector(targets), _CPU, torch.float32, None)
        for number in range(count)
    ]


async def measure(folder: Path, options: argparse.Namespace) -> float:
    """Returns bytes per second."""
    models = {model.model_id: model for model in models_of(options.models, options.state_mib)}
    writer = RecoveryWriter(RecoveryFolder(str(folder)), ControlGroup(), _CPU, "base", {}, {}, SnapshotStore(2**20))
    queue = CommandQueue(600)
    queue.open()
    keeper = RecoveryKeeper(TrainerSettings(model="base"), queue, lambda: writer)
    is_over = threading.Event()

    def rank() -> None:
        while not isinstance((job := queue.next()[0]).command, Shutdown):
            assert isinstance(job.command, KeepState)
            time.sleep(options.turn_s)
            resolve(job.result, writer.write_state(models[job.command.model_id], job.command.change_count))

    def launch() -> None:
        while not is_over.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=rank), *([threading.Thread(target=launch)] if options.python else [])]
    for thread in threads:
        thread.start()
    running = asyncio.create_task(keeper.run())
    seconds = 0.0
    for seq_id in range(options.rounds + 1):  # the first round creates buffers
        begun = time.perf_counter()
        for model_id, model in models.items():
            async with keeper.changing(model_id, model.state_bytes):
                writer.changed(model_id, seq_id + 1, {})
        for model_id in models:
            await keeper.flush(model_id)
        seconds += time.perf_counter() - begun if seq_id else 0.0
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    is_over.set()
    queue.shut_down()
    for thread in threads:
        thread.join()
    writer.close()
    rate: float = options.rounds * sum(model.state_bytes for model in models.values()) / seconds
    return rate


def speed_of_disk(folder: Path, size_mib: int) -> float:
    """Returns the bytes per second of `dd` with fdatasync."""
    command = ["dd", "if=/dev/zero", f"of={folder}/dd", "bs=32M", f"count={size_mib // 32}", "conv=fdatasync"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stderr
    found = re.search(r"copied, ([\d.]+) s", said)
    assert found is not None, said
    (folder / "dd").unlink()
    return size_mib * 2**20 / float(found[1])


def run(folder: str, options: argparse.Namespace, sources: str) -> float:
    """Measures in a new process. Sources of this checkout are imported only if the other one has none."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if sources:
        places = ("", "client", "gateway", "services/trainer", "services/shared", "libraries")
        paths = [*(f"{sources}/{place}" for place in places), *paths]
    names = ("models", "state_mib", "rounds", "turn_s")
    given = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    command = [sys.executable, __file__, *given, *(["--python"] if options.python else []), "--inner", folder]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return float(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout))


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--reference", default="", help="root of a checkout of another revision")
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--state-mib", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=2, help="changes of each model")
    parser.add_argument("--turn-s", type=float, default=0.1, help="seconds that a copy waits for its turn")
    parser.add_argument("--python", action="store_true", help="run Python in another thread")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner is not None:
        dist.init_process_group("gloo", init_method=f"file://{options.inner}/meeting", rank=0, world_size=1)
        print(json.dumps(asyncio.run(measure(Path(options.inner) / "recovery", options))))
        return
    own: list[float] = []
    other: list[float] = []
    disk: list[float] = []
    for _ in range(options.repeats):
        for sources, found in ((options.reference, other), ("", own)):
            if sources or found is own:
                with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                    found.append(run(folder, options, sources))
        disk.append(speed_of_disk(options.folder, options.models * options.state_mib))
    sizes = {"models": options.models, "state_mib": options.state_mib, "turn_s": options.turn_s}
    emit("durable_states.rate", own, "B/s", other or None, python=options.python, **sizes)
    emit("durable_states.disk", disk, "B/s", size_mib=options.models * options.state_mib)


if __name__ == "__main__":
    main()
