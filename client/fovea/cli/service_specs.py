"""Service specifications of `fovea up`: the processes of one Fovea, with their ports, devices and arguments."""

import hashlib
import json
import os
import pathlib
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fovea.cli.service import MODEL_SEPARATOR, ServiceSpec, kind_of
from fovea.runtime import credentials
from fovea.runtime.durable import room_bytes
from fovea.runtime.hosts import WILDCARDS, free_ports
from fovea.wire import conventions

_LOCAL = "127.0.0.1:"
_QUARTERS = ("FOVEA_GATEWAY_UNNAMED_BYTES", "FOVEA_GATEWAY_PARKED_BYTES")
"""Limits of the gateway for what the trainer stores beside its states."""
NO_GPU = ("",)
"""Devices of a service that must see no GPU."""


class Setting(NamedTuple):
    """One setting for all services of a kind: `renderer`, `sampler`, `trainer` or `gateway`."""

    kind: str
    name: str
    value: str

    @property
    def variable(self) -> str:
        """The environment variable from which the service reads the setting."""
        return f"FOVEA_{self.kind}_{self.name}".upper()


@dataclass(frozen=True)
class ServedModel:
    """A base model with services of its own.

    Attributes:
        name: Model name that clients use.
        model: Checkpoint folder or Hugging Face model name.
        is_trained: Whether the model has a trainer; if not, it is for sampling only.
        trainer_gpus: Devices visible to the trainers, as CUDA numbers them, divided equally; empty leaves the
            environment unchanged.
        sampler_gpus: Devices of the samplers, divided equally; each sampler splits its model over its devices. A single
            device is shared by all samplers.
        sampler_count: Number of samplers; 0 for training only.
        trainer_count: Number of trainers. They share the model's recovery data.
        parameter_count: Number of parameters; 0 if unknown until the weights are downloaded.
        shared_base: Path of the socket through which the trainer uses the sampler's weights; empty if it has a copy.
    """

    name: str
    model: str
    is_trained: bool
    trainer_gpus: tuple[str, ...] = ()
    sampler_gpus: tuple[str, ...] = ()
    sampler_count: int = 1
    parameter_count: int = 0
    trainer_count: int = 1
    shared_base: str = ""

    @property
    def label(self) -> str:
        """The model name in a form that is safe in file names and service names."""
        return re.sub(r"[^A-Za-z0-9._]+", "_", self.name).strip("_")

    @property
    def sampler_devices(self) -> list[tuple[str, ...]]:
        """The devices of each sampler."""
        return _divided(self.sampler_gpus, self.sampler_count)

    @property
    def trainer_devices(self) -> list[tuple[str, ...]]:
        """The devices of each trainer."""
        return _divided(self.trainer_gpus, self.trainer_count if self.is_trained else 0)

    @property
    def transfer(self) -> str:
        """The transport of weight pushes if NCCL cannot carry them; empty if it can.

        NCCL cannot carry them if two members are on one device: rank 0 of the trainer, which is the sender, and a
        sampler, or two samplers. CUDA IPC then carries the weights if trainer and samplers use the same single device;
        otherwise gloo does.
        """
        if self.trainer_gpus == self.sampler_gpus != NO_GPU and len(self.sampler_gpus) == 1:
            return "cuda_ipc"
        shared = self.sampler_count > 1 and len(self.sampler_gpus) == 1 and self.sampler_gpus != NO_GPU
        senders = {devices[0] for devices in self.trainer_devices if devices}
        return "gloo" if shared or senders & {*self.sampler_gpus} - {*NO_GPU} else ""

    @property
    def shares_memory(self) -> bool:
        """True if any rank of the trainer shares its device with a sampler."""
        return bool(set(self.trainer_gpus) & set(self.sampler_gpus) - {*NO_GPU})


def _divided(devices: tuple[str, ...], count: int) -> list[tuple[str, ...]]:
    if len(devices) < 2:
        return [devices] * count
    size = len(devices) // max(count, 1)
    return [devices[number * size : (number + 1) * size] for number in range(count)]


@dataclass(frozen=True)
class UpOptions:
    """Options of `fovea up`.

    Attributes:
        model: Checkpoint folder or Hugging Face model name.
        model_name: Model name that clients use.
        host: Address on which the gateway listens; the other services stay on 127.0.0.1.
        port: REST port of the gateway.
        grpc_port: gRPC port of the gateway; 0 picks a free port.
        ranks: Number of processes of each trainer.
        state_dir: Folder of the database, checkpoints, recovery data and `up.json`.
        api_keys: Accepted API keys, in the format of the gateway's setting; keys in its database are accepted too.
        api_key_file: File of further keys, one per line.
        ready_timeout_s: Seconds to wait for all services to become ready.
        drain_s: Seconds that requests in flight may take to finish on shutdown.
        log_level: Log level of all services.
        trainer_gpus: Devices of the model's trainer.
        sampler_gpus: Devices of the model's samplers, divided equally.
        further_models: Further models behind the same gateway.
        sampler_count: Samplers of the model; 0 serves it for training only.
        parameter_count: Number of parameters of the model; 0 if unknown.
        trainer_count: Number of trainers of the model.
        settings: Service settings; they override the environment.
        suggestions: Settings of the model's services that apply unless the environment or `settings` contain any of
            them.
        shares_base: Whether the model's trainer uses the weights of its sampler.
    """

    model: str
    model_name: str
    host: str
    port: int
    grpc_port: int
    ranks: int
    state_dir: pathlib.Path
    api_keys: tuple[str, ...] = ()
    api_key_file: pathlib.Path | None = None
    ready_timeout_s: float = 300.0
    drain_s: float = 20.0
    log_level: str = "INFO"
    trainer_gpus: tuple[str, ...] = ()
    sampler_gpus: tuple[str, ...] = ()
    further_models: tuple[ServedModel, ...] = ()
    sampler_count: int = 1
    parameter_count: int = 0
    trainer_count: int = 1
    settings: tuple[Setting, ...] = ()
    suggestions: tuple[Setting, ...] = ()
    shares_base: bool = False

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """All served models, the default model first."""
        own = ServedModel(
            self.model_name,
            self.model,
            True,
            self.trainer_gpus,
            self.sampler_gpus,
            self.sampler_count,
            self.parameter_count,
            self.trainer_count,
            # Beside the services' temporary folder, because the trainer may look for it before that exists.
            f"{temporary_dir(self.state_dir)}.base" if self.shares_base else "",
        )
        return own, *self.further_models

    def setting_value(self, kind: str, name: str, *, further: bool = False) -> str:
        """Returns the value that services will read for a setting; empty if its default applies.

        Args:
            kind: Kind of service.
            name: Name of the setting.
            further: Whether to return the value for further models, which get no suggestions.
        """
        variable = Setting(kind, name, "").variable
        given = os.environ | {each.variable: each.value for each in self.settings}
        return given.get(variable) or ("" if further else _suggested(self).get(variable, ""))


def base_url(options: UpOptions) -> str:
    """Returns the base URL for the Tinker SDK."""
    host = "127.0.0.1" if options.host in WILDCARDS else options.host
    return f"http://{host}:{options.port}"


def temporary_dir(state_dir: pathlib.Path) -> pathlib.Path:
    """Returns the folder for temporary files of the services of a state folder, the same for every start.

    It is in the system's temporary folder because that path is short: vLLM creates Unix sockets there, and socket paths
    have at most 107 characters.
    """
    return pathlib.Path(tempfile.gettempdir()) / f"fovea-{_digest(str(state_dir.resolve()))[:8]}"


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()


def service_specs(options: UpOptions) -> list[ServiceSpec]:
    """Returns the processes of one Fovea, with ports that stay the same across restarts."""
    environment = _environment(options.models)
    count = sum(2 + 2 * served.sampler_count + 2 * served.trainer_count for served in options.models)
    ports = iter(free_ports(2 + count))  # in one call, so that no port is returned twice
    specs: list[ServiceSpec] = []
    addresses: list[dict[str, Any]] = []
    for number, served in enumerate(options.models):
        of_model = f"{MODEL_SEPARATOR}{served.label}" if number else ""
        own = list(_model_specs(options, served, of_model, environment, ports))
        found = {
            kind: [spec.address for spec in own if spec.kind == kind] for kind in ("renderer", "sampler", "trainer")
        }
        addresses.append({"model_name": served.name, "model": served.model, **found})
        specs += own
    return [*specs, _gateway_spec(options, addresses, environment, ports)]


def _environment(models: Sequence[ServedModel]) -> dict[str, str]:
    environment = {
        "OMP_NUM_THREADS": "1",
        # Idle OpenMP threads must sleep: spinning on busy cores costs several times the CPU time.
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        # torch's default is the temporary folder, which is removed when the process ends.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        or f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",
        # A secret is needed because other users of this machine can reach 127.0.0.1 too.
        credentials.SECRET_VARIABLE: credentials.service_secret() or secrets.token_urlsafe(32),
    }
    if all(pathlib.Path(served.model).is_dir() for served in models):
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


def _model_specs(
    options: UpOptions, served: ServedModel, of_model: str, environment: dict[str, str], ports: Iterator[int]
) -> Iterator[ServiceSpec]:
    """Yields the renderer, the samplers and, if the model is trained, the trainers of one base model."""
    renderer = next(ports)
    if not of_model:
        environment = environment | _suggested(options)
    model = ("--model", served.model)
    to_renderer = ("--renderer", f"{_LOCAL}{renderer}")
    # The gateway reads the same variables, so it looks for checkpoints in the same folders.
    given = os.environ | {each.variable: each.value for each in options.settings}
    checkpoints = given.get("FOVEA_GATEWAY_CHECKPOINT_DIR") or str(options.state_dir / "checkpoints")
    recovery = given.get("FOVEA_TRAINER_RECOVERY", str(options.state_dir / "recovery"))
    recovery = f"{recovery}{of_model}" if recovery else ""
    transfer = ("--transfer", served.transfer) if served.transfer else ()
    base = ("--shared-base", served.shared_base) if served.shared_base else ()
    yield _spec(
        options, f"renderer{of_model}", "fovea_renderer", conventions.RENDERER_SERVICE, renderer, next(ports),
        ("--port", str(renderer), *model), environment,
    )  # fmt: skip
    for number, devices in enumerate(served.sampler_devices):
        sampler = next(ports)
        split = ("--tensor-parallel", str(len(devices))) if len(devices) > 1 else ()
        yield _spec(
            options, f"sampler{number + 1 if number else ''}{of_model}", "fovea_sampler",
            conventions.SAMPLER_SERVICE, sampler, next(ports),
            ("--port", str(sampler), *model, *to_renderer, *transfer, *split, *base), environment | _visible(devices),
            # vLLM measures the free device memory to size its cache and counts memory that another process allocates
            # meanwhile as its own. Next to a trainer that was loading, it found no memory left and exited.
            starts_after=_before(served, number, of_model),
        )  # fmt: skip
    kept = ("--checkpoints", checkpoints, "--recovery", recovery)
    for number, devices in enumerate(served.trainer_devices):
        trainer = next(ports)
        yield _spec(
            options, f"trainer{number + 1 if number else ''}{of_model}", "fovea_trainer", conventions.TRAINER_SERVICE,
            trainer, next(ports),
            ("--port", str(trainer), *model, *to_renderer, "--ranks", str(options.ranks), *kept, *base),
            environment | _visible(devices),
        )  # fmt: skip


def _before(served: ServedModel, number: int, of_model: str) -> str:
    """Returns the service that must be ready before this sampler measures its device; empty if there is none."""
    if number and len(served.sampler_gpus) == 1 and served.sampler_gpus != NO_GPU:
        return f"sampler{number if number > 1 else ''}{of_model}"
    # With a shared base the trainer waits for the sampler's weights. The sampler then waits for the trainer.
    waits = served.is_trained and served.shares_memory and not served.shared_base
    return f"trainer{of_model}" if waits else ""


def _suggested(options: UpOptions) -> dict[str, str]:
    """Returns all suggestions, or none if the user has set any of them, because they divide the memory of one GPU."""
    given = {*os.environ, *(each.variable for each in options.settings)}
    suggested = {each.variable: each.value for each in options.suggestions}
    return suggested if given.isdisjoint(suggested) else {}


def _gateway_spec(
    options: UpOptions, models: list[dict[str, Any]], environment: dict[str, str], ports: Iterator[int]
) -> ServiceSpec:
    own, *further = models
    port = options.grpc_port or next(ports)
    arguments = ["--grpc-port", str(port), "--host", options.host, "--port", str(options.port)]
    arguments += ["--model", options.model, "--model-name", options.model_name, "--trainer", _listed(own["trainer"])]
    arguments += ["--renderer", *own["renderer"], "--sampler", _listed(own["sampler"])]
    if further:
        arguments += ["--further-models", json.dumps(further)]
    arguments += ["--state-dir", str(options.state_dir)]
    arguments += ["--api-key-file", str(options.api_key_file)] if options.api_key_file else []
    # Pass keys through the environment, because every user of the machine can read command lines.
    keys = {"FOVEA_GATEWAY_API_KEY": json.dumps(options.api_keys)} if options.api_keys else {}
    given = os.environ | {each.variable: each.value for each in options.settings}
    quarter = str(min(64 * 2**30, room_bytes(options.state_dir) // 4))
    room = {variable: quarter for variable in _QUARTERS if variable not in given}
    return _spec(
        options,
        "gateway",
        "fovea_gateway",
        conventions.GATEWAY_SERVICE,
        port,
        next(ports),
        tuple(arguments),
        environment | keys | room,
    )


def _listed(values: list[str]) -> str:
    """Formats a list as the settings parse it from one argument."""
    return values[0] if len(values) == 1 else json.dumps(values)


def _spec(
    options: UpOptions,
    name: str,
    module: str,
    service: str,
    port: int,
    metrics_port: int,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    starts_after: str = "",
) -> ServiceSpec:
    common = ("--log-level", options.log_level, "--metrics-port", str(metrics_port), "--drain-s", str(options.drain_s))
    part, of_model, label = name.partition(MODEL_SEPARATOR)
    temporary = str(temporary_dir(options.state_dir) / f"{part}{of_model}{_digest(label)[:4] if label else ''}")
    given = {each.variable: each.value for each in options.settings if each.kind == kind_of(name)}
    return ServiceSpec(
        name, ("-m", module, *common, *arguments), f"{_LOCAL}{port}", service, metrics_port, environment | given,
        temporary, starts_after,
    )  # fmt: skip


def _visible(gpus: tuple[str, ...]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
