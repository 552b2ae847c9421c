"""Runs the checks: `python -m fovea_conformance --base-url URL --api-key KEY --model NAME`, or `fovea conformance`.

The checks and the SDK are imported only once the arguments are right and a server answers: they take many seconds.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

os.environ.setdefault("TINKER_TELEMETRY", "0")

import typer
from rich.console import Console

from fovea.client.gateway import NotConnected, check_server
from fovea_conformance import checks as check_modules

if TYPE_CHECKING:
    from fovea_conformance.check import Check
    from fovea_conformance.runner import Verdict
    from fovea_conformance.target import Options

_RANGE = re.compile(r"C(\d+)(?:-C?(\d+))?|([A-K])")


def load() -> list[Check]:
    """Imports and returns all checks, in order."""
    from fovea_conformance.check import REGISTER

    for module in pkgutil.iter_modules(check_modules.__path__):
        importlib.import_module(f"{check_modules.__name__}.{module.name}")
    return sorted(REGISTER.values(), key=lambda one: one.number)


def select(all_checks: list[Check], words: list[str]) -> list[Check]:
    """Returns the checks for words such as C14, C20-C25 or D; all checks without words. Raises BadParameter."""
    if not words:
        return all_checks
    chosen: set[int] = set()
    for first, last, section in _ranges(words):
        if section:
            chosen |= {one.number for one in all_checks if one.section == section}
        else:
            chosen |= set(range(int(first), int(last or first) + 1))
    return [one for one in all_checks if one.number in chosen]


def _ranges(words: list[str]) -> list[tuple[str, ...]]:
    """Returns first check, last check and section of each word. Raises BadParameter."""
    found = []
    for word in (part for given in words for part in given.replace(",", " ").split()):
        match = _RANGE.fullmatch(word.upper())
        if match is None:
            raise typer.BadParameter(f"{word!r} is not a check; write C14, C20-C25 or a section A to K")
        found.append(match.groups())
    return found


def main(
    base_url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option(help="API key of the server (tml-...).")] = "tml-local",
    model: Annotated[str, typer.Option(help="Name of a model of the server; default: the first.")] = "",
    vlm: Annotated[
        bool, typer.Option("--vlm", help="Run the checks with images; the model must accept images.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Run only these checks: C14, C20-C25 or a section A to K. May be repeated.")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave these checks out, in the same format.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the verdicts as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="File for the verdicts as an HTML page.")] = None,
    restart_command: Annotated[
        str, typer.Option(help="Command that kills the server (SIGKILL) and restarts it; for the checks of restarts.")
    ] = "",
    session_ttl_s: Annotated[
        float, typer.Option(help="Seconds without a heartbeat after which the server ends a session; default: unknown.")
    ] = 0.0,
    long_job_s: Annotated[float, typer.Option(help="Duration of the long job, in seconds.")] = 300.0,
    checkpoint: Annotated[str, typer.Option(help="Directory of the model's files; default: the model's name.")] = "",
    cookbook: Annotated[bool, typer.Option("--cookbook", help="Also run the recipes of the cookbook.")] = False,
    admin_key: Annotated[str, typer.Option(help="API key of an administrator, for the check of the audit log.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the log of the SDK.")] = False,
) -> None:
    """Check a Tinker server against the contract, with 131 checks over the real SDK and raw HTTP."""
    logging.basicConfig(level=logging.INFO if verbose else logging.CRITICAL)
    if not verbose:
        warnings.filterwarnings("ignore", category=FutureWarning)
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    _ranges([*(only or []), *(skip or [])])
    name = _served_model(model, base_url, api_key, console)
    console.print(f"checking model {name} at {base_url}; loading the checks first, which takes about 15 s")
    from fovea_conformance.check import Status
    from fovea_conformance.report import summary, table, write_html, write_json
    from fovea_conformance.target import Options

    left_out = {one.check_id for one in select(load(), skip)} if skip else set()
    chosen = [one for one in select(load(), only or []) if one.check_id not in left_out]
    options = Options(
        base_url, api_key, name, vlm, restart_command, session_ttl_s, long_job_s, checkpoint, cookbook, admin_key
    )
    verdicts = _run(chosen, options, console)
    console.print(table(verdicts, f"{base_url}, model {name}"))
    console.print(summary(verdicts))
    if json_file:
        write_json(verdicts, json_file)
    if html_file:
        write_html(verdicts, options, html_file)
    # Exit at once: the SDK's threads would delay the exit, or crash it.
    failed = any(verdict.status is Status.FAILED for verdict in verdicts)
    console.file.flush()
    os._exit(1 if failed else 0)


def _run(chosen: list[Check], options: Options, console: Console) -> list[Verdict]:
    from fovea_conformance.check import Status
    from fovea_conformance.runner import run_checks

    done = 0

    def report(verdict: Verdict) -> None:
        nonlocal done
        done += 1
        line = f"{verdict.check.check_id:>5} {verdict.status.replace('_', ' '):<14} {verdict.seconds:6.1f} s"
        console.print(f"[{done:3}/{len(chosen)}] {line}  {verdict.check.title}")
        if verdict.status is not Status.PASSED:
            console.print(f"{'':25}{verdict.detail[:500]}")

    with console.status("") as status:
        return run_checks(chosen, options, report, lambda one: status.update(f"{one.check_id} {one.title}"))


def _served_model(model: str, base_url: str, api_key: str, console: Console) -> str:
    """Returns the name of the model to check, by default the server's first. Ends the program without a server."""
    import httpx

    if model:  # the server may be unfinished and lack the routes that `check_server` requests
        try:
            httpx.get(base_url, timeout=10)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            console.print(f"--base-url: no server responds at {base_url} ({error})")
            raise typer.Exit(2) from None
        return model
    try:
        check_server(base_url, api_key)
    except NotConnected as error:
        console.print(f"--{(error.field or 'base_url').replace('_', '-')}: {error.message}")
        raise typer.Exit(2) from None
    url = f"{base_url.rstrip('/')}/api/v1/get_server_capabilities"
    try:
        answer = httpx.get(url, headers={"X-API-Key": api_key}, timeout=30).raise_for_status()
        return str(answer.json()["supported_models"][0]["model_name"])
    except (httpx.HTTPError, LookupError, ValueError) as error:
        console.print(f"{url} lists no model ({error}); give one with --model")
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    app(prog_name="fovea conformance")
