"""`fovea up | down | demo | status | restart | keys | owners | usage | sessions | models | conformance | evaluate |
export`.
"""

import asyncio
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table

import fovea
from fovea.cli.certificates import make_certificates
from fovea.cli.service_specs import ServedModel, UpOptions
from fovea.cli.supervisor import StateFolder, Supervisor
from fovea.client import GatewayClient
from fovea.client.channel import ServiceClient
from fovea.runtime import tls
from fovea.runtime.hosts import free_ports, is_loopback
from fovea.runtime.model_files import check_directory
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
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
KEYS_VARIABLE = "FOVEA_API_KEY"
PUBLISHED_KEY = "tml-local"
DEFAULT_STATE_DIR = pathlib.Path(".fovea")
Address = Annotated[str, typer.Option(help="host:port of a gateway's gRPC; default: that of --state-dir.")]
ApiKey = Annotated[
    str, typer.Option(envvar="TINKER_API_KEY", help="Whose sessions; of scope admin, everybody's. Prefer the variable.")
]
StateDir = Annotated[pathlib.Path, typer.Option(help="Database, checkpoints and up.json of this Fovea.")]


@app.command()
def up(
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name. Default: a tiny Qwen3-VL, built once.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="Name that clients use; default: --model as given.")] = None,
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
    ranks: Annotated[int, typer.Option(min=1, help="Trainer processes.")] = 2,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=KEYS_VARIABLE,
            help="Accepted key, tml-KEY or OWNER=tml-KEY; may be repeated. Everybody on the machine sees it in `ps`: "
            "prefer the variable, the file, or `fovea keys create`.",
        ),
    ] = None,
    api_key_file: Annotated[
        pathlib.Path | None, typer.Option(exists=True, dir_okay=False, help="A file of accepted keys, one per line.")
    ] = None,
    ready_timeout_s: Annotated[float, typer.Option(help="Seconds that the services may take to come up.")] = 300.0,
    drain_s: Annotated[float, typer.Option(help="Seconds that work in flight gets at a stop.")] = 20.0,
    tls_dir: Annotated[
        pathlib.Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            envvar=tls.VARIABLE,
            help="Mutual TLS between the services, with ca.crt, tls.crt and tls.key of this folder.",
        ),
    ] = None,
    own_tls: Annotated[
        bool, typer.Option("--tls", help="The same, with a CA and certificate made at each start, good for a year.")
    ] = False,
    trainer_gpus: Annotated[str, typer.Option(help="Devices of the trainer, as in 0,1; default: all it sees.")] = "",
    sampler_gpus: Annotated[str, typer.Option(help="Devices of the sampler, over which its model is split.")] = "",
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Start renderer, sampler, trainer and gateway on this machine, and stop them with Ctrl-C."""
    console = Console()
    further = [_further_model(text, False) for text in also_sample or ()]
    further += [_further_model(text, True) for text in also_train or ()]
    path = model or _tiny_model(console)
    _check_model(path, "--model")
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (is_loopback(host) or api_key or api_key_file or may_have_keys(state_dir)):
        make_first_key(state_dir)
    os.environ.pop(KEYS_VARIABLE, None)  # the gateway alone is given the keys
    if own_tls and not tls_dir:
        tls_dir = state_dir / "tls"
        make_certificates(tls_dir)
    if tls_dir:
        os.environ[tls.VARIABLE] = str(tls_dir.resolve())
    options = UpOptions(
        model=path,
        model_name=model_name or path,
        host=host,
        port=port or free_ports(1)[0],
        grpc_port=grpc_port,
        ranks=ranks,
        state_dir=state_dir.resolve(),
        api_keys=tuple(api_key or ()),
        api_key_file=api_key_file.resolve() if api_key_file else None,
        ready_timeout_s=ready_timeout_s,
        drain_s=drain_s,
        trainer_gpus=tuple(filter(None, trainer_gpus.split(","))),
        sampler_gpus=tuple(filter(None, sampler_gpus.split(","))),
        further_models=tuple(further),
        log_level=log_level,
    )
    if len({served.label for served in options.models}) < len(options.models):
        raise typer.BadParameter("two base models have the same name", param_hint="--also-sample, --also-train")
    raise typer.Exit(asyncio.run(_run(options, console)))


@app.command()
def status(state_dir: StateDir = DEFAULT_STATE_DIR) -> None:
    """Show what `fovea up` runs here and whether it is healthy."""
    state = _state(state_dir)
    healthy = _all_healthy(state)
    names = " and ".join([state["model_name"], *state["further_models"]])
    title = f"Fovea at {state['base_url']}, model {names}"
    table = Table(
        "service", "gRPC", "metrics", "pid", "up for", "restarts", "health", title=title, title_justify="left"
    )
    for name, item in state["services"].items():
        up_for = f"{time.time() - item['started_at']:.0f} s" if item["pid"] else "-"
        counts = (str(item["pid"] or "-"), up_for, str(item["restarts"]))
        table.add_row(name, item["address"], item["metrics"], *counts, _health_words(item, healthy[name]))
    Console().print(table)
    for name, item in state["services"].items():
        if item["last_end"]:
            typer.echo(f"{name} last ended by {item['last_end']}")
    raise typer.Exit(0 if all(healthy.values()) else 1)


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
        raise typer.Exit(_complain(f"no Fovea is up in {state_dir}"))
    os.kill(pid, signal.SIGTERM)
    begun = time.monotonic()
    while folder.holder() == pid:
        if time.monotonic() - begun > timeout_s:
            raise typer.Exit(
                _complain(f"process {pid} still runs after {timeout_s:.0f} s; its log says what it waits for")
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
    state = _state(state_dir)
    if service not in state["services"]:
        raise typer.BadParameter(f"{service!r} is none of {', '.join(state['services'])}", param_hint="SERVICE")
    pid = state["services"][service]["pid"]
    os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    while (state := _state(state_dir))["services"][service]["pid"] in (pid, None) or not _all_healthy(state)[service]:
        if time.monotonic() - begun > timeout_s:
            raise typer.Exit(_complain(f"{service} is not back after {timeout_s:.0f} s"))
        time.sleep(0.1)
    typer.echo(f"{service} serves again after {time.monotonic() - begun:.1f} s")


@app.command(context_settings=PASSED_ON, add_help_option=False)
def keys(context: typer.Context) -> None:
    """Create, list, expire and revoke the API keys of a gateway; see `fovea keys --help`."""
    _pass_on("gateway.access.keys_command", *context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def owners(context: typer.Context) -> None:
    """Show and set what each owner may have: shares and limits; see `fovea owners --help`."""
    _pass_on("gateway.access.owners_command", "owners", *context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def usage(context: typer.Context) -> None:
    """Show what owners have used, by key and day; see `fovea usage --help`."""
    _pass_on("gateway.access.owners_command", "usage", *context.args)


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
        async with GatewayClient(address or _state(state_dir)["services"]["gateway"]["address"], api_key) as client:
            return await ask(client)

    try:
        return asyncio.run(call())
    except FoveaError as error:
        raise typer.Exit(_complain(error.message)) from None


@app.command(context_settings=PASSED_ON, add_help_option=False)
def downgrade(context: typer.Context) -> None:
    """Give the database of a stopped gateway an earlier version's tables; see `fovea downgrade --help`."""
    _pass_on("gateway.database.downgrade_command", *context.args)


@models_app.command(context_settings=PASSED_ON, add_help_option=False)
def check(context: typer.Context) -> None:
    """Try a checkpoint directory on the CPU, part by part; see `fovea models check --help`."""
    _pass_on("parity", *context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def conformance(context: typer.Context) -> None:
    """Check any Tinker server against the API's contract; see `fovea conformance --help`."""
    if importlib.util.find_spec("tinker") is None:
        raise typer.Exit(_complain("the checks drive the official SDK; install it: pip install tinker==0.38.0"))
    _pass_on("conformance", *context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def evaluate(context: typer.Context) -> None:
    """Measure a served model on your rows: pictures by class, chats or records; see `fovea evaluate --help`."""
    if importlib.util.find_spec("tinker") is None:
        raise typer.Exit(_complain("this asks through the official SDK; install it: pip install tinker==0.38.0"))
    _pass_on("fovea_data.evaluate", *context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def export(context: typer.Context) -> None:
    """Write a checkpoint as a PEFT adapter or a merged model that others load; see `fovea export --help`."""
    if importlib.util.find_spec("tinker") is None:
        raise typer.Exit(_complain("this asks through the official SDK; install it: pip install tinker==0.38.0"))
    _pass_on("fovea_data.model_export", *context.args)


@app.command(context_settings=PASSED_ON)
def demo(context: typer.Context) -> None:
    """Fine-tune a tiny vision-language model on real digit scans; see `fovea demo -- --help`."""
    _pass_on("demo", *context.args)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(fovea.__version__)


def _pass_on(module: str, *arguments: str) -> NoReturn:
    raise typer.Exit(subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode)


async def _run(options: UpOptions, console: Console) -> int:
    return await Supervisor(options, console).run()


def _further_model(text: str, is_trained: bool) -> ServedModel:
    """Reads [NAME=]MODEL[@GPUS]."""
    flag = "--also-train" if is_trained else "--also-sample"
    name, equals, rest = text.partition("=")
    model, _, gpus = (rest if equals else text).partition("@")
    _check_model(model, flag)
    devices = tuple(filter(None, gpus.split(",")))
    served = ServedModel(name if equals else model, model, is_trained, devices, devices)
    if not served.label:
        raise typer.BadParameter(f"{text!r} has no name; write NAME=MODEL", param_hint=flag)
    return served


def _check_model(model: str, flag: str) -> None:
    if model.startswith((".", "/", "~")) and not (pathlib.Path(model).expanduser() / "config.json").is_file():
        raise typer.BadParameter(
            f"{model} has no config.json; name a checkpoint directory or a hub name", param_hint=flag
        )
    if refusal := _refusal(model):
        raise typer.Exit(_complain(refusal))


def _refusal(model: str) -> str:
    """Why a service would refuse a checkpoint directory; empty if none would.

    Of a hub name, which is not here yet, the services say so themselves.
    """
    directory = pathlib.Path(model).expanduser()
    if not (directory / "config.json").is_file():
        return ""
    try:
        check_directory(directory)
    except ValueError as error:
        return f"{model}: {error}; see which parts work: fovea models check {model}"
    return ""


def make_first_key(state_dir: pathlib.Path) -> None:
    """Makes a key that allows everything, and shows it: other machines reach the gateway, and nobody has one."""
    options = ("--owner", "admin", "--scope", "admin", "--name", "of the first fovea up", "--state-dir", str(state_dir))
    made = subprocess.run([sys.executable, "-m", "gateway.access.keys_command", "create", *options], check=False)
    if made.returncode:
        raise typer.Exit(_complain("no API key could be made, and other machines reach this host: give one"))


def may_have_keys(state_dir: pathlib.Path) -> bool:
    """Whether the gateway may find keys of its own; if it does not, it ends as it starts."""
    given = ("FOVEA_GATEWAY_API_KEY", "FOVEA_GATEWAY_API_KEY_FILE", "FOVEA_GATEWAY_DATABASE_URL")
    return (state_dir / "gateway.db").exists() or any(name in os.environ for name in given)


def _state(state_dir: pathlib.Path) -> dict[str, Any]:
    state_file = state_dir / "up.json"
    pid = StateFolder(state_dir).holder()
    if pid is None:
        raise typer.Exit(_complain(f"no Fovea is up in {state_dir}"))
    if not state_file.exists():
        raise typer.Exit(_complain(f"the Fovea of process {pid} in {state_dir} is not ready yet; its log says why"))
    state: dict[str, Any] = json.loads(state_file.read_text())
    return state


def _health_words(item: dict[str, Any], is_healthy: bool) -> str:
    """Whether a part serves, and if not, what it waits for."""
    if is_healthy:
        return "serving"
    if item["pid"]:
        return "not serving: it loads, or waits for another part"
    return f"down, starts again in {max(item['starts_again_at'] - time.time(), 0.0):.0f} s"


def _all_healthy(state: dict[str, Any]) -> dict[str, bool]:
    if state["tls_dir"]:
        os.environ[tls.VARIABLE] = state["tls_dir"]
    return asyncio.run(_health({name: item["address"] for name, item in state["services"].items()}))


async def _health(addresses: dict[str, str]) -> dict[str, bool]:
    async def ask(name: str, address: str) -> bool:
        async with ServiceClient(address, internal=name != "gateway") as client:
            return await client.is_serving()

    return dict(zip(addresses, await asyncio.gather(*map(ask, addresses, addresses.values())), strict=True))


def _tiny_model(console: Console) -> str:
    console.print("No --model given: using the tiny Qwen3-VL (built once, about a minute).")
    built = subprocess.run([sys.executable, "-m", "tinyvlm"], stdout=subprocess.PIPE, text=True, check=True)
    return built.stdout.strip().splitlines()[-1]


def _complain(message: str) -> int:
    Console(stderr=True).print(message, soft_wrap=True)
    return 1


if __name__ == "__main__":
    app()
