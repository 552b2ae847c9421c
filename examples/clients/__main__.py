"""`make clients`: builds the clients, and compares their samples from one Fovea server with Python's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import fovea_tinyvlm
from examples.clients.answer import answer, answer_in_python
from examples.clients.question import questions
from examples.clients.toolchain import TOOLCHAINS, BuildFailed
from fovea_demo.up import running_fovea

API_KEY = "tml-local"
READY_TIMEOUT_S = 900.0


def main(
    languages: Annotated[
        list[str] | None, typer.Argument(help=f"Languages of {', '.join(TOOLCHAINS)}; default: all.")
    ] = None,
    running: Annotated[Path | None, typer.Option(help="State folder of a running Fovea server.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Limit of one client in seconds.")] = 120.0,
) -> None:
    """Build the clients with an installed toolchain, and check their samples."""
    if unknown := set(languages or ()) - set(TOOLCHAINS):
        raise typer.BadParameter(
            f"there is no client in {', '.join(sorted(unknown))}; the languages are {', '.join(TOOLCHAINS)}"
        )
    failed = False
    with ExitStack() as stack:
        clients: dict[str, list[str]] = {}
        for language in languages or TOOLCHAINS:
            toolchain = TOOLCHAINS[language]
            if toolchain.missing:
                print(f"{language}: skipped, {' and '.join(toolchain.missing)} not found")
                continue
            try:
                clients[language] = stack.enter_context(toolchain.built())
            except BuildFailed as error:
                print(f"{language}: FAILED, {error}")
                failed = True
        if clients:
            up = stack.enter_context(_fovea(running))
            failed |= not _compare(clients, up, timeout_s)
    raise typer.Exit(failed)


@contextmanager
def _fovea(running: Path | None) -> Iterator[dict[str, Any]]:
    if running:
        yield json.loads((running / "up.json").read_text())
        return
    options = ("--port", "0", "--grpc-port", "0", "--ready-timeout-s", str(READY_TIMEOUT_S))
    with (
        tempfile.TemporaryDirectory(prefix="fovea-clients-") as folder,
        running_fovea(Path(folder), fovea_tinyvlm.ensure(), *options, timeout_s=READY_TIMEOUT_S) as up,
    ):
        yield up


def _compare(clients: dict[str, list[str]], up: dict[str, Any], timeout_s: float) -> bool:
    address, good = up["services"]["gateway"]["address"], True
    for question in questions(Path(up["model"])):
        # The first sample fills vLLM's caches, so that the compared samples are all computed in the same way.
        for _ in range(2):
            wanted = asyncio.run(answer_in_python(address, API_KEY, question, timeout_s))
        print(f"python, temperature {question.temperature}: {wanted.tokens}, {wanted.finish_reason}")
        for language, command in clients.items():
            try:
                difference = answer(command, address, API_KEY, question, timeout_s).difference(wanted)
            except subprocess.CalledProcessError as error:
                difference = error.stderr.strip()
            except ValueError as error:
                difference = str(error)
            good &= not difference
            said = f"FAILED, {difference}" if difference else "the same"
            print(f"{language}, temperature {question.temperature}: {said}")
    return good


if __name__ == "__main__":
    typer.run(main)
