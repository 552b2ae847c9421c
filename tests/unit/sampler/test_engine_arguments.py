"""vLLM engine arguments that a sampler accepts, and its errors for the others."""

import dataclasses
from pathlib import Path

import pytest

import fovea_tinyvlm
from benchmarks import random_checkpoint
from fovea_sampler.engine import vllm_launch
from fovea_sampler.engine.engine_arguments import (
    REFUSED,
    SETTING_OF,
    check_expert_parallel,
    checked,
    quick_compilation,
    start_steps,
)
from fovea_sampler.engine.vllm_launch import AdapterCapacity
from fovea_sampler.settings import SamplerSettings

MADE = ("seed", "logprobs_mode")


def test_arguments_come_in_vllms_types() -> None:
    from vllm.config import CompilationConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    given = {
        "gdn_prefill_backend": "triton",
        "watermark": "0.25",
        "cpu_offload_params": ["mlp"],
        "attention_backend": "TRITON_ATTN",
        "compilation_config": {"cudagraph_capture_sizes": [1, 2]},
    }
    found = checked(given, MADE)
    assert list(found) == list(given)
    assert (found["gdn_prefill_backend"], found["watermark"]) == ("triton", 0.25)
    assert found["cpu_offload_params"] == {"mlp"}
    assert found["attention_backend"] is AttentionBackendEnum.TRITON_ATTN
    assert isinstance(found["compilation_config"], CompilationConfig)
    assert found["compilation_config"].cudagraph_capture_sizes == [1, 2]


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (3, [1, 2, 3]), (20, [1, 2, 4, 8, 16, 20])])
def test_a_fast_start_compiles_nothing_and_captures_only_what_decodes(most: int, sizes: list[int]) -> None:
    from vllm.config import CompilationConfig
    from vllm.config.compilation import CUDAGraphMode

    quick = CompilationConfig(**quick_compilation(most))
    assert (quick.mode, quick.cudagraph_mode) == (0, CUDAGraphMode.FULL_DECODE_ONLY)
    assert quick.cudagraph_capture_sizes == sizes


def test_the_log_names_the_steps_of_the_start() -> None:
    from vllm.config import CompilationConfig, VllmConfig

    quick = VllmConfig(compilation_config=CompilationConfig(mode=0))
    quick.compilation_config.cudagraph_capture_sizes = [1, 2, 4]
    assert start_steps(quick) == "loads the weights, captures CUDA graphs of 3 batch sizes, the largest 4"
    quick.compilation_config.cudagraph_capture_sizes = []
    quick.compilation_config.mode = 3
    assert start_steps(quick).startswith("loads the weights, compiles the model (later starts read it from ")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("gdn_prefil_backend", "triton", "vLLM has no engine argument gdn_prefil_backend; did you mean 'gdn_prefill_"),
        ("max_num_seqs", 8, "max_num_seqs follows from Fovea's own --max-sequences"),
        ("seed", 1, "seed must keep the value that Fovea gives it"),
        ("quantization", "fp8", "quantization must keep vLLM's default: the trainer rounds neither weights"),
        ("gdn_prefill_backend", "cuda", "gdn_prefill_backend: Input should be 'flashinfer', 'triton'"),
        ("watermark", [1], "watermark: Input should be a valid number"),
        ("compilation_config", {"levl": 3}, "compilation_config.levl: Unexpected keyword argument"),
    ],
)
def test_what_is_refused_is_named_in_one_line(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=r"^--engine-arguments: ") as refused:
        checked({name: value}, MADE)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_names_are_vllms_and_ours() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert {*SETTING_OF, *REFUSED} <= known
    assert set(SETTING_OF.values()) <= set(SamplerSettings.model_fields)
    assert not set(SETTING_OF) & set(REFUSED)


def test_what_a_setting_fills_in_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    plain = SamplerSettings(model=str(tmp_path))
    told = SamplerSettings(model=str(tmp_path), block_size=64, kv_cache_mib=64)
    filled = {*vllm_launch._gpu_arguments(told)} - {*vllm_launch._gpu_arguments(plain)}
    filled |= {*vllm_launch._common_arguments(told, AdapterCapacity(0, 4, 0))}
    filled -= {*vllm_launch._common_arguments(plain, AdapterCapacity(0, 0, 0))}
    assert filled == {"block_size", "kv_cache_memory_bytes", "enable_lora", "max_loras", "max_lora_rank"} | {
        "max_cpu_loras",
        "enable_moe_shared_loras",
        "enable_tower_connector_lora",
    }
    for name in filled:
        with pytest.raises(ValueError, match=f"{name} follows from Fovea's own --"):
            checked({name: 1}, MADE)


def test_the_loader_of_a_shared_base_and_of_random_weights_is_foveas(tmp_path: Path) -> None:
    shared = SamplerSettings(model=str(fovea_tinyvlm.ensure("qwen3")), shared_base=str(tmp_path / "base"))
    random_checkpoint.copy(Path(shared.model), tmp_path / "random", 1)
    for settings in (shared, SamplerSettings(model=str(tmp_path / "random"))):
        made = vllm_launch._common_arguments(settings, AdapterCapacity(0, 0, 0))
        with pytest.raises(ValueError, match="load_format must keep the value that Fovea gives it"):
            checked({"load_format": "dummy"}, made)
    own = vllm_launch._common_arguments(shared.model_copy(update={"shared_base": ""}), AdapterCapacity(0, 0, 0))
    assert checked({"load_format": "dummy"}, own) == {"load_format": "dummy"}


def test_a_socket_in_a_folder_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(SystemExit, match=r"^s: --shared-base: the folder /nowhere does not exist"):
        SamplerSettings.from_command_line("s", ["--model", "m", "--shared-base", "/nowhere/base"])


def test_json_comes_by_argument_and_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    read = SamplerSettings.from_command_line
    assert read("s", ["--model", "m", "--engine-arguments", '{"a": [1], "b": {"c": 2}}']).engine_arguments == {
        "a": [1],
        "b": {"c": 2},
    }
    monkeypatch.setenv("FOVEA_SAMPLER_ENGINE_ARGUMENTS", '{"moe_backend": "triton"}')
    assert read("s", ["--model", "m"]).engine_arguments == {"moe_backend": "triton"}
    monkeypatch.setenv("FOVEA_SAMPLER_ENGINE_ARGUMENTS", "{")
    with pytest.raises(SystemExit, match=r"^s: .*engine_arguments"):
        read("s", ["--model", "m"])


def test_expert_parallelism_needs_experts_and_several_devices() -> None:
    settings = SamplerSettings(model="m", expert_parallel=True, tensor_parallel=2)
    check_expert_parallel(settings, {"num_experts": 8})
    with pytest.raises(ValueError, match="--expert-parallel: m has no experts"):
        check_expert_parallel(settings, {})
    with pytest.raises(ValueError, match="over several devices; set --tensor-parallel above 1"):
        check_expert_parallel(settings.model_copy(update={"tensor_parallel": 1}), {"num_experts": 8})
