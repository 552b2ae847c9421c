"""`python -m deploy.images build`."""

import subprocess

import typer

from deploy.images.build import build as build_images
from deploy.images.engine import missing, no_room

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def main() -> None:
    """The images of deploy/docker, built by podman."""


@app.command()
def build(only: str = typer.Argument("", help="Part of the name of what is built; empty is everything.")) -> None:
    """Build the images that deploy/compose.yaml names; tests/images then runs them.

    Where that cannot be done nothing is built, and that is no error: tests/images is then skipped.
    """
    if reason := missing() or no_room():
        typer.echo(f"skipped: {reason}")
        return
    try:
        build_images(lambda line: typer.echo(line), only)
    except subprocess.CalledProcessError as failure:
        typer.echo(f"not built: {failure}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
