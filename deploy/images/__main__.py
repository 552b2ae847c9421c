"""`python -m deploy.images build`."""

import subprocess

import typer

from deploy.images.build import build as build_images
from deploy.images.engine import missing, no_room

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def main() -> None:
    """The images of deploy/docker, built with podman."""


@app.command()
def build(only: str = typer.Argument("", help="Build only images with this text in their name. Default: all.")) -> None:
    """Build the images of deploy/compose.yaml, which tests/images then runs.

    If this machine cannot build them, nothing is built and the exit code is 0; tests/images is then skipped.
    """
    if reason := missing() or no_room():
        typer.echo(f"skipped: {reason}")
        return
    try:
        build_images(lambda line: typer.echo(line), only)
    except subprocess.CalledProcessError as failure:
        typer.echo(f"build failed: {failure}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
