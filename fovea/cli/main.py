"""The `fovea` command; docs/reference/cli.md, which is made from it, has all of it."""

import asyncio
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
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from typer.exceptions import TyperException

import fovea
from fovea.cli import checkpoints_command, gpu_layout, kept_log, start_checks, status_report
from fovea.cli.certificates import make_certificates
from fovea.cli.local_fovea import (
    DEFAULT_STATE_DIR,
    MISUSED,
    PUBLISHED_KEY,
    ApiKey,
    StateDir,
    complain,
    folder_in_use,
    make_first_key,
    may_have_keys,
    name_database,
    others_run,
    read_state,
)
from fovea.cli.service_specs import ServedModel, UpOptions, service_specs
from fovea.cli.start_checks import StartRefused
from fovea.cli.supervisor import StateFolder, Supervisor
from fovea.client import GatewayClient
from fovea.runtime import tls
from fovea.runtime.hosts import free_ports, is_loopback
from fovea.wire.errors import FoveaError

T = TypeVar("T")

app = typer.Typer(
    help="Fovea: self-hosted post-training for vision-language models, behind the Tinker API.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
models_app = typer.Typer(help="Which checkpoints work here.", no_args_is_help=True)
app.add_typer(models_app, name="models")
sessions_app = typer.Typer(help="Sessions that are parked: they wait for their clients.", no_args_is_help=True)
app.add_typer(sessions_app, name="sessions")
app.add_typer(checkpoints_command.app, name="checkpoints")
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
PASSED_ON_TO: dict[str, tuple[str, tuple[str, ...]]] = {
    "fovea keys": ("fovea_gateway.access.keys_command", ()),
    "fovea owners": ("fovea_gateway.access.owners_command", ("owners",)),
    "fovea usage": ("fovea_gateway.access.owners_command", ("usage",)),
    "fovea downgrade": ("fovea_gateway.database.downgrade_command", ()),
    "fovea models check": ("fovea_parity", ()),
    "fovea conformance": ("fovea_conformance", ()),
    "fovea evaluate": ("fovea_data.evaluate", ()),
    "fovea export": ("fovea_data.model_export", ()),
    "fovea demo": ("fovea_demo", ()),
}
"""The programs of commands that are programs of their own: a module, and its first arguments."""
_NEEDS = {
    "fovea_gateway": ("sqlalchemy", "gateway"),
    "fovea_parity": ("vllm", "cpu"),
    "fovea_conformance": ("torch", "cpu"),
    "fovea_demo": ("sklearn", "demo"),
}
"""By package: what it cannot do without, and the extra of the distribution that has it."""
KEYS_VARIABLE = "FOVEA_API_KEY"
TINY = "tiny"
CPU_RANKS = 2
Address = Annotated[str, typer.Option(help="host:port of a gateway's gRPC; default: that of --state-dir.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(fovea.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Fovea: self-hosted post-training for vision-language models, behind the Tinker API."""


@app.command()
def up(
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name. Default: a tiny Qwen3-VL, built once.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="Name that clients use; default: --model as given.")] = None,
    gpus: Annotated[
        str,
        typer.Option(
            help="Cards for trainer and samplers: auto takes all that are free of further models, none the CPU; or "
            "as in 0,1. One is shared, of more each has its own."
        ),
    ] = "auto",
    samplers: Annotated[
        int | None,
        typer.Option(min=0, help="Samplers of the model; 0 only trains. Default: 1, more where GPUs are left."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SERVICE.NAME=VALUE",
            help="Any setting of a service, as in sampler.max_loras=16; may be repeated.",
        ),
    ] = None,
    also_sample: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]MODEL[@GPUS]",
            help="A further base model, for sampling only, such as a teacher; may be repeated. GPUS as in 2,3.",
        ),
    ] = None,
    also_train: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]MODEL[@GPUS]", help="A further base model with a trainer of its own; may be repeated."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address that the gateway listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="REST port of the gateway; 0 takes a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port of the gateway; 0 takes a free one.")] = 8001,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Trainer processes. Default: one on each of its GPUs, 2 on the CPU.")
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=KEYS_VARIABLE,
            help="Accepted key, tml-KEY or OWNER=tml-KEY; may be repeated. Everybody on the machine sees it in `ps`: "
            "prefer the variable, the file, or `fovea keys create`.",
        ),
    ] = None,
    api_key_file: Annotated[pathlib.Path | None, typer.Option(help="A file of accepted keys, one per line.")] = None,
    ready_timeout_s: Annotated[float, typer.Option(help="Seconds that the services may take to come up.")] = 300.0,
    drain_s: Annotated[float, typer.Option(help="Seconds that work in flight gets at a stop.")] = 20.0,
    tls_dir: Annotated[
        pathlib.Path | None,
        typer.Option(
            envvar=tls.VARIABLE,
            help="Mutual TLS between the services, with ca.crt, tls.crt and tls.key of this folder.",
        ),
    ] = None,
    own_tls: Annotated[
        bool, typer.Option("--tls", help="The same, with a CA and certificate made at each start, good for a year.")
    ] = False,
    trainer_gpus: Annotated[
        str, typer.Option(help="Devices of the trainer, as in 0,1, instead of what --gpus chooses.")
    ] = "",
    sampler_gpus: Annotated[
        str, typer.Option(help="Devices of the samplers, in equal parts, over which the model of each is split.")
    ] = "",
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Start renderer, samplers, trainer and gateway on this machine, and stop them with Ctrl-C.

    What is wrong with the command, the model or the machine is said in one line before anything starts.
    """
    console = Console()
    try:
        start_checks.check_installed()
        start_checks.check_log_level(log_level)
        start_checks.check_certificates(tls_dir)
        settings = tuple(map(start_checks.read_setting, setting or ()))
        further = [_further_model(text, False) for text in also_sample or ()]
        further += [_further_model(text, True) for text in also_train or ()]
        parameter_count = start_checks.check_model(model, "--model") if model else 0
        start_checks.check_state_dir(state_dir)
        start_checks.check_alone(state_dir)
        start_checks.check_ports(host, {"--port": port, "--grpc-port": grpc_port})
        layout = gpu_layout.choose(
            gpus,
            trainer_gpus,
            sampler_gpus,
            weight_bytes=2 * parameter_count,
            sampler_count=samplers,
            ranks=ranks,
            taken=[name for served in further for name in served.sampler_gpus],
        )
        on_gpus = tuple(filter(None, layout.trainer))
        options = UpOptions(
            model=model or TINY,
            model_name=model_name or model or TINY,
            host=host,
            port=port or free_ports(1)[0],
            grpc_port=grpc_port,
            ranks=ranks or len(on_gpus) or CPU_RANKS,
            state_dir=state_dir.resolve(),
            api_keys=tuple(api_key or ()),
            api_key_file=api_key_file.resolve() if api_key_file else None,
            ready_timeout_s=ready_timeout_s,
            drain_s=drain_s,
            trainer_gpus=layout.trainer,
            sampler_gpus=layout.samplers,
            sampler_count=layout.sampler_count,
            parameter_count=parameter_count,
            further_models=tuple(further),
            settings=settings,
            suggestions=layout.suggestions,
            log_level=log_level,
        )
        start_checks.check_names(options.models)
        os.environ.pop(KEYS_VARIABLE, None)  # the gateway alone is given the keys
        start_checks.check_specs(service_specs(options), settings)
        start_checks.check_memory(options.models)
        gpu_layout.check_free(options, trainer_gpus, sampler_gpus)
    except StartRefused as error:
        raise typer.Exit(complain(f"fovea up: {error}", MISUSED)) from None
    console.print(f"Fovea {fovea.__version__}: {layout.words}", soft_wrap=True, highlight=False)
    if not model:
        path = _tiny_model(console)
        options = replace(options, model=path, model_name=model_name or path)
    if not (is_loopback(host) or api_key or api_key_file or may_have_keys(state_dir)):
        make_first_key(state_dir)
    if own_tls and not tls_dir:
        tls_dir = make_certificates(state_dir / "tls")
    if tls_dir:
        os.environ[tls.VARIABLE] = str(tls_dir.resolve())
    raise typer.Exit(asyncio.run(Supervisor(options, console).run()))


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="All of it as one JSON object.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Show what runs here: sessions, models, queue, memory; the exit code is 1 unless all parts serve."""
    state = read_state(folder_in_use(state_dir))
    healthy = status_report.all_healthy(state)
    report = status_report.read_report(state, healthy)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        raise typer.Exit(0 if all(healthy.values()) else 1)
    typer.echo(status_report.summary(report))
    table = Table("service", "gRPC", "pid", "memory", "up for", "restarts", "health")
    for name, item in report["services"].items():
        up_for = status_report.words_of(time.time() - item["started_at"]) if item["pid"] else "-"
        memory = f"{item['memory_bytes'] / 2**30:.1f} GiB"
        memory += f" + GPU {item['gpu_memory_bytes'] / 2**30:.1f}" if item["gpu_memory_bytes"] else ""
        counts = (str(item["pid"] or "-"), memory, up_for, str(item["restarts"]))
        table.add_row(name, item["address"], *counts, status_report.health_words(item, healthy[name]))
    Console().print(table)
    for name, item in report["services"].items():
        if item["last_end"]:
            typer.echo(f"{name} last ended by {item['last_end']}")
    raise typer.Exit(0 if all(healthy.values()) else 1)


@app.command()
def logs(
    service: Annotated[
        str, typer.Argument(help="renderer, sampler, trainer, gateway or fovea; empty shows all.", show_default=False)
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Fovea ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="The newest lines to show.")] = 200,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Show what the services have printed, also after they have ended; the newest 32 MiB are kept."""
    state_dir = folder_in_use(state_dir)
    folder = kept_log.log_folder(state_dir)
    if not (folder / "fovea.log").exists():
        words = f"--state-dir: {state_dir.resolve()} has no log: no Fovea has been up there{others_run(state_dir)}"
        raise typer.Exit(complain(words, MISUSED))
    shown = kept_log.newest_lines(folder, service, lines)
    if service and not shown and lines and not follow:
        there = ", ".join(kept_log.services_in(folder))
        raise typer.Exit(complain(f"SERVICE: nothing of {service!r} is in the log; there is {there}", MISUSED))
    coming: Iterable[str] = (
        kept_log.follow(folder, service, lambda: StateFolder(state_dir).holder() is None) if follow else ()
    )
    with suppress(BrokenPipeError, KeyboardInterrupt):
        for line in chain(shown, coming):
            typer.echo(line)


@app.command()
def down(
    state_dir: StateDir = DEFAULT_STATE_DIR,
    timeout_s: Annotated[
        float, typer.Option(help="Seconds that it may take; work in flight gets up's --drain-s.")
    ] = 120.0,
) -> None:
    """Stop the Fovea of `fovea up`, as its Ctrl-C does, and wait until all of it has ended."""
    folder = StateFolder(state_dir)
    pid = folder.holder()
    if pid is None:
        raise typer.Exit(complain(f"--state-dir: no Fovea is up in {state_dir.resolve()}{others_run(state_dir)}"))
    os.kill(pid, signal.SIGTERM)
    begun = time.monotonic()
    while folder.holder() == pid:
        if time.monotonic() - begun > timeout_s:
            raise typer.Exit(
                complain(f"process {pid} still runs after {timeout_s:.0f} s; its log says what it waits for")
            )
        time.sleep(0.1)
    typer.echo(f"stopped after {time.monotonic() - begun:.1f} s")


@app.command()
def restart(
    service: Annotated[str, typer.Argument(help="renderer, sampler, trainer or gateway.")],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    timeout_s: Annotated[float, typer.Option(help="Seconds that it may take to be back.")] = 120.0,
) -> None:
    """Kill a service of a running Fovea (SIGKILL) and wait until it serves again: a fault drill."""
    state = read_state(state_dir)
    if service not in state["services"]:
        raise typer.BadParameter(f"{service!r} is none of {', '.join(state['services'])}", param_hint="SERVICE")
    pid = state["services"][service]["pid"]
    os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    while not _is_back(read_state(state_dir), service, pid):
        if time.monotonic() - begun > timeout_s:
            raise typer.Exit(complain(f"{service} is not back after {timeout_s:.0f} s"))
        time.sleep(0.1)
    typer.echo(f"{service} serves again after {time.monotonic() - begun:.1f} s")


def _is_back(state: dict[str, Any], service: str, old_pid: int) -> bool:
    pid = state["services"][service]["pid"]
    return pid not in (old_pid, None) and status_report.all_healthy(state)[service]


@app.command(context_settings=PASSED_ON, add_help_option=False)
def keys(context: typer.Context) -> None:
    """Create, list, expire and revoke the API keys of a gateway."""
    _pass_on("fovea keys", *context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def owners(context: typer.Context) -> None:
    """Show and set what each owner may have: shares and limits."""
    _pass_on("fovea owners", *context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def usage(context: typer.Context) -> None:
    """Show what owners have used, by key and day."""
    _pass_on("fovea usage", *context.args)


@sessions_app.command("list")
def list_sessions(
    owner: Annotated[str, typer.Option(help="Of another owner, or * for all; needs a key of scope admin.")] = "",
    gateway: Address = "",
    api_key: ApiKey = PUBLISHED_KEY,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Show parked sessions, those that have waited longest first."""
    found = _ask(gateway, state_dir, api_key, lambda client: client.parked_sessions(owner))
    table = Table("session", "owner", "parked since", "MiB", "models")
    for each in found:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.parked_at))
        table.add_row(each.session_id, each.owner, since, f"{each.size_bytes / 2**20:.1f}", str(len(each.model_ids)))
    Console().print(table)


@sessions_app.command("end")
def end_session(
    session_id: Annotated[str, typer.Argument(help="Of a session, parked or not.")],
    gateway: Address = "",
    api_key: ApiKey = PUBLISHED_KEY,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """End a session, and delete its models with all that is kept of them. Checkpoints stay."""
    _ask(gateway, state_dir, api_key, lambda client: client.finish_session(session_id))


def _ask(
    address: str, state_dir: pathlib.Path, api_key: str, ask: Callable[[GatewayClient], Coroutine[Any, Any, T]]
) -> T:
    """What a gateway answers: that of an address, or the one that `fovea up` runs here."""

    async def call() -> T:
        place = address or read_state(folder_in_use(state_dir))["services"]["gateway"]["address"]
        async with GatewayClient(place, api_key) as client:
            return await ask(client)

    try:
        return asyncio.run(call())
    except FoveaError as error:
        raise typer.Exit(complain(error.message)) from None


@app.command(context_settings=PASSED_ON, add_help_option=False)
def downgrade(context: typer.Context) -> None:
    """Give the database of a stopped gateway an earlier version's tables."""
    _pass_on("fovea downgrade", *context.args)


@models_app.command(context_settings=PASSED_ON, add_help_option=False)
def check(context: typer.Context) -> None:
    """Try a checkpoint directory on the CPU, part by part."""
    _pass_on("fovea models check", *context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def conformance(context: typer.Context) -> None:
    """Check any Tinker server against the API's contract."""
    _pass_on("fovea conformance", *context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def evaluate(context: typer.Context) -> None:
    """Measure a served model on your rows: pictures by class, chats or records."""
    _pass_on("fovea evaluate", *context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def export(context: typer.Context) -> None:
    """Write a checkpoint as a PEFT adapter or a merged model that others load."""
    _pass_on("fovea export", *context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def demo(context: typer.Context) -> None:
    """Fine-tune a tiny vision-language model on real digit scans."""
    _pass_on("fovea demo", *context.args)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(fovea.__version__)


def _pass_on(command: str, *arguments: str) -> NoReturn:
    module, first = PASSED_ON_TO[command]
    needed, extra = _NEEDS.get(module.partition(".")[0], ("typer", ""))
    if importlib.util.find_spec(needed) is None:
        words = f"{command}: {needed} is not installed; the extra [{extra}] of fovea-vlm has it"
        raise typer.Exit(complain(words, MISUSED))
    if module.startswith("fovea_gateway.") and not any(word.startswith("--state-dir") for word in arguments):
        name_database()
    raise typer.Exit(subprocess.run([sys.executable, "-m", module, *first, *arguments], check=False).returncode)


def _further_model(text: str, is_trained: bool) -> ServedModel:
    """Reads [NAME=]MODEL[@GPUS]. Raises StartRefused."""
    flag = "--also-train" if is_trained else "--also-sample"
    name, equals, rest = text.partition("=")
    model, _, gpus = (rest if equals else text).partition("@")
    parameter_count = start_checks.check_model(model, flag)
    devices = gpu_layout.read_devices(gpus, flag, list(gpu_layout.visible_gpus())) if gpus else ()
    served = ServedModel(
        name if equals else model, model, is_trained, devices, devices, parameter_count=parameter_count
    )
    if not served.label:
        raise StartRefused(flag, f"{text!r} has no name; write NAME=MODEL")
    return served


def _tiny_model(console: Console) -> str:
    console.print("No --model given: using the tiny Qwen3-VL (built once, about a minute).")
    built = subprocess.run([sys.executable, "-m", "fovea_tinyvlm"], stdout=subprocess.PIPE, text=True, check=True)
    return built.stdout.strip().splitlines()[-1]


def main() -> NoReturn:
    """The `fovea` command. A wrong use of it is answered by one line, which names the option."""
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        code = 130
    except TyperException as error:
        if isinstance(error, typer.Exit):
            code = error.exit_code
        elif not str(message := getattr(error, "format_message", error.__str__)()):
            code = MISUSED  # a group without a command, which has printed its help
        else:
            context = getattr(error, "ctx", None)
            code = complain(f"{context.command_path if context else 'fovea'}: {' '.join(message.split())}", MISUSED)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
