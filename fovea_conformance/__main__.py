"""`python -m fovea_conformance --base-url URL --api-key KEY --model NAME [--vlm]`; `fovea conformance` is the same."""

import importlib
import logging
import os
import pkgutil
import re
import warnings
from pathlib import Path
from typing import Annotated

os.environ.setdefault("TINKER_TELEMETRY", "0")

import typer
from rich.console import Console

from fovea_conformance import checks as check_modules
from fovea_conformance.check import REGISTER, Check, Status
from fovea_conformance.report import summary, table, write_html, write_json
from fovea_conformance.runner import Verdict, run_checks
from fovea_conformance.target import Options

_RANGE = re.compile(r"C(\d+)(?:-C?(\d+))?|([A-I])")


def load() -> list[Check]:
    """All checks in order."""
    for module in pkgutil.iter_modules(check_modules.__path__):
        importlib.import_module(f"{check_modules.__name__}.{module.name}")
    return sorted(REGISTER.values(), key=lambda one: one.number)


def select(all_checks: list[Check], words: list[str]) -> list[Check]:
    """The checks that words such as C14, C20-C25 or D name; all for no words. Raises BadParameter."""
    if not words:
        return all_checks
    chosen: set[int] = set()
    for word in (part for given in words for part in given.replace(",", " ").split()):
        match = _RANGE.fullmatch(word.upper())
        if match is None:
            raise typer.BadParameter(f"{word!r} is no check; write C14, C20-C25 or a section A to I")
        first, last, section = match.groups()
        if section:
            chosen |= {one.number for one in all_checks if one.section == section}
        else:
            chosen |= set(range(int(first), int(last or first) + 1))
    return [one for one in all_checks if one.number in chosen]


def main(
    base_url: Annotated[str, typer.Option(help="The server, such as http://127.0.0.1:8000.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option(help="A key that it accepts (tml-...).")] = "tml-local",
    model: Annotated[str, typer.Option(help="A model that it serves; by default the first.")] = "",
    vlm: Annotated[bool, typer.Option("--vlm", help="The model takes images.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="C14, C20-C25 or a section A to I; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="The same, to leave out.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the verdicts here as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write them here as a page.")] = None,
    restart_command: Annotated[str, typer.Option(help="Kills the server (SIGKILL) and brings it back.")] = "",
    session_ttl_s: Annotated[float, typer.Option(help="After this silence the server ends a session.")] = 0.0,
    long_job_s: Annotated[float, typer.Option(help="Seconds of a job that counts as long.")] = 300.0,
    checkpoint: Annotated[str, typer.Option(help="Directory of the model's files, if its name is none.")] = "",
    cookbook: Annotated[bool, typer.Option("--cookbook", help="Run the cookbook's recipes too.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the SDK logs.")] = False,
) -> None:
    """Check a Tinker server against the contract: 123 checks through the real SDK and raw HTTP."""
    logging.basicConfig(level=logging.INFO if verbose else logging.CRITICAL)
    if not verbose:
        warnings.filterwarnings("ignore", category=FutureWarning)
    left_out = {one.check_id for one in select(load(), skip)} if skip else set()
    chosen = [one for one in select(load(), only or []) if one.check_id not in left_out]
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    name = model or _first_model(base_url, api_key, console)
    options = Options(base_url, api_key, name, vlm, restart_command, session_ttl_s, long_job_s, checkpoint, cookbook)
    verdicts = _run(chosen, options, console)
    console.print(table(verdicts, f"{base_url}, model {name}"))
    console.print(summary(verdicts))
    if json_file:
        write_json(verdicts, json_file)
    if html_file:
        write_html(verdicts, options, html_file)
    # The SDK's threads would hold the exit up, or crash it.
    failed = any(verdict.status is Status.FAILED for verdict in verdicts)
    console.file.flush()
    os._exit(1 if failed else 0)


def _run(chosen: list[Check], options: Options, console: Console) -> list[Verdict]:
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


def _first_model(base_url: str, api_key: str, console: Console) -> str:
    import httpx

    url = f"{base_url.rstrip('/')}/api/v1/get_server_capabilities"
    try:
        answer = httpx.get(url, headers={"X-API-Key": api_key}, timeout=30).raise_for_status()
        return str(answer.json()["supported_models"][0]["model_name"])
    except (httpx.HTTPError, LookupError, ValueError) as error:
        console.print(f"{url} does not name a model ({error}); say one with --model")
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
