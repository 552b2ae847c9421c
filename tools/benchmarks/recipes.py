"""Reward of the cookbook's recipes before and after training: `python -m benchmarks.recipes --run rl_loop 20`.

The runs are those of `cookbook.recipes`, with the recipes' own sizes, loss and sampling; only the model, the data and
the number of steps differ, and sizes given with `--set`. A run named with `--listed` has the small sizes of
`cookbook.recipes`. Each seed has its own data and start checkpoint. Figures, one line for each run and seed: the mean
reward of the last quarter of the steps, beside the reward of the first step; for a run without rewards, the same of the
metric that its first criterion judges.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fovea_tinyvlm
from benchmarks.figure import emit
from cookbook.criterion import Criterion, Rises
from cookbook.environments import ENVIRONMENTS, ROOT
from cookbook.recipe import LOCAL, Recipe, Situation
from cookbook.running import Result
from cookbook.suite import CATALOGUE_NAME, RENDERER_NAME, Server, Suite, select
from fovea_demo.up import running_fovea

VERSION = "0.6.1"
TEXT_CATALOGUE_NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""Name of a model without a vision tower. The cookbook's renderer for this name writes ChatML."""
_PROBLEMS_PER_STEP = 128
_TIMEOUT_S = 4 * 3600.0


class RunFailed(Exception):
    """A run ended early or wrote no rewards. The message has the end of its log."""


def planned(steps: dict[str, int], sizes: dict[str, str], listed: Sequence[str] = (), seed: int = 0) -> list[Recipe]:
    """Returns the runs to measure, and those that provide their start checkpoints.

    Args:
        steps: Number of steps by the name of a run.
        sizes: Sizes that replace the recipes' own, in all measured runs.
        listed: Names of runs with the sizes of `cookbook.recipes`.
        seed: Seed of the data that a recipe selects itself.

    Raises ValueError for a run that does not exist, and for a setting that is no size, such as the loss.
    """

    def with_own_sizes(run: Recipe) -> Recipe:
        local = {name: value for name, value in run.options.items() if name in LOCAL}
        return replace(run, options=local | {"max_steps": steps[run.name]} | sizes)

    def with_listed_sizes(run: Recipe) -> Recipe:
        selected = {"subset_seed": seed} if "subset_seed" in run.options else {}
        return replace(run, options=run.options | selected | (sizes if run.name in listed else {}))

    runs = select([*steps, *listed])
    return [with_own_sizes(run) if run.name in steps else with_listed_sizes(run) for run in runs]


def measured_by(run: Recipe) -> Criterion:
    """Returns the criterion for the reward; for a run without rewards, its first criterion."""
    return next((one for one in run.criteria if isinstance(one, Rises)), run.criteria[0])


def curve_of(run: Recipe, result: Result, folder: Path) -> list[float]:
    """Returns the metric of `measured_by` over the steps of a run. Raises RunFailed.

    Args:
        folder: Folder in which the run wrote its logs.
    """
    here = Situation(VERSION, "", "", RENDERER_NAME, folder)
    metric = measured_by(run).metric
    curve = [float(row[metric]) for row in run.metrics(here) if metric in row]
    if result.steps == 0 or len(curve) < 2:
        raise RunFailed(f"{run.name}: {result.detail}")
    return curve


def measure(options: argparse.Namespace, server: Server, seed: int) -> list[dict[str, Any]]:
    """Runs all recipes with one seed; prints and returns their figures. Raises RunFailed."""
    steps = {name: int(count) for name, count in options.run}
    sizes = dict(setting.split("=", 1) for setting in options.set)
    runs, work = planned(steps, sizes, options.listed, seed), options.work.resolve() / str(seed)

    def report(result: Result) -> None:
        print(f"seed {seed}, {result.recipe}, {result.seconds:.0f} s: {result.detail}", file=sys.stderr, flush=True)

    problems = _PROBLEMS_PER_STEP * max(steps.values(), default=2)
    suite = Suite(runs, server, work, _TIMEOUT_S, report, lambda version, what: None, seed, problems)
    results, lines = suite.run([ENVIRONMENTS[VERSION]]), []
    for run, result in zip(runs, results, strict=True):
        if run.name in steps or run.name in options.listed:
            curve = curve_of(run, result, work / VERSION)
            last = curve[-max(1, len(curve) // 4) :]
            own = {"steps": steps[run.name], **sizes} if run.name in steps else run.options
            facts = {"run": run.name, "seed": seed, **own, "cookbook": VERSION}
            facts |= {"model": str(options.model or "tiny qwen3_vl"), "seconds": result.seconds, "curve": curve}
            judged = measured_by(run)
            what = "reward" if isinstance(judged, Rises) else judged.metric
            lines.append(emit(f"recipes.{what}", [sum(last) / len(last)], what, [curve[0]], **facts))
    return lines


@contextmanager
def server(options: argparse.Namespace) -> Iterator[Server]:
    """Yields a new Fovea with the model under a name from the cookbook's catalogue."""
    folder: Path = options.model or fovea_tinyvlm.ensure("qwen3_vl")
    sees = "vision_config" in json.loads((folder / "config.json").read_text())
    name = CATALOGUE_NAME if sees else TEXT_CATALOGUE_NAME
    gpus = ",".join(map(str, range(options.gpus))) or "none"
    arguments = ["--model-name", name, "--gpus", gpus, "--port", "0", "--grpc-port", "0"]
    with (
        tempfile.TemporaryDirectory(prefix="fovea-recipes-") as state,
        running_fovea(Path(state), folder, *arguments) as up,
    ):
        yield Server(up["base_url"], "tml-local", name, folder)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model; default: the tiny one")
    parser.add_argument(
        "--run", nargs=2, action="append", default=[], metavar=("NAME", "STEPS"), help="a run; repeatable"
    )
    parser.add_argument(
        "--listed",
        action="append",
        default=[],
        metavar="NAME",
        help="a run with the sizes of cookbook.recipes; repeatable",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a size that replaces the recipes' own"
    )
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs; 0 uses the CPU")
    parser.add_argument("--together", action="store_true", help="runs all seeds at once")
    parser.add_argument("--work", type=Path, default=ROOT / "measured", help="folder for data and logs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    if not options.run and not options.listed:
        parser.error("name a run: --run NAME STEPS or --listed NAME")
    ENVIRONMENTS[VERSION].ensure()
    with server(options) as fovea, ThreadPoolExecutor(options.seeds if options.together else 1) as pool:
        measured = pool.map(lambda seed: measure(options, fovea, seed), range(options.seeds))
        lines = [line for seed in measured for line in seed]
    if options.json:
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
