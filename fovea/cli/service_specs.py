"""What `fovea up` runs: the processes of one embedded Fovea, with their ports, devices and arguments."""

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

from fovea.cli.service import OF_MODEL, ServiceSpec, kind_of
from fovea.runtime import secret
from fovea.runtime.hosts import WILDCARDS, free_ports
from fovea.wire import conventions

_LOCAL = "127.0.0.1:"
NO_GPU = ("",)
"""Devices of a service that is to see none."""


class Setting(NamedTuple):
    """One setting of all services of a kind: of `renderer`, `sampler`, `trainer` or `gateway`, by its name there."""

    kind: str
    name: str
    value: str

    @property
    def variable(self) -> str:
        """Of the environment in which the service reads it."""
        return f"FOVEA_{self.kind}_{self.name}".upper()


@dataclass(frozen=True)
class ServedModel:
    """One base model, with services of its own.

    Attributes:
        name: What clients call it.
        model: Checkpoint directory or hub name.
        is_trained: Whether it has a trainer; else it is for sampling only.
        trainer_gpus: Devices that the trainer sees, as CUDA numbers them; empty leaves the environment as it is.
        sampler_gpus: The same for the samplers, in equal parts; the model of each is split over its part. A single one
            is shared by all.
        sampler_count: Samplers; 0 for one that is only trained.
        parameter_count: Of its weights; 0 if that is not known before they are here.
    """

    name: str
    model: str
    is_trained: bool
    trainer_gpus: tuple[str, ...] = ()
    sampler_gpus: tuple[str, ...] = ()
    sampler_count: int = 1
    parameter_count: int = 0

    @property
    def label(self) -> str:
        """The name as a part of file names and of its services' names."""
        return re.sub(r"[^A-Za-z0-9._]+", "_", self.name).strip("_")

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """The devices of each sampler."""
        if len(self.sampler_gpus) < 2:
            return [self.sampler_gpus] * self.sampler_count
        size = len(self.sampler_gpus) // max(self.sampler_count, 1)
        return [self.sampler_gpus[number * size : (number + 1) * size] for number in range(self.sampler_count)]

    @property
    def transfer(self) -> str:
        """What must carry weights where NCCL cannot, empty where it can.

        It does not send over a device that rank 0 of the trainer, which sends, shares with a sampler, nor over one that
        two samplers share. If there is no other device, its memory carries them.
        """
        if self.trainer_gpus == self.sampler_gpus != NO_GPU and len(self.sampler_gpus) == 1:
            return "cuda_ipc"
        shared = self.sampler_count > 1 and len(self.sampler_gpus) == 1 and self.sampler_gpus != NO_GPU
        return "gloo" if shared or {*self.trainer_gpus[:1]} & {*self.sampler_gpus} - {*NO_GPU} else ""

    @property
    def shares_memory(self) -> bool:
        """Whether any rank of the trainer shares its device with a sampler."""
        return bool(set(self.trainer_gpus) & set(self.sampler_gpus) - {*NO_GPU})


@dataclass(frozen=True)
class UpOptions:
    """What `fovea up` was asked for.

    Attributes:
        model: Checkpoint directory or hub name.
        model_name: Name to offer it under.
        host: Address that the gateway listens on; the other services stay on 127.0.0.1.
        port: REST port of the gateway.
        grpc_port: gRPC port of the gateway, 0 for a free one.
        ranks: Trainer processes.
        state_dir: Database, checkpoints, what the trainer recovers from, and `up.json`.
        api_keys: Accepted keys, as the gateway's settings take them; those of its database are accepted too.
        api_key_file: Further keys, one per line.
        ready_timeout_s: How long the services may take to come up.
        drain_s: How long a stop waits for work in flight.
        trainer_gpus: Devices of the model's trainer.
        sampler_gpus: Devices of its samplers, in equal parts.
        further_models: Beside the model, behind the same gateway.
        sampler_count: Samplers of the model; 0 serves it for training only.
        parameter_count: Of the model's weights; 0 if that is not known.
        settings: Of services, above all that the environment says.
        suggestions: Of the services of the model, unless the environment or `settings` have one of them.
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
    settings: tuple[Setting, ...] = ()
    suggestions: tuple[Setting, ...] = ()

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """All that are served, the default one first."""
        own = ServedModel(
            self.model_name,
            self.model,
            True,
            self.trainer_gpus,
            self.sampler_gpus,
            self.sampler_count,
            self.parameter_count,
        )
        return own, *self.further_models

    def told(self, kind: str, name: str, *, further: bool = False) -> str:
        """A setting as the services of the model, or of further models, will read it; empty where its default holds."""
        variable = Setting(kind, name, "").variable
        given = os.environ | {each.variable: each.value for each in self.settings}
        return given.get(variable) or ("" if further else _suggested(self).get(variable, ""))


def base_url(options: UpOptions) -> str:
    """Where the Tinker SDK is to be pointed."""
    host = "127.0.0.1" if options.host in WILDCARDS else options.host
    return f"http://{host}:{options.port}"


def temporary_dir(state_dir: pathlib.Path) -> pathlib.Path:
    """Where the services of a state folder have their temporary files; whoever starts there next finds it again.

    In the system's temporary folder, whose path is short: vLLM makes Unix sockets there, and their paths have 107
    characters at most.
    """
    return pathlib.Path(tempfile.gettempdir()) / f"fovea-{_digest(str(state_dir.resolve()))[:8]}"


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()


def service_specs(options: UpOptions) -> list[ServiceSpec]:
    """The processes of one embedded Fovea, with ports that stay the same over restarts."""
    environment = _environment(options.models)
    count = sum(4 + 2 * served.sampler_count for served in options.models)
    ports = iter(free_ports(2 + count))  # at once, so that none is given twice
    specs: list[ServiceSpec] = []
    addresses: list[dict[str, Any]] = []
    for number, served in enumerate(options.models):
        of_model = f"{OF_MODEL}{served.label}" if number else ""
        own = list(_model_specs(options, served, of_model, environment, ports))
        found = {
            kind: [spec.address for spec in own if spec.kind == kind] for kind in ("renderer", "sampler", "trainer")
        }
        names = {"model_name": served.name, "model": served.model, "trainer": "".join(found["trainer"])}
        addresses.append({**names, "renderer": found["renderer"], "sampler": found["sampler"]})
        specs += own
    return [*specs, _gateway_spec(options, addresses, environment, ports)]


def _environment(models: Sequence[ServedModel]) -> dict[str, str]:
    environment = {
        "OMP_NUM_THREADS": "1",
        # Idle OpenMP threads must sleep: spinning on busy cores costs several times the processor time.
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        # Kept: the temporary folders of processes, where torch would put it, end with them.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        or f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",
        # Other users of this machine reach 127.0.0.1 too.
        secret.VARIABLE: secret.service_secret() or secrets.token_urlsafe(32),
    }
    if all(pathlib.Path(served.model).is_dir() for served in models):
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


def _model_specs(
    options: UpOptions, served: ServedModel, of_model: str, environment: dict[str, str], ports: Iterator[int]
) -> Iterator[ServiceSpec]:
    """Renderer, samplers and, if it is trained, trainer of one base model."""
    renderer, trainer = (next(ports) for _ in range(2))
    if not of_model:
        environment = environment | _suggested(options)
    model = ("--model", served.model)
    to_renderer = ("--renderer", f"{_LOCAL}{renderer}")
    # Where the gateway, which has the same environment, keeps them.
    told = os.environ | {each.variable: each.value for each in options.settings}
    checkpoints = told.get("FOVEA_GATEWAY_CHECKPOINT_DIR") or str(options.state_dir / "checkpoints")
    recovery = told.get("FOVEA_TRAINER_RECOVERY", str(options.state_dir / "recovery"))
    recovery = f"{recovery}{of_model}" if recovery else ""
    transfer = ("--transfer", served.transfer) if served.transfer else ()
    yield _spec(
        options, f"renderer{of_model}", "fovea_services.renderer", conventions.RENDERER_SERVICE, renderer, next(ports),
        ("--port", str(renderer), *model), environment,
    )  # fmt: skip
    for number, devices in enumerate(served.parts):
        sampler = next(ports)
        split = ("--tensor-parallel", str(len(devices))) if len(devices) > 1 else ()
        yield _spec(
            options, f"sampler{number + 1 if number else ''}{of_model}", "fovea_services.sampler",
            conventions.SAMPLER_SERVICE, sampler, next(ports),
            ("--port", str(sampler), *model, *to_renderer, *transfer, *split), environment | _visible(devices),
            # vLLM measures how much of the device is left for its cache, and takes for its own what another process
            # allocates meanwhile: beside a trainer that was loading it found nothing left, and ended.
            starts_after=_before(served, number, of_model),
        )  # fmt: skip
    if served.is_trained:
        kept = ("--checkpoints", checkpoints, "--recovery", recovery)
        yield _spec(
            options, f"trainer{of_model}", "fovea_services.trainer", conventions.TRAINER_SERVICE, trainer, next(ports),
            ("--port", str(trainer), *model, *to_renderer, "--ranks", str(options.ranks), *kept),
            environment | _visible(served.trainer_gpus),
        )  # fmt: skip


def _before(served: ServedModel, number: int, of_model: str) -> str:
    """The service that must have measured a sampler's device before it does."""
    if number and len(served.sampler_gpus) == 1 and served.sampler_gpus != NO_GPU:
        return f"sampler{number if number > 1 else ''}{of_model}"
    return f"trainer{of_model}" if served.is_trained and served.shares_memory else ""


def _suggested(options: UpOptions) -> dict[str, str]:
    """All suggestions or, if the user has set one of them, none: they are shares of one whole."""
    told = {*os.environ, *(each.variable for each in options.settings)}
    suggested = {each.variable: each.value for each in options.suggestions}
    return suggested if told.isdisjoint(suggested) else {}


def _gateway_spec(
    options: UpOptions, models: list[dict[str, Any]], environment: dict[str, str], ports: Iterator[int]
) -> ServiceSpec:
    own, *further = models
    port = options.grpc_port or next(ports)
    arguments = ["--grpc-port", str(port), "--host", options.host, "--port", str(options.port)]
    arguments += ["--model", options.model, "--model-name", options.model_name, "--trainer", own["trainer"]]
    arguments += ["--renderer", *own["renderer"], "--sampler", _listed(own["sampler"])]
    if further:
        arguments += ["--further-models", json.dumps(further)]
    arguments += ["--state-dir", str(options.state_dir)]
    arguments += ["--api-key-file", str(options.api_key_file)] if options.api_key_file else []
    # Keys go by the environment: everybody on the machine can read arguments.
    keys = {"FOVEA_GATEWAY_API_KEY": json.dumps(options.api_keys)} if options.api_keys else {}
    return _spec(
        options,
        "gateway",
        "fovea_gateway",
        conventions.GATEWAY_SERVICE,
        port,
        next(ports),
        tuple(arguments),
        environment | keys,
    )


def _listed(values: list[str]) -> str:
    """As the settings read a list from one argument."""
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
    part, of_model, label = name.partition(OF_MODEL)
    temporary = str(temporary_dir(options.state_dir) / f"{part}{of_model}{_digest(label)[:4] if label else ''}")
    given = {each.variable: each.value for each in options.settings if each.kind == kind_of(name)}
    return ServiceSpec(
        name, ("-m", module, *common, *arguments), f"{_LOCAL}{port}", service, metrics_port, environment | given,
        temporary, starts_after,
    )  # fmt: skip


def _visible(gpus: tuple[str, ...]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
