"""Entry point of `make real`: fine-tunes and reinforces a really pretrained model, and writes a page."""

import asyncio
import json
import os
import pathlib
import tempfile
import time
from contextlib import ExitStack
from typing import Annotated

import typer
from rich.console import Console

from fovea_demo.__main__ import API_KEY
from fovea_demo.up import running_fovea
from fovea_real.checkpoint import NAME, Dtype, ensure
from fovea_real.job import Reinforced, Reinforcement, Server, reinforce, teach
from fovea_real.report import write_report

OUT = pathlib.Path("real")
READY_S = 600.0


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of reinforcement learning.")] = Reinforcement.steps,
    groups: Annotated[int, typer.Option(min=1, help="Sums of a step, with eight samples each.")] = Reinforcement.groups,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, help="Learning rate of the first step of reinforcement.")
    ] = Reinforcement.learning_rate,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the facts of the fine-tune.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of reinforcement learning, with seeds 0, 1, ...")] = 1,
    out: Annotated[pathlib.Path, typer.Option(help="Directory for report.html and result.json.")] = OUT,
    dtype: Annotated[Dtype, typer.Option(help="Element type of the checkpoint; bfloat16 for a GPU.")] = "float32",
    model: Annotated[pathlib.Path | None, typer.Option(help="A checkpoint folder to use instead.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Base URL of a running Tinker server to use.")] = None,
    base_model: Annotated[str | None, typer.Option(help="The model of that server; required with --base-url.")] = None,
) -> None:
    """Teach a really pretrained language model through Fovea, and report in words what changed."""
    os.environ.setdefault("TINKER_TELEMETRY", "0")  # otherwise the SDK would send telemetry to this server
    console = Console(highlight=False, soft_wrap=True)
    begun = time.monotonic()
    recipe = Reinforcement(steps, groups, learning_rate)
    seconds: dict[str, float] = {}
    with ExitStack() as until_the_end:
        folder = pathlib.Path(until_the_end.enter_context(tempfile.TemporaryDirectory(prefix="fovea-real-")))
        if base_url:
            if not base_model:
                raise typer.BadParameter("--base-url needs --base-model")
            server = Server(base_url, os.environ.get("TINKER_API_KEY", API_KEY), base_model)
        else:
            checkpoint = model or ensure(dtype)
            seconds["model"] = time.monotonic() - begun
            console.print(f"{seconds['model']:7.1f} s  the model is in {checkpoint}")
            ports = ("--port", "0", "--grpc-port", "0")
            up = until_the_end.enter_context(running_fovea(folder / "fovea", checkpoint, *ports, timeout_s=READY_S))
            seconds["ready"] = up["ready_s"]
            console.print(f"{up['ready_s']:7.1f} s  Fovea is ready; watch it learn: {up['base_url']}/")
            server = Server(up["base_url"], API_KEY, up["model_name"])
        told = teach(server, folder, 0, epochs, console.print)
        runs = [asyncio.run(reinforce(server, seed, recipe, console.print)) for seed in range(seeds)]
    seconds["reinforcement"] = sum(run.seconds for run in runs)
    seconds["total"] = time.monotonic() - begun
    result = {
        "style": [told.style(told.first), told.style(told.last)],
        "facts": [told.right(told.first), told.right(told.last)],
        "sums": [[run.score(run.first), run.score(run.last)] for run in runs],
        "equal_to_transformers": [told.equal, len(told.held_out)],
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }
    out.mkdir(parents=True, exist_ok=True)
    write_report(out / "report.html", NAME, told, runs, seconds["total"])
    rewards = {f"rewards_{run.seed}": _rounded(run) for run in runs}
    (out / "result.json").write_text(json.dumps(result | rewards, indent=2) + "\n")
    console.print_json(data=result)
    console.print(f"report: {out / 'report.html'}")


def _rounded(run: Reinforced) -> list[float]:
    return [round(reward, 3) for reward in run.rewards]


if __name__ == "__main__":
    typer.run(main)
