"""Checks of `fovea up` before it starts anything. Each problem is reported in one line that names the option."""

import difflib
import errno
import importlib
import importlib.util
import os
import pathlib
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fovea.cli.service import ServiceSpec
from fovea.cli.service_specs import ServedModel, Setting
from fovea.cli.state_folder import StateFolder, running_folders
from fovea.runtime import credentials
from fovea.runtime.hosts import listening
from fovea.runtime.machine_memory import host_free_bytes
from fovea.runtime.model_files import check_directory, language_entries, read_json
from fovea.wire.errors import FoveaError

KINDS = {
    "renderer": "fovea_renderer.settings:RendererSettings",
    "sampler": "fovea_sampler.settings:SamplerSettings",
    "trainer": "fovea_trainer.settings:TrainerSettings",
    "gateway": "fovea_gateway.settings:GatewaySettings",
}
"""Settings class of each kind of service. Imported on demand, because this package must not depend on services."""

_ITS_OWN = {
    "model": "--model",
    "model_name": "--model-name",
    "host": "--host",
    "grpc_port": "--grpc-port",
    "ranks": "--ranks",
    "shared_base": "--shared-base",
    "tensor_parallel": "--sampler-gpus",
    "api_key": "--api-key",
    "api_key_file": "--api-key-file",
    "state_dir": "--state-dir",
    "drain_s": "--drain-s",
    "log_level": "--log-level",
    "further_models": "--also-sample",
}
"""Settings that have an option of `fovea up`. It chooses ports and addresses of services itself."""
_CHOSEN = ("port", "metrics_port", "renderer", "sampler", "trainer", "discovery", "transfer", "nodes", "node_rank")

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_HUB_S = 1.5
_GIB = 2**30
_SIZES = {"float32": 4, "float64": 8}
_TRAINER_BYTES, _SAMPLER_BYTES = int(0.7 * _GIB), int(1.3 * _GIB)
"""Minimum resident memory of a trainer and of a sampler on the CPU, besides the weights.

Measured with a model of 5 MB: one trainer rank used 0.8 GiB and vLLM's engine 1.5 GiB, libraries included.
"""


class StartRefused(Exception):
    """The reason why nothing was started, in one line: the option, the problem and the fix."""

    def __init__(self, flag: str, problem: str) -> None:
        super().__init__(f"{flag}: {' '.join(problem.split())}")


def check_installed() -> None:
    """Raises StartRefused if only the client of Fovea is installed."""
    for module in ("torch", "transformers", "vllm", "uvicorn"):
        if importlib.util.find_spec(module) is None:
            raise StartRefused(
                "fovea up",
                f"the services are not installed ({module} is missing); install fovea-vlm[gpu] or fovea-vlm[cpu], see "
                "'The package' in docs/guides/operations.md",
            )


def check_log_level(level: str) -> None:
    """Raises StartRefused for a level that `logging` does not have."""
    if level not in _LEVELS:
        raise StartRefused("--log-level", f"{level!r} is not a log level; choose from {', '.join(_LEVELS)}")


def check_model(model: str, flag: str) -> int:
    """Checks a checkpoint folder, or asks the Hugging Face Hub about a model that is not on this machine yet.

    Returns:
        The number of parameters; 0 if unknown until the weights are downloaded.

    Raises:
        StartRefused: The model does not exist or cannot be served.
    """
    directory = check_config(model, flag)
    if directory is None:
        return 0
    try:
        return _parameter_count(directory)
    except (ValueError, OSError) as error:
        raise _unusable(model, flag, error) from None


def check_config(model: str, flag: str) -> pathlib.Path | None:
    """Checks the configuration of a checkpoint folder, or asks the hub whether it has the model.

    Returns:
        The folder on this machine; None for a model that must be downloaded first.

    Raises:
        StartRefused: The model does not exist, or its configuration cannot be served.
    """
    directory = pathlib.Path(model).expanduser()
    if not directory.is_dir():
        if model.startswith((".", "/", "~")) or model.count("/") != 1 or not all(model.split("/")):
            raise StartRefused(
                flag,
                f"the folder {model} does not exist; give a checkpoint folder, or a Hugging Face model as OWNER/NAME",
            )
        if (found := _in_cache(model)) is None:
            _check_hub(model, flag)
            return None
        directory = found
    if not (directory / "config.json").is_file():
        raise StartRefused(flag, f"{model} has no config.json; give a checkpoint folder or a Hugging Face model")
    try:
        check_directory(directory)
    except (ValueError, OSError) as error:
        raise _unusable(model, flag, error) from None
    return directory


def _unusable(model: str, flag: str, error: Exception) -> StartRefused:
    hint = (
        "" if "config.json is not" in str(error) else f"; to see which components work, run: fovea models check {model}"
    )
    return StartRefused(flag, f"{_within(model, str(error))}{hint}")


def _within(model: str, problem: str) -> str:
    return problem if model in problem else f"{model}: {problem}"


def _in_cache(model: str) -> pathlib.Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return pathlib.Path(found).parent if isinstance(found, str) else None


def _check_hub(model: str, flag: str) -> None:
    """Requests a model's config.json from the hub. Runs in a thread, because DNS resolution has no timeout."""
    from huggingface_hub import constants, get_token

    if constants.is_offline_mode():
        raise StartRefused(flag, f"{model} is not on this machine and HF_HUB_OFFLINE is set; {_fix(model)}")
    problems = [f"the hub did not answer within {_HUB_S} s, and {model} is not on this machine; {_fix(model)}"]
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{constants.ENDPOINT}/{model}/resolve/main/config.json"

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD", headers=headers)
            with urllib.request.urlopen(request, timeout=_HUB_S):
                problems.clear()
        except urllib.error.HTTPError as error:
            problems[:] = [
                f"the hub refused {model} ({error.code} {error.reason}); check the name, and set HF_TOKEN if the model "
                "is private"
            ]
        except OSError as error:
            reason = getattr(error, "reason", error)
            problems[:] = [f"{model} is not on this machine and the hub cannot be reached ({reason}); {_fix(model)}"]

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_HUB_S)
    if problems:
        raise StartRefused(flag, problems[0])


def _fix(model: str) -> str:
    return f"download it first (hf download {model}), or give a folder"


def _parameter_count(directory: pathlib.Path) -> int:
    """Returns the number of parameters, from the size of the weight files. Raises ValueError if a file is missing."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if missing := next((name for name in names if not (directory / name).is_file()), ""):
            raise ValueError(f"{directory} has no {missing}, which {index.name} lists; download the missing files")
        files: list[pathlib.Path] = [directory / name for name in names]
    else:
        files = [*directory.glob("*.safetensors")] or [*directory.glob("*.bin")]
    if not files:
        raise ValueError(f"{directory} has no weights (*.safetensors)")
    config = read_json(directory / "config.json")
    text = language_entries(config)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "")
    return sum(file.stat().st_size for file in files) // _SIZES.get(dtype, 2)


def check_names(models: Sequence[ServedModel]) -> None:
    """Raises StartRefused if two models have the same label (see `ServedModel.label`)."""
    if len({served.label for served in models}) < len(models):
        raise StartRefused(
            "--also-sample, --also-train", "two base models have the same name; give each a name with NAME=MODEL"
        )


def check_memory(models: Sequence[ServedModel]) -> None:
    """Raises StartRefused if the machine has too little free memory for the services that run on the CPU.

    Counts the weights in float32 plus the minimum memory of the processes.
    """
    trainers = [each for each in models if each.is_trained and not any(each.trainer_gpus) for _ in each.trainer_devices]
    samplers = [each for each in models for devices in each.sampler_devices if not any(devices)]
    copies = [*(each for each in trainers if not each.shared_base), *samplers]
    weight_bytes = 4 * sum(each.parameter_count for each in copies)
    if not (trainers or samplers):
        return
    need_bytes = weight_bytes + _TRAINER_BYTES * len(trainers) + _SAMPLER_BYTES * len(samplers)
    if need_bytes > (free_bytes := host_free_bytes()):
        raise StartRefused(
            "--model",
            f"on the CPU the weights need {weight_bytes / _GIB:,.1f} GiB (float32; {len(trainers)} trainer(s) and "
            f"{len(samplers)} sampler(s)) and the processes {(need_bytes - weight_bytes) / _GIB:,.1f} GiB more at "
            f"least, but only {free_bytes / _GIB:,.1f} GiB are free; end other programs, or use a smaller "
            "model or a GPU",
        )


def check_state_dir(path: pathlib.Path) -> None:
    """Raises StartRefused if the folder is not writable. Leaves no folder that was not there."""
    made = [each for each in (path, *path.parents) if not each.exists()]
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"fovea")
    except OSError as error:
        raise StartRefused(
            "--state-dir",
            f"cannot write to {path} ({error.strerror}); choose a folder that you can write to, with free space",
        ) from None
    finally:
        for each in made:
            with suppress(OSError):  # never made, or another process has put a file there
                each.rmdir()


def check_alone(state_dir: pathlib.Path) -> None:
    """Raises StartRefused if another `fovea up` runs in the folder."""
    try:
        folder = StateFolder(state_dir)
        if (pid := folder.holder()) is not None:
            raise StartRefused(
                "--state-dir",
                f"another `fovea up` runs in {state_dir} (process {pid}); stop it with fovea down, or start this one "
                "with its own folder and ports (--port, --grpc-port)",
            )
    except OSError as error:
        raise StartRefused("--state-dir", f"cannot use {state_dir}: {error}") from None


def check_ports(host: str, ports: dict[str, int]) -> None:
    """Raises StartRefused if two ports are the same, and for the first port on which nothing can listen.

    Args:
        host: Address to listen on.
        ports: Port of each option; 0 means any free port and is not checked.
    """
    numbers = [port for port in ports.values() if port]
    if len(set(numbers)) < len(numbers):
        raise StartRefused(
            next(reversed(ports)), f"{' and '.join(ports)} are both {numbers[0]}; choose different ports"
        )
    for flag, port in ports.items():
        if not 0 <= port <= 65535:
            raise StartRefused(flag, f"{port} is not a valid port; use 1 to 65535, or 0 for a free port")
        try:
            listening(host, port).close()
        except PermissionError:
            raise StartRefused(flag, f"port {port} needs more permissions than you have; use one above 1023") from None
        except OSError as error:
            if port and error.errno == errno.EADDRINUSE:
                raise StartRefused(
                    flag,
                    f"port {port} is in use by {_user_of(port)}, or choose another port (0 picks a free one)",
                ) from None
            raise StartRefused("--host", f"{host} is not an address of this machine ({error.strerror})") from None


def _user_of(port: int) -> str:
    """Returns the user of a port, and how to stop it."""
    for folder in running_folders():
        if StateFolder(folder).url.endswith(f":{port}"):
            return f"the Fovea in {folder}; use that one, stop it with fovea down --state-dir {folder}"
    return "another program; stop it"


def check_certificates(folder: pathlib.Path | None) -> None:
    """Raises StartRefused if the folder has no valid certificates."""
    if folder is None:
        return
    with _environment({credentials.TLS_VARIABLE: str(folder)}):
        try:
            credentials.certificates()
        except (ValueError, FoveaError) as error:
            raise StartRefused("--tls-dir", f"{str(error).removeprefix(f'{credentials.TLS_VARIABLE}: ')}") from None


def read_setting(text: str) -> Setting:
    """Parses KIND.NAME=VALUE of `--set`. Raises StartRefused; for an unknown name it suggests the nearest one."""
    place, equals, value = text.partition("=")
    kind, dot, name = place.partition(".")
    name = name.replace("-", "_")
    if not (equals and dot):
        raise StartRefused("--set", f"{text!r} does not have the form SERVICE.NAME=VALUE, such as sampler.max_loras=16")
    if kind not in KINDS:
        raise StartRefused("--set", f"unknown service {kind!r}; {_nearest(kind, KINDS)}")
    known = settings_class(kind).model_fields
    if name not in known:
        raise StartRefused(
            "--set",
            f"the {kind} has no setting {name!r}; {_nearest(name, known)} "
            f"To list all settings: python -m {_module(kind)} --help",
        )
    if flag := _ITS_OWN.get(name):
        raise StartRefused("--set", f"set {kind}.{name} with {flag} instead")
    if name in _CHOSEN:
        raise StartRefused("--set", f"`fovea up` chooses {kind}.{name} itself; omit it")
    return Setting(kind, name, value)


def _nearest(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"did you mean {found[0]!r}?"


def settings_class(kind: str) -> Any:
    """Imports and returns the settings class of a kind of service."""
    module, _, name = KINDS[kind].partition(":")
    return getattr(importlib.import_module(module), name)


def _module(kind: str) -> str:
    return KINDS[kind].partition(".settings")[0]


def check_specs(specs: Sequence[ServiceSpec], settings: Sequence[Setting]) -> None:
    """Parses each service's settings as the service will at its start. Raises StartRefused for the first problem."""
    for spec in specs:
        with _environment(spec.environment):
            if problem := settings_class(spec.kind).find_problem(list(spec.arguments[2:])):
                name, message = problem
                raise StartRefused(_flag(spec.kind, name, settings), message)


def check_database(specs: Sequence[ServiceSpec], settings: Sequence[Setting]) -> None:
    """Connects once to the gateway's PostgreSQL, if it has one. Raises StartRefused if that fails."""
    check = importlib.import_module("fovea_gateway.database.sql_engine").check_connection
    gateway = next(spec for spec in specs if spec.kind == "gateway")
    with _environment(gateway.environment):
        try:
            check(settings_class("gateway").from_command_line("gateway", list(gateway.arguments[2:])).database_url)
        except FoveaError as error:
            raise StartRefused(_flag("gateway", "database_url", settings), error.message) from None


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _flag(kind: str, name: str, settings: Sequence[Setting]) -> str:
    """Returns the option or variable that a message about a setting should name: the one that the user gave."""
    if not name:  # a problem with several settings, which the message names
        return kind
    if any((each.kind, each.name) == (kind, name) for each in settings):
        return f"--set {kind}.{name}"
    if flag := _ITS_OWN.get(name):
        return flag
    variable = Setting(kind, name, "").variable
    return variable if variable in os.environ else f"{kind}.{name}"
