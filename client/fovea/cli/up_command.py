"""`fovea up`: checks the options, the model and the machine, then runs all services under one supervisor."""

import asyncio
import datetime
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated

import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console

import fovea
from fovea.cli import gpu_layout, preflight
from fovea.cli.preflight import StartRefused
from fovea.cli.service_specs import ServedModel, UpOptions, base_url, service_specs
from fovea.cli.state_folder import (
    DEFAULT_STATE_DIR,
    MISUSED,
    FolderTaken,
    StateDir,
    StateFolder,
    make_first_key,
    may_have_keys,
    print_error,
)
from fovea.cli.supervisor import Supervisor
from fovea.runtime import credentials
from fovea.runtime.hosts import free_ports, is_loopback
from fovea.runtime.model_files import loadable_path
from fovea.runtime.processes import SAFE_PATH

KEYS_VARIABLE = "FOVEA_API_KEY"
TINY = "tiny"
CPU_RANKS = 2
_FAST = ("sampler.fast_start=true",)
_VALID = datetime.timedelta(days=365)
_CLOCK_SKEW = datetime.timedelta(minutes=5)

_Model = Annotated[
    str | None,
    typer.Option(help="Checkpoint folder or Hugging Face model name. Default: a tiny Qwen3-VL, built on first use."),
]
_ModelName = Annotated[str | None, typer.Option(help="Model name that clients use. Default: the value of --model.")]
_Gpus = Annotated[
    str,
    typer.Option(
        help="GPUs for trainer and samplers: auto (all GPUs not used by further models), none (CPU), or a list such "
        "as 0,1. A single GPU is shared; with more, trainer and samplers get their own."
    ),
]
_Samplers = Annotated[
    int | None,
    typer.Option(min=0, help="Number of samplers; 0 for training only. Default: 1, or more if GPUs remain."),
]
_Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SERVICE.NAME=VALUE",
        help="Set any setting of a service, such as sampler.max_loras=16. Repeatable.",
    ),
]
_AlsoSample = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]MODEL[@GPUS]",
        help="Serve a further base model for sampling only, such as a teacher; GPUS is a list such as 2,3. Repeatable.",
    ),
]
_AlsoTrain = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]MODEL[@GPUS]", help="Serve a further base model with a trainer of its own. Repeatable."
    ),
]
_Host = Annotated[str, typer.Option(help="Address on which the gateway listens.")]
_Port = Annotated[int, typer.Option(help="REST port of the gateway; 0 picks a free port.")]
_GrpcPort = Annotated[int, typer.Option(help="gRPC port of the gateway; 0 picks a free port.")]
_Trainers = Annotated[
    int, typer.Option(min=1, help="Number of trainers, which share the models and divide the trainer GPUs equally.")
]
_Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Number of processes of each trainer. Default: one per trainer GPU, or 2 on the CPU."),
]
_ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        envvar=KEYS_VARIABLE,
        help="Accepted API key: tml-KEY or OWNER=tml-KEY. Repeatable. Other users of this machine can see it in `ps`; "
        "prefer the variable, --api-key-file, or `fovea keys create`.",
    ),
]
_ApiKeyFile = Annotated[pathlib.Path | None, typer.Option(help="File of accepted API keys, one per line.")]
_ReadyTimeout = Annotated[float, typer.Option(help="Seconds to wait for all services to become ready.")]
_Drain = Annotated[float, typer.Option(help="Seconds that requests in flight may take to finish on shutdown.")]
_TlsDir = Annotated[
    pathlib.Path | None,
    typer.Option(
        envvar=credentials.TLS_VARIABLE,
        help="Use mutual TLS between the services, with ca.crt, tls.crt and tls.key from this folder.",
    ),
]
_OwnTls = Annotated[
    bool,
    typer.Option("--tls", help="Use mutual TLS with a CA and certificate created at each start, valid for one year."),
]
_TrainerGpus = Annotated[str, typer.Option(help="GPUs of the trainer, such as 0,1; overrides --gpus.")]
_SamplerGpus = Annotated[
    str, typer.Option(help="GPUs of the samplers, divided equally; each sampler splits its model over its GPUs.")
]
_FastStart = Annotated[
    bool, typer.Option("--fast-start", help="Start sooner on a GPU: short for `--set sampler.fast_start=true`.")
]
_SharedBase = Annotated[
    bool,
    typer.Option(
        "--shared-base",
        help="Keep one copy of the weights for trainer and sampler, which share one GPU or the CPU. Trains adapters "
        "only, with one rank.",
    ),
]
_LogLevel = Annotated[str, typer.Option(help="Log level: DEBUG, INFO, WARNING or ERROR.")]


def up(
    model: _Model = None,
    model_name: _ModelName = None,
    gpus: _Gpus = "auto",
    samplers: _Samplers = None,
    trainers: _Trainers = 1,
    setting: _Setting = None,
    also_sample: _AlsoSample = None,
    also_train: _AlsoTrain = None,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    grpc_port: _GrpcPort = 8001,
    ranks: _Ranks = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: _ApiKeys = None,
    api_key_file: _ApiKeyFile = None,
    ready_timeout_s: _ReadyTimeout = 300.0,
    drain_s: _Drain = 20.0,
    tls_dir: _TlsDir = None,
    own_tls: _OwnTls = False,
    trainer_gpus: _TrainerGpus = "",
    sampler_gpus: _SamplerGpus = "",
    fast_start: _FastStart = False,
    shared_base: _SharedBase = False,
    log_level: _LogLevel = "INFO",
) -> None:
    """Start Fovea on this machine: renderer, samplers, trainer and gateway. Stop it with Ctrl-C or `fovea down`.

    All options, the model and the machine are checked first; a problem is reported in one line before anything starts.
    """
    try:
        _check_machine(log_level, tls_dir, state_dir, host, {"--port": port, "--grpc-port": grpc_port})
        options = UpOptions(
            settings=tuple(map(preflight.read_setting, [*(setting or ()), *(_FAST * fast_start)])),
            further_models=tuple(_further_models(also_sample or (), also_train or ())),
            parameter_count=preflight.check_model(model, "--model") if model else 0,
            model=model or TINY,
            model_name=model_name or loadable_path(model or TINY),
            host=host,
            port=port or free_ports(1)[0],
            grpc_port=grpc_port,
            ranks=ranks or (1 if shared_base else CPU_RANKS),
            state_dir=state_dir.resolve(),
            api_keys=tuple(api_key or ()),
            api_key_file=api_key_file.resolve() if api_key_file else None,
            ready_timeout_s=ready_timeout_s,
            drain_s=drain_s,
            log_level=log_level,
            trainer_count=trainers,
            shares_base=shared_base,
        )
        options, layout = _with_gpus(options, gpus, trainer_gpus, sampler_gpus, samplers, ranks)
        _check_services(options, trainer_gpus, sampler_gpus)
    except StartRefused as error:
        raise typer.Exit(print_error(f"fovea up: {error}", MISUSED)) from None
    console = Console()
    console.print(f"Fovea {fovea.__version__}: {layout.words}", soft_wrap=True, highlight=False)
    folder = _prepare_folder(options, tls_dir, own_tls)
    options = options if model else _with_tiny_model(options, model_name, console)
    raise typer.Exit(asyncio.run(Supervisor(options, console, folder=folder).run()))


def _check_machine(
    log_level: str, tls_dir: pathlib.Path | None, state_dir: pathlib.Path, host: str, ports: dict[str, int]
) -> None:
    preflight.check_installed()
    preflight.check_log_level(log_level)
    preflight.check_certificates(tls_dir)
    preflight.check_state_dir(state_dir)
    preflight.check_alone(state_dir)
    preflight.check_ports(host, ports)


def _with_gpus(
    options: UpOptions, gpus: str, trainer_gpus: str, sampler_gpus: str, samplers: int | None, ranks: int | None
) -> tuple[UpOptions, gpu_layout.GpuLayout]:
    layout = gpu_layout.choose(
        gpus,
        trainer_gpus,
        sampler_gpus,
        weight_bytes=2 * options.parameter_count,
        sampler_count=samplers,
        ranks=ranks,
        taken=[name for served in options.further_models for name in served.sampler_gpus],
        shares_base=options.shares_base,
    )
    return _with_layout(options, layout, ranks), layout


def _with_layout(options: UpOptions, layout: gpu_layout.GpuLayout, ranks: int | None) -> UpOptions:
    """Returns the options with the chosen devices, and by default with one trainer process per device. Raises
    StartRefused.
    """
    gpu_count = len(tuple(filter(None, layout.trainer)))
    _check_trainers(options, gpu_count)
    found = ranks or gpu_count // options.trainer_count or options.ranks
    if options.shares_base:
        _check_shared_base(layout, options.trainer_count * found)
    return replace(
        options,
        ranks=found,
        trainer_gpus=layout.trainer,
        sampler_gpus=layout.samplers,
        sampler_count=layout.sampler_count,
        suggestions=layout.suggestions,
    )


def _check_shared_base(layout: gpu_layout.GpuLayout, rank_count: int) -> None:
    places = (*layout.trainer, *layout.samplers)
    if rank_count > 1 or layout.sampler_count != 1 or len({*places}) > 1 or len(places) not in (0, 2):
        fix = "set --ranks 1, --trainers 1, --samplers 1, and one GPU with --gpus"
        raise StartRefused("--shared-base", f"one trainer rank and one sampler must share one device; {fix}")


def _check_trainers(options: UpOptions, gpu_count: int) -> None:
    count, given = options.trainer_count, os.environ | {each.variable: each.value for each in options.settings}
    if gpu_count % count:
        fix = "set --trainer-gpus to a multiple"
        raise StartRefused("--trainers", f"{count} trainers cannot divide {gpu_count} trainer GPUs equally; {fix}")
    if count > 1 and given.get("FOVEA_TRAINER_RECOVERY") == "":
        fix = "set trainer.recovery to a folder, or leave it out"
        raise StartRefused("--trainers", f"{count} trainers need shared recovery data; {fix}")


def _check_services(options: UpOptions, trainer_gpus: str, sampler_gpus: str) -> None:
    """Checks names, settings and memory of all services. Raises StartRefused."""
    preflight.check_names(options.models)
    os.environ.pop(KEYS_VARIABLE, None)  # only the gateway may see the keys
    specs = service_specs(options)
    preflight.check_specs(specs, options.settings)
    preflight.check_database(specs, options.settings)
    preflight.check_memory(options.models)
    gpu_layout.check_free(options, trainer_gpus, sampler_gpus)


def _prepare_folder(options: UpOptions, tls_dir: pathlib.Path | None, own_tls: bool) -> StateFolder:
    """Locks the state folder before anything takes long, so that a second start there is refused at once. Creates a
    first API key if the gateway needs one, and certificates for `--tls`.
    """
    folder = StateFolder(options.state_dir)
    try:
        folder.hold(base_url(options))
    except FolderTaken as error:
        raise typer.Exit(print_error(f"fovea up: --state-dir: {error}", MISUSED)) from None
    has_keys = options.api_keys or options.api_key_file or may_have_keys(options.state_dir)
    if not (is_loopback(options.host) or has_keys):
        make_first_key(options.state_dir)
    if own_tls and not tls_dir:
        tls_dir = make_certificates(options.state_dir / "tls")
    if tls_dir:
        os.environ[credentials.TLS_VARIABLE] = str(tls_dir.resolve())
    return folder


def _with_tiny_model(options: UpOptions, model_name: str | None, console: Console) -> UpOptions:
    console.print("No --model given; using the tiny Qwen3-VL (built on first use, about a minute).")
    program = [sys.executable, "-m", "fovea_tinyvlm"]
    built = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | SAFE_PATH)
    path = built.stdout.strip().splitlines()[-1]
    return replace(options, model=path, model_name=model_name or loadable_path(path))


def _further_models(sampled: Iterable[str], trained: Iterable[str]) -> Iterator[ServedModel]:
    for text in sampled:
        yield _further_model(text, False)
    for text in trained:
        yield _further_model(text, True)


def _further_model(text: str, is_trained: bool) -> ServedModel:
    """Parses [NAME=]MODEL[@GPUS]. Raises StartRefused."""
    flag = "--also-train" if is_trained else "--also-sample"
    name, equals, rest = text.partition("=")
    model, _, gpus = (rest if equals else text).partition("@")
    parameter_count = preflight.check_model(model, flag)
    devices = gpu_layout.read_devices(gpus, flag, list(gpu_layout.visible_gpus())) if gpus else ()
    served = ServedModel(
        name if equals else loadable_path(model), model, is_trained, devices, devices, parameter_count=parameter_count
    )
    if not served.label:
        raise StartRefused(flag, f"{text!r} gives no usable name; write NAME=MODEL")
    return served


def make_certificates(folder: pathlib.Path) -> pathlib.Path:
    """Writes a new CA certificate, a certificate signed by it, and that certificate's private key; returns the folder.

    Both certificates are valid for one year. The CA's private key is not stored. Only this user can read the files.
    Existing files are replaced, so processes that loaded the old ones can no longer connect to those that load the new
    ones.
    """
    now = datetime.datetime.now(datetime.UTC)

    def signed(name: str, issuer: str, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _VALID)
            .add_extension(x509.BasicConstraints(ca=name == issuer, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        )
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    files = {
        credentials.CA: signed("fovea-ca", "fovea-ca", ca_key, ca_key),
        credentials.CERTIFICATE: signed(credentials.TLS_NAME, "fovea-ca", key, ca_key),
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in {**files, credentials.PRIVATE_KEY: encoded}.items():
        (folder / name).unlink(missing_ok=True)
        with open(folder / name, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(content)
    return folder
