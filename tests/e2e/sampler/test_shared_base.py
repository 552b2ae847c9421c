"""A trainer that uses the weights of a real sampler computes the same bits as with a copy of its own."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException

from fovea.api.v1 import model_input_pb2
from fovea.runtime.hosts import free_ports
from fovea.wire import tensors
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.optimizer import Adam
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.training_engine import TrainingEngine
from tests import ranks
from tests.e2e.trainer.examples import datum, text
from tests.e2e.trainer.rank_engine import Call, run_ranks
from tests.families import ensure_family

ADAM = Adam(1e-2, 0.9, 0.999, 1e-8, 0.0, 0.0)


@contextmanager
def sharing_sampler(model: Path, folder: Path) -> Iterator[Path]:
    """Yields the socket of a sampler that has loaded its weights, and waits for a trainer until the end of the test."""
    socket, ports = folder / "base", free_ports(2)
    command = [sys.executable, "-m", "fovea_sampler", "--model", str(model), "--port", str(ports[0])]
    command += ["--metrics-port", str(ports[1]), "--shared-base", str(socket), "--max-context", "256"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + 180
            while not socket.exists():
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.1)
            yield socket
        finally:
            process.kill()


def datums() -> list[bytes]:
    """Returns texts of two lengths, with random targets and weights."""
    found = []
    for length in (17, 42):
        tokens, targets = ([token % 1000 for token in text(length, seed)] for seed in (length, length + 1))
        rendered = model_input_pb2.RenderedInput(tokens=tensors.encode_tokens(tokens))
        found.append(datum(rendered, length, target_tokens=np.asarray(targets, np.int64)).SerializeToString())
    return found


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_equal(found[name], value, f"{where}.{name}")
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe"])
def test_losses_gradients_and_weights_are_the_same_bits(family: str, tmp_path: Path) -> None:
    model = ensure_family(family)
    call = Call(LoraSettings(4, 8.0, 1, True, True, True, False), datums(), 3, ADAM)
    own = run_ranks(model, {}, [call], 1, tmp_path / "own")
    (tmp_path / "sampler").mkdir()
    with sharing_sampler(model, tmp_path / "sampler") as socket:
        shared = run_ranks(model, {"shared_base": str(socket), "ranks": 1}, [call], 1, tmp_path / "shared")
        ranks.run_ranks(look, 1, model, socket, tmp_path)
    assert_equal(shared[0], own[0])
    assert (tmp_path / "own_bytes").read_text() == "0", "every parameter must lie in the sampler's memory"


def look(rank: int, model: Path, socket: Path, folder: Path) -> None:
    """Writes how many bytes of its base a trainer holds for itself."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "alone"), 1), rank=rank, world_size=1)
    settings = TrainerSettings(model=str(model), device="cpu", shared_base=str(socket), ranks=1)
    engine = TrainingEngine(settings, model, ControlGroup(), torch.device("cpu"), None)
    assert engine.base is not None
    parameters = list(engine._sharded.module.parameters())
    own = sum(one.nbytes for one in parameters if not engine.base.holds(one))
    assert len(parameters) > 10
    assert not any(one.is_meta for one in parameters)
    (folder / "own_bytes").write_text(str(own))
    dist.destroy_process_group()


def test_a_write_to_the_base_ends_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "sampler").mkdir()
    with sharing_sampler(ensure_family("qwen3_vl"), tmp_path / "sampler") as socket:
        program = "from fovea_weights.shared_memory import MappedBase; import sys, torch\n"
        program += "next(iter(MappedBase(sys.argv[1], torch.device('cpu')).tensors.values())).zero_()"
        ended = subprocess.run([sys.executable, "-c", program, str(socket)], env=os.environ, check=False)
    assert ended.returncode < 0


@pytest.mark.parametrize(
    ("family", "ending", "said"),
    [
        ("qwen3", "layers.0.self_attn.v_proj.weight", "layers.0.self_attn.v_proj.weight"),
        ("qwen3_moe", "layers.1.mlp.experts.3.up_proj.weight", "layers.1.mlp.experts.gate_up_proj"),
        ("qwen3_vl_moe", "layers.1.mlp.experts.down_proj", "layers.1.mlp.experts.down_proj"),
    ],
)
def test_a_sampler_of_other_weights_is_refused(family: str, ending: str, said: str, tmp_path: Path) -> None:
    model, changed = ensure_family(family), tmp_path / "changed"
    shutil.copytree(model, changed)
    weights = load_file(changed / "model.safetensors")
    name = next(name for name in weights if name.endswith(ending))
    weights[name].flatten()[-1:].add_(1)
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    (tmp_path / "sampler").mkdir()
    with (
        sharing_sampler(model, tmp_path / "sampler") as socket,
        pytest.raises(ProcessRaisedException, match=f"the sampler's .*{said} differs from the checkpoint's"),
    ):
        ranks.run_ranks(look, 1, changed, socket, tmp_path)
