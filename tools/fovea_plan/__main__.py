"""Entry point of `python -m fovea_plan`, which `fovea plan` runs. Prints what fits on GPUs, or the first refusal."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fovea.cli import gpu_layout
from fovea.cli.preflight import StartRefused, check_config, read_setting, settings_class
from fovea.cli.service_specs import Setting
from fovea.wire.errors import FoveaError

if TYPE_CHECKING:
    from fovea_plan.trainer_plan import Training

GIB = 2**30
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


def main() -> None:
    """Prints a plan; exits with status 1 if a service would refuse what is asked for, and 2 for wrong usage."""
    parser = _parser()
    options = parser.parse_args()
    if not (found := re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", options.gpus)) or not int(found[1]):
        parser.error(f"--gpus: {options.gpus!r} is not COUNTxGIB, such as 8x80")
    try:
        settings = [read_setting(text) for text in options.set]
        check_config(options.model, "--model")
        said = _plan(options, int(found[1]), int(float(found[2]) * GIB), settings)
    except StartRefused as error:
        parser.error(str(error))
    except (FoveaError, ValueError, OSError) as error:
        _refuse(getattr(error, "message", "") or str(error))
    print(json.dumps(said, indent=2) if options.json else _text(said))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fovea plan",
        description="Count what fits on GPUs: ranks, micro-batches, datums, adapters, all parameters, KV cache and "
        "room for pushes, by the numbers with which trainer and samplers admit requests. Reads the model's "
        "configuration and no weights, and needs no GPU. If a service would refuse what you ask for, prints its "
        "message and exits with status 1.",
    )
    parser.add_argument("--model", required=True, help="checkpoint folder, or Hugging Face model as OWNER/NAME")
    parser.add_argument("--gpus", required=True, metavar="COUNTxGIB", help="such as 8x80: 8 GPUs of 80 GiB")
    parser.add_argument("--samplers", type=int, help="number of samplers; default: as `fovea up` chooses")
    parser.add_argument("--ranks", type=int, help="trainer ranks; default: one per trainer GPU")
    parser.add_argument(
        "--shared-base", action="store_true", help="trainer and sampler on one GPU use one copy of the weights"
    )
    parser.add_argument("--adapter-rank", type=int, default=32, help="rank of the adapters; default: 32")
    parser.add_argument("--train-vision", action="store_true", help="adapters reach the vision tower")
    parser.add_argument("--full", action="store_true", help="all parameters must fit")
    parser.add_argument("--context", type=int, help="a datum of this many tokens must fit")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SERVICE.NAME=VALUE", help="a setting, as of `fovea up`"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    return parser


def _plan(options: argparse.Namespace, count: int, gpu_bytes: int, given: Sequence[Setting]) -> dict[str, Any]:
    # Imported late, because transformers takes five seconds, which help and usage errors do not need.
    from transformers.utils import logging

    from fovea_plan.sampler_plan import plan_sampler
    from fovea_plan.trainer_plan import TrainerPlan, count_parameters
    from fovea_trainer.model.lora import DEFAULT_ALPHA, LoraSettings

    logging.set_verbosity_error()
    model_dir = _small_files(options.model)
    gpus = [gpu_layout.Gpu(str(number), gpu_bytes, gpu_bytes) for number in range(count)]
    if options.shared_base and (count > 1 or options.samplers not in (None, 1)):
        raise StartRefused("--shared-base", "one trainer rank and one sampler share one GPU: set --gpus 1xGIB")
    layout = gpu_layout.split(
        gpus, 2 * count_parameters(model_dir), options.samplers, options.ranks, shares_base=options.shared_base
    )
    suggestions = () if {one[:2] for one in layout.suggestions} & {one[:2] for one in given} else layout.suggestions
    shared = [Setting(kind, "shared_base", "planned") for kind in ("trainer", "sampler") if options.shared_base]
    settings = [*suggestions, *given, *shared]
    trainer = TrainerPlan(
        _settings_of("trainer", options.model, settings, ranks=len(layout.trainer)), model_dir, gpu_bytes
    )
    lora = LoraSettings(options.adapter_rank, DEFAULT_ALPHA, 0, True, True, True, options.train_vision)
    adapter = trainer.adapter(lora)
    full = _or_reason(trainer.full, options.full)
    if options.context is not None:
        trainer.check_datum(full if options.full and not isinstance(full, str) else adapter, options.context)
    said: dict[str, Any] = {
        "model": options.model,
        "parameters": trainer.parameter_count,
        "dtype": str(trainer.dtype).removeprefix("torch."),
        "layout": layout.words,
        "context": trainer.context,
        "shared_base": options.shared_base,
        "trainer": {
            "ranks": trainer.world_size,
            "replicas": trainer.settings.replicas,
            "base_bytes": trainer.base_bytes,
            "gathered_bytes": trainer.gathered_bytes,
            "adapter_rank": lora.rank,
            "adapter": _described(adapter),
            "adapters_on_device": trainer.adapters_on_device(lora, adapter.budgets.tokens),
            "adapters": trainer.settings.max_models,
            "full": full if isinstance(full, str) else _described(full),
        },
    }
    if layout.samplers:
        size = len(layout.samplers) // layout.sampler_count or 1
        sampler = _settings_of("sampler", str(model_dir), settings, tensor_parallel=size)
        said["samplers"] = layout.sampler_count
        said["sampler"] = asdict(plan_sampler(sampler, trainer.files, trainer.config, gpu_bytes))
    return said


def _small_files(model: str) -> Path:
    """Returns a folder with the model's files except its weights."""
    if (directory := Path(model).expanduser()).is_dir():
        return directory
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=_SMALL_FILES))


def _settings_of(kind: str, model: str, settings: Sequence[Setting], **chosen: int) -> Any:
    """Returns a service's settings. Raises StartRefused for a value that the service refuses."""
    values = {"model": model} | {name: str(value) for name, value in chosen.items()}
    values |= {each.name: each.value for each in settings if each.kind == kind}
    command = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]
    if problem := settings_class(kind).find_problem(command):
        raise StartRefused(f"{kind}.{problem[0]}", problem[1])
    return settings_class(kind).from_command_line(kind, command)


def _or_reason(training: Any, is_required: bool) -> Training | str:
    """Returns a kind of training, or the reason why the trainer refuses it. Raises the error if it is required."""
    try:
        found: Training = training()
    except FoveaError as error:
        if is_required:
            raise
        return error.message
    return found


def _described(training: Training) -> dict[str, Any]:
    return {
        "bytes": training.size_bytes,
        "tokens": training.budgets.tokens,
        "patches": training.budgets.patches,
        "peak_bytes": training.peak_bytes,
        "datums": training.datums,
        "snapshot_bytes": training.snapshot_bytes,
    }


def _text(said: dict[str, Any]) -> str:
    trainer = said["trainer"]
    replicas = f" in {trainer['replicas']} replicas" if trainer["replicas"] > 1 else ""
    lines = [
        f"{said['model']}: {said['parameters'] / 1e6:,.0f} million parameters in {said['dtype']}, context "
        f"{said['context']:,}; {said['layout']}",
        f"trainer, each of {trainer['ranks']} ranks{replicas}: base {_gib(trainer['base_bytes'])}, gathered "
        f"{_gib(trainer['gathered_bytes'])}",
        f"  adapter of rank {trainer['adapter_rank']}: {_training(trainer['adapter'])}",
        f"    {trainer['adapters_on_device']} stay on the device, others of {trainer['adapters']} wait on the host",
        "  all parameters: " + (full if isinstance(full := trainer["full"], str) else _training(full)),
    ]
    return "\n".join([*lines, *(_sampler(said) if "sampler" in said else ())])


def _training(found: dict[str, Any]) -> str:
    datums = ", ".join(f"{tokens:,} on {ranks}" for ranks, tokens in found["datums"].items())
    return (
        f"{_gib(found['bytes'])}; micro-batches of {found['tokens']:,} tokens, {found['patches']:,} patches; peak "
        f"{_gib(found['peak_bytes'])}; longest datum by ranks: {datums}; snapshot {_gib(found['snapshot_bytes'])}"
    )


def _sampler(said: dict[str, Any]) -> list[str]:
    sampler: dict[str, Any] = said["sampler"]
    capacity = sampler["capacity"]
    no_push = "none, for adapters only" if said["shared_base"] else "none, full weights arrive in host memory"
    push = _gib(sampler["push_bytes"]) if sampler["push_bytes"] else no_push
    lines = [
        f"sampler ({said['samplers']}), each GPU: weights {_gib(sampler['weights_bytes'])}, KV cache up to "
        f"{_gib(sampler['cache_bytes'])} for {sampler['cache_tokens']:,} tokens, room for pushes: {push}",
        f"  adapters in one batch: {capacity['batched']}, {capacity['slots']} of the largest rank "
        f"({_gib(sampler['slots_bytes'])})",
    ]
    if (context := sampler["context"] or said["context"]) > sampler["cache_tokens"]:
        lines.append(
            f"  vLLM does not start with room for less than one context of {context:,} tokens: set "
            f"sampler.max_context below {sampler['cache_tokens']:,}"
        )
    return lines


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:,.1f} GiB" if size_bytes >= GIB else f"{size_bytes / 2**20:,.1f} MiB"


def _refuse(problem: str) -> NoReturn:
    print(f"fovea plan: {' '.join(problem.split())}")
    raise SystemExit(1)


if __name__ == "__main__":
    main()
