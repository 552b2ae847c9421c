"""`fovea up` with invalid options fails at once: one line names the flag, before any service starts."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from fovea.cli.state_folder import StateFolder
from fovea.runtime.hosts import free_ports
from fovea_tinyvlm.cache import fingerprint, locked
from fovea_tinyvlm.recipe import default_recipe

pytestmark = pytest.mark.slow  # one process per case

QWEN = {"model_type": "qwen3", "dtype": "bfloat16"}


class Place:
    """The surroundings of one `fovea up`.

    Attributes:
        folder: Folder of its model, state and keys.
        environment: Variables added to those of the process.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.environment: dict[str, str] = {}
        self.held: list[socket.socket | StateFolder] = []

    def model(self, config: str | dict[str, object] = QWEN, weight_bytes: int = 100) -> str:
        """Returns a checkpoint's folder, with weights that use no disk space."""
        folder = self.folder / "model"
        folder.mkdir()
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        if weight_bytes:
            with (folder / "model.safetensors").open("wb") as file:
                file.truncate(weight_bytes)
        return str(folder)

    def file(self, name: str, text: str = "") -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def port(self) -> str:
        """A port that is in use."""
        taken = socket.create_server(("127.0.0.1", free_ports(1)[0]))
        self.held.append(taken)
        return str(taken.getsockname()[1])

    def port_of_fovea(self) -> str:
        port, other = self.port(), StateFolder(self.folder / "other")
        other.hold(f"http://127.0.0.1:{port}")
        self.held.append(other)
        return port

    def taken_state(self) -> str:
        held = StateFolder(self.folder)
        held.hold("http://127.0.0.1:1")
        self.held.append(held)
        return str(self.folder)

    def gpus(self, *free_mib: int) -> None:
        """A driver that reports cards of 80 GiB."""
        lines = [f"{index}, GPU-{index}, 81920, {free}" for index, free in enumerate(free_mib)]
        program = self.folder / "bin" / "nvidia-smi"
        program.parent.mkdir()
        program.write_text("#!/bin/sh\ncat <<END\n" + "\n".join(lines) + "\nEND\n")
        program.chmod(0o755)
        self.environment["PATH"] = f"{program.parent}:{os.environ['PATH']}"

    def no_hub(self) -> str:
        self.environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{free_ports(1)[0]}", "HF_HOME": str(self.folder)}
        return "org/model-that-is-not-here"

    def close(self) -> None:
        for each in self.held:
            each.close() if isinstance(each, socket.socket) else each.release()


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


Arguments = Callable[[Place], list[str]]


def over_memory(place: Place) -> list[str]:
    place.gpus(80_000)
    return ["--model", place.model(weight_bytes=90 << 30), "--samplers", "0"]


def filled_card(place: Place) -> list[str]:
    place.gpus(80_000, 30_000)
    return ["--model", place.model(), "--trainer-gpus", "0", "--sampler-gpus", "1"]


def too_many_ranks(place: Place) -> list[str]:
    place.gpus(80_000, 80_000)
    return ["--model", place.model(), "--trainer-gpus", "0", "--sampler-gpus", "1", "--ranks", "2"]


WAYS: dict[str, tuple[Arguments, str, str]] = {
    "no such folder": (lambda place: ["--model", "/nowhere"], "--model", "the folder /nowhere does not exist"),
    "no config": (lambda place: ["--model", str(place.folder)], "--model", "has no config.json"),
    "junk config": (lambda place: ["--model", place.model("{junk")], "--model", "config.json is not JSON"),
    "other kind of model": (
        lambda place: ["--model", place.model({"model_type": "kosmos-9"})],
        "--model",
        "model_type 'kosmos-9' is not supported",
    ),
    "no weights": (lambda place: ["--model", place.model(weight_bytes=0)], "--model", "has no weights (*.safetensors)"),
    "hub without network": (lambda place: ["--model", place.no_hub()], "--model", "the hub cannot be reached"),
    "more weights than memory": (
        lambda place: ["--model", place.model(weight_bytes=4 << 40)],
        "--model",
        "GiB are free; end other programs, or use a smaller model",
    ),
    "more weights than a card": (over_memory, "--model", "the weights need 90.0 GiB, but the trainer's 1 GPU"),
    "a card that another program fills": (filled_card, "--sampler-gpus", "GPU 1 has 29.3 GiB free of 80.0 GiB"),
    "REST port": (lambda place: ["--port", place.port()], "--port", "is in use by another program"),
    "gRPC port": (lambda place: ["--port", "0", "--grpc-port", place.port()], "--grpc-port", "is in use by another"),
    "one port twice": (lambda place: ["--port", "9000", "--grpc-port", "9000"], "--grpc-port", "are both 9000"),
    "strange address": (lambda place: ["--host", "203.0.113.7"], "--host", "is not an address of this machine"),
    "state folder is a file": (
        lambda place: ["--state-dir", place.file("state")],
        "--state-dir",
        "cannot write to",
    ),
    "state folder is taken": (
        lambda place: ["--state-dir", place.taken_state()],
        "--state-dir",
        "another `fovea up` runs in",
    ),
    "GPU that is not there": (lambda place: ["--trainer-gpus", "7"], "--trainer-gpus", "GPU 7 does not exist"),
    "more ranks than GPUs": (too_many_ranks, "--ranks", "2 ranks need 2 GPUs, but the trainer has 1"),
    "key": (lambda place: ["--api-key", "secret"], "--api-key", "a key of 6 characters is not tml-"),
    "file of keys": (lambda place: ["--api-key-file", "/nowhere"], "--api-key-file", "/nowhere cannot be read"),
    "key in a file": (lambda place: ["--api-key-file", place.file("k", "secret")], "--api-key-file", "is not tml-"),
    "certificates": (lambda place: ["--tls-dir", str(place.folder)], "--tls-dir", "the folder must contain ca.crt"),
    "unknown setting": (lambda place: ["--set", "sampler.max_lora=1"], "--set", "did you mean 'max_loras'?"),
    "wrong value": (lambda place: ["--set", "sampler.max_loras=many"], "--set sampler.max_loras", "valid integer"),
    "no PostgreSQL": (
        lambda place: ["--set", f"gateway.database_url=postgresql://fovea@127.0.0.1:{free_ports(1)[0]}/fovea"],
        "--set gateway.database_url",
        "cannot be reached",
    ),
    "no database": (
        lambda place: ["--set", "gateway.database_url=mysql://127.0.0.1/fovea"],
        "--set gateway.database_url",
        "database_url begins with 'mysql'",
    ),
    "another option's setting": (lambda place: ["--set", "trainer.ranks=3"], "--set", "set trainer.ranks with --ranks"),
    "a shared base on two ranks": (
        lambda place: ["--gpus", "none", "--shared-base", "--ranks", "2"],
        "--shared-base",
        "one trainer rank and one sampler must share one device; set --ranks 1",
    ),
    "a shared base without a sampler": (
        lambda place: ["--gpus", "none", "--shared-base", "--samplers", "0"],
        "--shared-base",
        "must share one device",
    ),
    "a shared base by a setting": (
        lambda place: ["--set", "trainer.shared_base=/tmp/base"],
        "--set",
        "set trainer.shared_base with --shared-base",
    ),
    "level": (lambda place: ["--log-level", "LOUD"], "--log-level", "'LOUD' is not a log level"),
    "port of another fovea": (lambda place: ["--port", place.port_of_fovea()], "--port", "is in use by the Fovea in"),
    "unknown option": (lambda place: ["--modle", "x"], "--modle", "No such option"),
    "no number": (lambda place: ["--port", "http"], "--port", "valid integer"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_start_that_cannot_work_is_refused_in_one_line(way: str, place: Place) -> None:
    make, flag, words = WAYS[way]
    arguments = make(place)
    defaults = {"--port": "0", "--grpc-port": "0", "--state-dir": str(place.folder / "state")}
    given = [part for name, value in defaults.items() if name not in arguments for part in (name, value)]
    command = [str(pathlib.Path(sys.executable).with_name("fovea")), "up", *arguments, *given]
    before, begun = os.times(), time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | place.environment, check=False)
    after, seconds = os.times(), time.monotonic() - begun
    used = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"{way}: {seconds:.2f} s, {used:.2f} s of a processor: {result.stderr}", end="")
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert flag in line
    assert words in line
    assert not (place.folder / "state").is_dir()  # commands in this folder would look for a Fovea there


def test_a_start_holds_its_folder_while_the_tiny_model_is_built(tmp_path: pathlib.Path) -> None:
    recipe, cache, state = default_recipe("qwen3_vl", 0), tmp_path / "cache", tmp_path / "state"
    cache.mkdir()
    fovea = str(pathlib.Path(sys.executable).with_name("fovea"))
    command = [fovea, "up", "--state-dir", str(state), "--port", "0", "--grpc-port", "0"]
    environment = os.environ | {"FOVEA_CACHE": str(cache)}
    with locked(
        cache / f"tiny-{recipe.kind}-{fingerprint(recipe)}.lock"
    ):  # as if another process were building the model
        first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            while StateFolder(state).holder() is None:
                assert first.poll() is None
                time.sleep(0.1)
            second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            logs = [fovea, "logs", "--state-dir", str(state)]
            read = subprocess.run(logs, capture_output=True, text=True, check=False)
        finally:
            os.killpg(first.pid, signal.SIGKILL)
            first.wait()
    assert second.returncode == 2
    assert f"another `fovea up` runs in {state} (process {first.pid})" in second.stderr
    assert "has no log; its services have not begun" in read.stderr
