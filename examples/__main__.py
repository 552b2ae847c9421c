"""`make rl`: runs the reinforcement-learning examples on a new Fovea server, and other examples if they are named."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

import fovea_tinyvlm
from examples.chart import draw_curves
from examples.distillation_digits import TEACHER, make_teacher
from examples.summary import FOLDER, RESULTS, is_met
from fovea_demo.up import running_fovea

EXAMPLES = {
    "rl_digits": ("rl_digits",),
    "rl_geometry": ("rl_geometry",),
    "rl_geometry3k": ("rl_geometry3k",),
    "rl_gridworld": ("rl_gridworld",),
    "rl_visgym_reasoned": ("rl_visgym", "--answers", "reasoned"),
    "rl_visgym_tagged": ("rl_visgym", "--answers", "tagged"),
    "rl_visgym_nested": ("rl_visgym", "--answers", "nested"),
    "rl_zoom": ("rl_zoom",),
}
"""Module and arguments of each example."""
OF_OTHERS = {"rl_openenv": ("rl_openenv",), "rl_verifiers": ("rl_verifiers",)}
"""Examples with environments of other libraries. They run by default once `make environments` has installed these."""
OTHERS = FOLDER.parent / ".environments" / "site-packages"
LEARN_OTHERWISE = {"distillation_digits": ("distillation_digits",), "dpo_digits": ("dpo_digits",)}
"""Examples that learn from a teacher or from preferences. They run only if they are named."""
API_KEY = "tml-local"
_HELP = (
    f"Examples to run: {', '.join(EXAMPLES)}, and after `make environments` {', '.join(OF_OTHERS)}; default: all of "
    f"these. Also {', '.join(LEARN_OTHERWISE)}, which do not run by default."
)


def main(
    examples: Annotated[list[str] | None, typer.Argument(help=_HELP)] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each example, with successive seeds.")] = 1,
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 0,
    out: Annotated[pathlib.Path, typer.Option(help="Folder for curves and pages.")] = FOLDER / "out",
    results: Annotated[pathlib.Path, typer.Option(help="File of the measurements.")] = RESULTS,
) -> None:
    """Run the examples and write their results. The exit code is 1 if a run misses its bar."""
    # Without this the SDK would send telemetry to the server of the examples.
    environment = os.environ | {"TINKER_TELEMETRY": "0", "PYTHONUNBUFFERED": "1"}
    console = Console()
    names = examples or [*EXAMPLES, *(OF_OTHERS if OTHERS.is_dir() else ())]
    known = EXAMPLES | OF_OTHERS | LEARN_OTHERWISE
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"unknown example {unknown[0]}; the examples are {', '.join(known)}")
    missed: list[str] = []
    runs: list[dict[str, Any]] = []
    out.mkdir(parents=True, exist_ok=True)
    also = []
    if "distillation_digits" in names:
        console.rule("the teacher")
        also = ["--also-sample", f"{TEACHER}={make_teacher(out / 'teacher', fovea_tinyvlm.ensure())}"]
    with running_fovea(out / "fovea", fovea_tinyvlm.ensure(), "--port", "0", "--grpc-port", "0", *also) as up:
        server = ("--base-url", up["base_url"], "--api-key", API_KEY, "--out", str(out))
        for name in names:
            module, *options = known[name]
            path = {"PYTHONPATH": str(OTHERS)} if name in OF_OTHERS else {}
            for seed in range(first_seed, first_seed + seeds):
                console.rule(f"{name}, seed {seed}")
                command = [sys.executable, "-m", f"examples.{module}", *options, *server, "--seed", str(seed)]
                subprocess.run(command, env=environment | path, cwd=FOLDER.parent, check=True)
                run = json.loads((out / f"{name}-{seed}.json").read_text())
                keep(run, results)
                if "bar" in run and not is_met(run):
                    missed.append(f"{name}, seed {seed}: {run['after']:.3f}, the bar is {run['bar']:g}")
                runs.append(run)
    if any("rewards" in run for run in runs):  # examples that learn from preferences have no rewards
        draw_curves(runs, out / "curves.png")
    console.print(f"results: {results}; curves and pages: {out}")
    for line in missed:
        console.print(f"missed: {line}")
    raise typer.Exit(1 if missed else 0)


def keep(run: dict[str, Any], results: pathlib.Path) -> None:
    """Adds a run to the results, and removes an older run of the same example and seed."""
    rows: list[dict[str, Any]] = json.loads(results.read_text()) if results.exists() else []
    rows = [row for row in rows if (row["example"], row["seed"]) != (run["example"], run["seed"])]
    rows.append(run | {"rewards": [round(reward, 3) for reward in run["rewards"]]} if "rewards" in run else run)
    rows.sort(key=lambda row: (row["example"], row["seed"]))
    lines = ",\n".join(json.dumps(row) for row in rows)
    results.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    typer.run(main)
