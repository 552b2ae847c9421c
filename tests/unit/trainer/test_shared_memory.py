"""A base model that one process owns and another maps."""

import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

import fovea_tinyvlm
from fovea_trainer.model.packed_model import build_model
from fovea_trainer.model.weight_reading import read_weights
from fovea_trainer.settings import TrainerSettings
from fovea_weights import shared_memory
from fovea_weights.shared_memory import MappedBase, OwnedBase
from tests.families import ensure_family
from tests.waiting import eventually

CPU = torch.device("cpu")
WEIGHTS = torch.arange(6.0)
SAMPLER = """
import logging, resource, sys, torch
from fovea_weights.shared_memory import OwnedBase

logging.basicConfig(stream=sys.stdout, format="%(message)s")
base = OwnedBase(torch.device("cpu"))
(weights,) = base.move([torch.arange(6.0)])
base.publish(sys.argv[1], {"weights": weights})
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print("ready", flush=True)
for line in sys.stdin:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(line) or soft, hard))
    print("set", flush=True)
"""


class Sampler:
    """A process that owns a base. Its limit of open files can be set."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def limit_files(self, count: int) -> None:
        """Sets the limit; 0 sets the former one."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        self.wait_for("set")

    def wait_for(self, words: str) -> None:
        assert self._process.stdout is not None
        assert any(words in line for line in iter(self._process.stdout.readline, ""))


@contextmanager
def owning(path: Path) -> Iterator[Sampler]:
    command = [sys.executable, "-c", SAMPLER, str(path)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            sampler = Sampler(process)
            sampler.wait_for("ready")
            yield sampler
        finally:
            process.kill()


@contextmanager
def mapped(path: Path) -> Iterator[MappedBase]:
    base = MappedBase(str(path), CPU)
    with closing(base._connection):
        yield base


@pytest.fixture
def owned() -> Iterator[OwnedBase]:
    base = OwnedBase(CPU)
    yield base
    os.close(base._file)


def test_another_file_at_the_path_stays(owned: OwnedBase, tmp_path: Path) -> None:
    path = tmp_path / "base"
    path.write_text("a user's notes")
    with pytest.raises(ValueError, match=f"^{path} exists and is not a socket"):
        owned.publish(str(path), {})
    assert path.read_text() == "a user's notes"


@pytest.mark.slow
def test_a_second_sampler_at_the_path_is_refused_and_the_next_one_replaces_the_socket(
    owned: OwnedBase, tmp_path: Path
) -> None:
    path = tmp_path / "base"
    with owning(path):
        with pytest.raises(ValueError, match=f"another process listens at {path}"):
            owned.publish(str(path), {})
        with mapped(path) as base:
            assert torch.equal(base.tensors["weights"], WEIGHTS)
    assert path.is_socket(), "a killed sampler leaves its socket"
    with owning(path), mapped(path) as base:
        assert torch.equal(base.tensors["weights"], WEIGHTS)


def test_a_sampler_that_ends_before_it_answers_is_named(tmp_path: Path) -> None:
    path = tmp_path / "base"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        ends = threading.Thread(target=lambda: listener.accept()[0].close())
        ends.start()
        with pytest.raises(ConnectionError, match=f"^the sampler at {path} ended, or runs as another user$"):
            MappedBase(str(path), CPU)
        ends.join()


@pytest.mark.slow
async def test_a_second_trainer_says_that_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_memory, "_PATIENCE_S", 0.01)
    path, found = tmp_path / "base", []

    def use() -> None:
        with mapped(path) as base:
            found.append(base.tensors["weights"].tolist())

    with owning(path), caplog.at_level(logging.INFO, shared_memory.__name__):
        second = threading.Thread(target=use)
        with mapped(path):
            caplog.clear()
            second.start()
            await eventually(lambda: "another trainer uses this base; waiting until it ends" in caplog.text)
            assert not found
        second.join()
    assert found == [WEIGHTS.tolist()]


@pytest.mark.slow
def test_a_sampler_without_free_files_says_so_and_serves_later(tmp_path: Path) -> None:
    path = tmp_path / "base"
    with owning(path) as sampler:
        with mapped(path):
            sampler.limit_files(3)
        sampler.wait_for("no trainer can reach the shared base now: [Errno 24]")
        sampler.limit_files(0)
        with mapped(path) as base:
            assert torch.equal(base.tensors["weights"], WEIGHTS)


@pytest.mark.slow
def test_a_base_that_lacks_the_models_weights_is_refused_with_its_own_reason(tmp_path: Path) -> None:
    model = fovea_tinyvlm.ensure("qwen3")
    _, _, module = build_model(TrainerSettings(model=str(model), device="cpu"), model, CPU)
    count = len(list(module.hf.parameters()))
    words = f"the trainer would hold {count} of {count} parameters itself, because the sampler lacks them or stores "
    words += "them otherwise; the largest is "
    with (
        owning(tmp_path / "base"),
        mapped(tmp_path / "base") as base,
        pytest.raises(ValueError, match=f"^{re.escape(words)}"),
    ):
        read_weights(module.hf, model, CPU, base)


@pytest.mark.slow
def test_experts_of_one_layer_are_not_compared_with_those_of_another(owned: OwnedBase, tmp_path: Path) -> None:
    """The sampler lacks layer 0, which has experts of the same shape as layer 1."""
    model, path = ensure_family("qwen3_vl_moe"), tmp_path / "base"
    settings = TrainerSettings(model=str(model), device="cpu")
    own, shared = (build_model(settings, model, CPU)[2].hf for _ in range(2))
    read_weights(own, model, CPU)
    prefix = "model.language_model.layers.1.mlp.experts."
    experts = {name: one.data for name, one in own.named_parameters() if name.startswith(prefix)}
    owned.publish(str(path), dict(zip(experts, owned.move([*experts.values()]), strict=True)))
    count = len(list(own.parameters()))
    with mapped(path) as base:
        with pytest.raises(ValueError, match=f"^the trainer would hold {count - 2} of {count} parameters itself"):
            read_weights(shared, model, CPU, base)
        assert [name for name, one in shared.named_parameters() if base.holds(one)] == [*experts]
