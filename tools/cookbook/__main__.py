"""`python -m cookbook`: runs recipes of the real tinker-cookbook against Fovea or any other Tinker server."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

import fovea_tinyvlm
from cookbook.environments import ENVIRONMENTS, ROOT, Environment, NoEnvironment
from cookbook.running import Result
from cookbook.suite import CATALOGUE_NAME, TIMEOUT_S, Server, Suite, UnknownRecipe, select
from fovea_demo.up import running_fovea

RESULTS = Path(__file__).parent / "results.json"
_API_KEY = "tml-local"
_WIDTH = 120


def main(
    recipes: Annotated[str, typer.Option(help="Names of recipes, separated by commas. Default: all.")] = "",
    versions: Annotated[str, typer.Option(help="Versions of tinker-cookbook, separated by commas.")] = ",".join(
        ENVIRONMENTS
    ),
    base_url: Annotated[
        str | None, typer.Option(help="URL of a running Tinker server. Default: start a Fovea.")
    ] = None,
    api_key: Annotated[str, typer.Option(help="API key for the server.")] = _API_KEY,
    model: Annotated[str, typer.Option(help="Model of the server. Default: the first that it lists.")] = "",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the model's tokenizer, if the model's name is not a folder.")
    ] = None,
    json_file: Annotated[Path, typer.Option("--json", help="File for the results.")] = RESULTS,
    work: Annotated[Path, typer.Option(help="Folder for datasets, logs and records of checkpoints.")] = ROOT / "work",
    timeout_s: Annotated[float, typer.Option(help="Timeout of one recipe in seconds.")] = TIMEOUT_S,
) -> None:
    """Run recipes of the real, unchanged tinker-cookbook and check their metrics."""
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(markup=False, highlight=False, soft_wrap=True, width=width)
    try:
        chosen = select([name for name in recipes.split(",") if name])
        environments = [_environment(version) for version in versions.split(",")]
        for environment in environments:
            console.print(
                f"client environment: tinker-cookbook {environment.version}, Python {environment.python_version}"
            )
            environment.ensure()
    except (UnknownRecipe, NoEnvironment) as error:
        console.print(str(error))
        raise typer.Exit(2) from None
    doing: dict[str, str] = {}

    def report(result: Result) -> None:
        said = "ok    " if result.ok else "FAILED"
        console.print(f"{said} {result.seconds:6.1f} s  {result.recipe}, {result.version}: {result.detail}")

    with _server(base_url, api_key, model, tokenizer, console) as server, console.status("") as status:

        def progress(version: str, what: str) -> None:
            doing[version] = f"{version}: {what}"
            status.update("   ".join(doing.values()))

        results = Suite(chosen, server, work.resolve(), timeout_s, report, progress).run(environments)
    console.print(_table(results))
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps([result.row() for result in results], indent=2) + "\n")
    raise typer.Exit(0 if all(result.ok for result in results) else 1)


def _environment(version: str) -> Environment:
    if version not in ENVIRONMENTS:
        raise UnknownRecipe(f"no environment for tinker-cookbook {version}; choose from {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[version]


@contextmanager
def _server(
    base_url: str | None, api_key: str, model: str, tokenizer: Path | None, console: Console
) -> Iterator[Server]:
    """Yields the given server, or starts a Fovea with the tiny VLM under a name from the cookbook's catalogue."""
    if base_url:
        name = model or _first_model(base_url, api_key)
        yield Server(base_url, api_key, name, tokenizer)
        return
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    directory = fovea_tinyvlm.ensure("qwen3_vl")
    console.print(f"starting Fovea with {directory} as {CATALOGUE_NAME}")
    with (
        tempfile.TemporaryDirectory(prefix="fovea-cookbook-") as state,
        running_fovea(Path(state), directory, "--model-name", CATALOGUE_NAME, "--port", "0", "--grpc-port", "0") as up,
    ):
        yield Server(up["base_url"], _API_KEY, CATALOGUE_NAME, directory)


def _first_model(base_url: str, api_key: str) -> str:
    url = f"{base_url.rstrip('/')}/api/v1/get_server_capabilities"
    answer = httpx.get(url, headers={"X-API-Key": api_key}, timeout=30.0)
    answer.raise_for_status()
    return str(answer.json()["supported_models"][0]["model_name"])


def _table(results: list[Result]) -> Table:
    table = Table(box=None)
    for name in ("recipe", "cookbook", "python", "checks", "steps", "first", "last", "seconds", ""):
        table.add_column(name, no_wrap=True, justify="left" if name in ("recipe", "checks", "") else "right")
    for result in results:
        figures = [f"{value:.4g}" if value is not None else "" for value in (result.first, result.last)]
        table.add_row(
            result.recipe,
            result.version,
            result.python,
            " ".join(result.checks),
            str(result.steps),
            *figures,
            f"{result.seconds:.1f}",
            " with ".join(["ok" if result.ok else "failed", *result.replaced]),
        )
    return table


if __name__ == "__main__":
    typer.run(main)
