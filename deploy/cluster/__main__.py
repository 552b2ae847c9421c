"""`python -m deploy.cluster build | up`."""

import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import typer

from deploy.cluster.cluster import Cluster, CommandFailed, running_cluster
from deploy.cluster.controllers import running_controllers
from deploy.cluster.machine import NoMachine
from deploy.cluster.node import CONTAINERD, running_node
from deploy.cluster.tools import BIN, NAMES, NoGo, missing
from deploy.cluster.tools import build as build_tools

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.command()
def build(
    names: list[str] = typer.Argument(None, help=f"Binaries to build, of {', '.join(NAMES)}. Default: all."),
) -> None:
    """Build the control plane, its controllers, helm and kubectl with Go. Binaries of the right version are kept.

    Without Go nothing is built, and the exit code is 0; tests that need the binaries are then skipped.
    """
    if unknown := sorted(set(names or ()) - set(NAMES)):
        raise typer.BadParameter(f"unknown binary {unknown[0]}; choose from {', '.join(NAMES)}")
    try:
        build_tools(lambda line: typer.echo(line), names or ())
    except NoGo as reason:
        typer.echo(f"skipped: {reason}")
    except subprocess.CalledProcessError as failure:
        typer.echo(f"build failed: {failure}", err=True)
        raise typer.Exit(1) from None


@app.command()
def up(
    node: bool = typer.Option(
        False, "--node", help="Use one real node that runs containers instead of simulated nodes. Needs root."
    ),
) -> None:
    """Run a cluster with simulated nodes on this machine until Ctrl-C."""
    if absent := missing(node):
        typer.echo(f"not built: {', '.join(absent)}; run: python -m deploy.cluster build", err=True)
        raise typer.Exit(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fovea-k8s-", ignore_cleanup_errors=True)))
        try:
            cluster = stack.enter_context(_real(folder) if node else running_cluster(folder))
            if not node:
                stack.enter_context(running_controllers(cluster))
        except (NoMachine, CommandFailed) as reason:
            typer.echo(f"could not start the cluster: {reason}", err=True)
            raise typer.Exit(1) from None
        typer.echo(f"export PATH={BIN}:$PATH KUBECONFIG={cluster.kubeconfig}")
        try:
            signal.pause()
        except KeyboardInterrupt:
            typer.echo("stopping")


@contextmanager
def _real(folder: Path) -> Iterator[Cluster]:
    with running_node(folder) as node:
        enter = shlex.join(node.machine.command("ctr", *CONTAINERD))
        typer.echo(
            "# This machine can reach the addresses of pods and services. The node pulls no images; to load one:"
        )
        typer.echo(f"#   podman save IMAGE | {enter} images import -")
        yield node.cluster


if __name__ == "__main__":
    app()
