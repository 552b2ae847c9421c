"""Entry point of `make demo`: fine-tunes a tiny model and writes a page with its accuracy before and after.

The SDK and scikit-learn are imported only once the arguments are right: they take seconds.
"""

import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Annotated

import typer
from rich.console import Console

from fovea.client.gateway import NotConnected, check_server

OUT = pathlib.Path("demo")
API_KEY = "tml-local"
EPOCHS = 3


def main(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 1,497 training scans.")] = EPOCHS,
    seed: Annotated[int, typer.Option(help="Seed of the split, the adapter and the order.")] = 0,
    out: Annotated[pathlib.Path, typer.Option(help="Directory for report.html and result.json.")] = OUT,
    base_url: Annotated[str | None, typer.Option(help="Base URL of a running Tinker server to use.")] = None,
    base_model: Annotated[str | None, typer.Option(help="The model of that server; required with --base-url.")] = None,
) -> None:
    """Fine-tune a tiny vision-language model on real digit scans through Fovea and report what it learnt."""
    # Otherwise the SDK would send its telemetry about this server to this server.
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    console = Console()
    start = time.monotonic()
    api_key = os.environ.get("TINKER_API_KEY", API_KEY) if base_url else API_KEY
    if base_url:
        if not base_model:
            raise typer.BadParameter("--base-url needs --base-model")
        try:
            check_server(base_url, api_key)
        except NotConnected as error:
            print(f"error: {error.message}", file=sys.stderr)
            raise typer.Exit(2) from None
    console.print("reading the scans")
    import fovea_tinyvlm
    from fovea_demo.digits import load_scans
    from fovea_demo.job import Recipe, fine_tune
    from fovea_demo.report import write_report
    from fovea_demo.up import running_fovea

    train, held_out = load_scans(seed)
    console.print(f"{len(train)} scans to train on, {len(held_out)} held out")
    recipe = Recipe(epochs=epochs)
    if base_url and base_model:
        history = fine_tune(base_url, api_key, base_model, train, held_out, recipe, seed)
        ready_s = 0.0
    else:
        model = fovea_tinyvlm.ensure()
        console.print(f"base model: {model}\nstarting Fovea")
        with (
            tempfile.TemporaryDirectory(prefix="fovea-demo-") as state,
            running_fovea(pathlib.Path(state), model, "--port", "0", "--grpc-port", "0") as up,
        ):
            ready_s = up["ready_s"]
            console.print(f"Fovea is ready after {ready_s:.1f} s at {up['base_url']}")
            history = fine_tune(up["base_url"], api_key, up["model_name"], train, held_out, recipe, seed)
    result = {
        "accuracy_before": round(history.accuracies[0][1], 4),
        "accuracy_after": round(history.accuracies[-1][1], 4),
        "ready_s": round(ready_s, 2),
        "train_s": round(history.train_s, 2),
        "total_s": round(time.monotonic() - start, 2),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_report(out / "report.html", history, held_out, result)
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print_json(data=result)
    console.print(f"report: {out / 'report.html'}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    app(prog_name="fovea demo")
