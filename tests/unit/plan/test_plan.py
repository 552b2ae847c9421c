"""`fovea plan` reports what fits, reads no weights, and refuses with the message of the service that would refuse."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import fovea_tinyvlm
from benchmarks import family_shapes
from fovea.wire.errors import ResourceExhausted
from fovea_plan.__main__ import main
from fovea_plan.sampler_plan import cache_bytes_per_token, plan_sampler
from fovea_plan.trainer_plan import TrainerPlan
from fovea_sampler.engine.vllm_launch import capacity_for
from fovea_sampler.settings import SamplerSettings
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.settings import TrainerSettings
from tests import families

GIB = 2**30
LORA = LoraSettings(32, 32.0, 0, True, True, True, False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights."""
    found = tmp_path_factory.mktemp("small")
    for path in fovea_tinyvlm.ensure("qwen3_vl").iterdir():
        if path.is_file() and "safetensors" not in path.name:
            (found / path.name).write_bytes(path.read_bytes())
    return found


def plan(monkeypatch: pytest.MonkeyPatch, directory: Path, *words: str) -> int:
    """Runs the program in this process; returns the exit status."""
    monkeypatch.setattr(sys, "argv", ["fovea_plan", "--model", str(directory), *words])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.slow
def test_it_says_what_fits(directory: Path) -> None:
    command = [sys.executable, "-m", "fovea_plan", "--model", str(directory), "--gpus", "8x80", "--json"]
    ended = subprocess.run([*command, "--set", "trainer.replicas=2"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["layout"] == "trainer on GPU 0,1,2,3, 4 samplers on GPU 4,5,6,7"
    assert (said["trainer"]["ranks"], said["trainer"]["replicas"], said["samplers"]) == (4, 2, 4)
    assert said["trainer"]["adapter"]["tokens"] == 16384
    assert said["trainer"]["full"]["peak_bytes"] < 80 * GIB
    assert said["sampler"]["push_bytes"] > 0


def test_a_shared_card_is_divided(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, directory, "--gpus", "1x80") == 0
    said = capsys.readouterr().out
    assert (
        "trainer and 1 sampler share GPU 0: 44.2 GiB and 29.4 GiB of 80.0 GiB\ntrainer, each of 1 ranks: base" in said
    )
    assert "KV cache up to" in said


def test_a_shared_base_is_counted_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for more in ([], ["--shared-base"]):
        assert plan(monkeypatch, directory, "--gpus", "1x80", "--json", *more) == 0
        found.append(json.loads(capsys.readouterr().out))
    own, shared = found
    assert own["trainer"]["base_bytes"] > 0
    assert shared["trainer"]["base_bytes"] == 0
    assert shared["sampler"]["weights_bytes"] == own["sampler"]["weights_bytes"]
    assert shared["trainer"]["adapter"]["peak_bytes"] < own["trainer"]["adapter"]["peak_bytes"]
    assert (own["sampler"]["push_bytes"] > 0, shared["sampler"]["push_bytes"]) == (True, 0)
    assert "without --shared-base" in shared["trainer"]["full"]


def test_a_cache_for_less_than_one_context_is_reported(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM refuses to start with such a cache."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 65536
    (tmp_path / "config.json").write_text(json.dumps(config))
    small = ["--gpus", "2x80", "--set", "sampler.kv_cache_mib=16"]
    assert plan(monkeypatch, tmp_path, *small, "--json") == 0
    tokens = json.loads(capsys.readouterr().out)["sampler"]["cache_tokens"]
    assert plan(monkeypatch, tmp_path, *small) == 0
    advice = f"one context of 65,536 tokens: set sampler.max_context below {tokens:,}"
    assert advice in capsys.readouterr().out.splitlines()[-1]
    assert plan(monkeypatch, tmp_path, *small, "--set", f"sampler.max_context={tokens - 1}") == 0
    assert "max_context" not in capsys.readouterr().out


def test_the_cache_of_latent_attention_has_one_vector_for_all_heads() -> None:
    config = AutoConfig.from_pretrained(families.ensure_family("deepseek_v3"))
    wide = config.kv_lora_rank + config.qk_rope_head_dim
    assert cache_bytes_per_token(config, 2, 4) == 2 * wide * config.num_hidden_layers


@pytest.mark.slow
def test_one_copy_of_a_large_mixture_of_experts_fits_on_one_h200(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family_shapes.build("qwen3_vl-30b-a3b", tmp_path, "cpu", without_bytes=True, seed=0)
    assert plan(monkeypatch, tmp_path, "--gpus", "1x139", "--json", "--shared-base") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["trainer"]["adapter"]["tokens"] >= 4096
    assert said["sampler"]["cache_tokens"] > 2 * said["context"]
    assert plan(monkeypatch, tmp_path, "--gpus", "1x139") == 1
    assert "an adapter of rank 32 needs" in capsys.readouterr().out
    assert plan(monkeypatch, tmp_path, "--gpus", "1x96", "--shared-base") == 1
    assert "leave no room for a KV cache beside 59,262 MiB of weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--gpus 8", 2, "--gpus: '8' is not COUNTxGIB, such as 8x80"),
        ("--gpus 2x80 --shared-base", 2, "--shared-base: one trainer rank and one sampler share one GPU"),
        ("--gpus 1x80 --shared-base --full", 1, "this trainer uses the sampler's base, which nothing may change"),
        ("--gpus 2x80 --adapter-rank 65", 1, "lora.rank 65 is not in 1 .. 64"),
        ("--gpus 4x80 --samplers 0 --set trainer.replicas=3", 1, "--replicas is 3, which does not divide the 4 ranks"),
        ("--gpus 4x80 --set trainer.expert_parallel=2", 1, "--expert-parallel is 2, but the model has no experts"),
        ("--gpus 2x80 --ranks 3", 2, "--ranks: 1 sampler(s) on 1 GPU and a trainer on 3 do not fit on 2 GPUs"),
        ("--gpus 2x80 --set trainer.memory_limit_mib=0x", 2, "trainer.memory_limit_mib: "),
        ("--gpus 2x80 --set trainer.memory_limit_mib=36 --full", 1, "training all parameters needs "),
    ],
)
def test_a_refusal_names_the_field(
    directory: Path,
    words: str,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = plan(monkeypatch, directory, *words.split())
    assert said in "".join(capsys.readouterr())
    assert found == status


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "--model: {} has no config.json; give a checkpoint folder"),
        ("none", "--model: the folder {} does not exist"),
    ],
)
def test_a_folder_without_a_checkpoint_is_said_to_be_one(
    tmp_path: Path, name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, tmp_path / name, "--gpus", "1x80") == 2
    assert said.format(tmp_path / name) in capsys.readouterr().err


def test_what_does_not_fit_is_refused_as_the_trainer_refuses_it(directory: Path) -> None:
    small = TrainerPlan(TrainerSettings(model=str(directory), ranks=1), directory, GIB + (36 << 20))
    with pytest.raises(ResourceExhausted, match=r"training all parameters needs .* MiB on each of the trainer's"):
        small.full()
    adapter = small.adapter(LORA)
    longest = adapter.datums[1]
    small.check_datum(adapter, longest)
    with pytest.raises(ResourceExhausted, match=f"a datum of {10 * longest} tokens needs .* but only .* are free"):
        small.check_datum(adapter, 10 * longest)


def test_more_ranks_hold_less(directory: Path) -> None:
    one, four, replicated = (
        TrainerPlan(TrainerSettings(model=str(directory), keep_gathered="never", **given), directory, 80 * GIB)
        for given in ({"ranks": 1}, {"ranks": 4}, {"ranks": 4, "replicas": 2})
    )
    assert one.base_bytes / 4 <= four.base_bytes < one.base_bytes / 3.9
    assert one.base_bytes / 2 <= replicated.base_bytes < one.base_bytes / 1.95
    assert (one.gathered_bytes, four.group_sizes) == (0, [2, 4])
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("size", [1, 2])
def test_the_cache_has_vllms_own_pages(directory: Path, size: int) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = TrainerPlan(TrainerSettings(model=str(directory), ranks=1), directory, 80 * GIB).config
    text = config.get_text_config()
    heads = text.num_key_value_heads // size
    spec: Any = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=text.head_dim, dtype=torch.bfloat16)
    assert cache_bytes_per_token(config, 2, size) == text.num_hidden_layers * spec.page_size_bytes // 16


def test_a_samplers_parts_fill_its_share(directory: Path) -> None:
    trainer = TrainerPlan(TrainerSettings(model=str(directory), ranks=1), directory, 80 * GIB)
    settings = SamplerSettings(model=str(directory))
    found = plan_sampler(settings, trainer.files, trainer.config, 80 * GIB)
    parts = found.weights_bytes + found.slots_bytes + found.push_bytes + found.cache_bytes
    assert parts == int(0.9 * 80 * GIB)
    assert found.capacity == capacity_for(settings, trainer.files, 2, int(0.15 * 80 * GIB), 2**62)
    never = settings.model_copy(update={"full_push_room": "never"})
    assert plan_sampler(never, trainer.files, trainer.config, 80 * GIB).push_bytes == 0
    always = settings.model_copy(update={"full_push_room": "always", "gpu_memory_fraction": 0.02})
    with pytest.raises(ValueError, match="--full-push-room always needs"):
        plan_sampler(always, trainer.files, trainer.config, 80 * GIB)
