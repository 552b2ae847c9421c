"""`make rl`: the reinforcement-learning examples against a Fovea of their own; by name, those that learn otherwise."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

import tinyvlm
from demo.up import running_fovea
from examples.chart import draw_curves
from examples.distillation_digits import TEACHER, make_teacher

FOLDER = pathlib.Path(__file__).parent
EXAMPLES = {
    "rl_digits": ("rl_digits",),
    "rl_geometry": ("rl_geometry",),
    "rl_geometry3k": ("rl_geometry3k",),
    "rl_gridworld": ("rl_gridworld",),
    "rl_visgym_reasoned": ("rl_visgym", "--answers", "reasoned"),
    "rl_visgym_tagged": ("rl_visgym", "--answers", "tagged"),
    "rl_visgym_nested": ("rl_visgym", "--answers", "nested"),
}
"""Their modules and arguments, by name."""
LEARN_OTHERWISE = {"distillation_digits": ("distillation_digits",), "dpo_digits": ("dpo_digits",)}
"""Likewise, of examples that learn from a teacher, and from preferences: they run where they are named."""
API_KEY = "tml-local"
_HELP = f"Some of {', '.join(EXAMPLES)}; default: all of these. Also {', '.join(LEARN_OTHERWISE)}."


def main(
    examples: Annotated[list[str] | None, typer.Argument(help=_HELP)] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with seeds from 0.")] = 1,
    out: Annotated[pathlib.Path, typer.Option(help="Where curves and pages go.")] = FOLDER / "out",
    results: Annotated[pathlib.Path, typer.Option(help="What was measured.")] = FOLDER / "results.json",
) -> None:
    """Run the examples, and write what they learnt."""
    # The SDK would otherwise report its use of our own server to our own server.
    environment = os.environ | {"TINKER_TELEMETRY": "0"}
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    also = []
    if "distillation_digits" in (examples or ()):
        console.rule("the teacher")
        also = ["--also-sample", f"{TEACHER}={make_teacher(out / 'teacher', tinyvlm.ensure())}"]
    with running_fovea(out / "fovea", tinyvlm.ensure(), "--port", "0", "--grpc-port", "0", *also) as up:
        server = ("--base-url", up["base_url"], "--api-key", API_KEY, "--out", str(out))
        for name in examples or EXAMPLES:
            for seed in range(seeds):
                console.rule(f"{name}, seed {seed}")
                module, *options = (EXAMPLES | LEARN_OTHERWISE)[name]
                command = [sys.executable, "-m", f"examples.{module}", *options, *server, "--seed", str(seed)]
                subprocess.run(command, env=environment, cwd=FOLDER.parent, check=True)
                keep(json.loads((out / f"{name}-{seed}.json").read_text()), results)
            if name in EXAMPLES:
                draw_curves([out / f"{name}-{seed}.json" for seed in range(seeds)], out / f"{name}.png")
    console.print(f"results: {results}; curves and pages: {out}")


def keep(run: dict[str, Any], results: pathlib.Path) -> None:
    """Puts a run into the results, in the place of the last one of the same example and seed."""
    rows: list[dict[str, Any]] = json.loads(results.read_text()) if results.exists() else []
    rows = [row for row in rows if (row["example"], row["seed"]) != (run["example"], run["seed"])]
    rows.append({name: value for name, value in run.items() if name != "rewards"})
    rows.sort(key=lambda row: (row["example"], row["seed"]))
    results.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
