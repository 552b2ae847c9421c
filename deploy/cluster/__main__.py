"""`python -m deploy.cluster build | up`."""

import signal
import subprocess
import tempfile
from pathlib import Path

import typer

from deploy.cluster.cluster import running_cluster
from deploy.cluster.tools import BIN, NoGo, missing
from deploy.cluster.tools import build as build_tools

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.command()
def build() -> None:
    """Build the control plane's binaries, helm and kubectl with Go; what is there in the right version is kept.

    Without Go nothing is built, and that is no error: tests/k8s is then skipped.
    """
    try:
        build_tools(lambda line: typer.echo(line))
    except NoGo as reason:
        typer.echo(f"skipped: {reason}")
    except subprocess.CalledProcessError as failure:
        typer.echo(f"no cluster: {failure}", err=True)
        raise typer.Exit(1) from None


@app.command()
def up() -> None:
    """Run a cluster with simulated nodes on this machine until Ctrl-C."""
    if absent := missing():
        typer.echo(f"not built: {', '.join(absent)}; run python -m deploy.cluster build", err=True)
        raise typer.Exit(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        tempfile.TemporaryDirectory(prefix="fovea-k8s-", ignore_cleanup_errors=True) as folder,
        running_cluster(Path(folder)) as cluster,
    ):
        typer.echo(f"export PATH={BIN}:$PATH KUBECONFIG={cluster.kubeconfig}")
        try:
            signal.pause()
        except KeyboardInterrupt:
            typer.echo("stopping")


if __name__ == "__main__":
    app()
