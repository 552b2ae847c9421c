"""Models that the sampler refuses before it starts an engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from fovea.runtime.model_files import check_supported
from fovea_sampler.engine.engine_arguments import missing_entries
from fovea_sampler.engine.vllm_launch import AdapterCapacity, check_model, engine_config, measure_adapter_capacity
from fovea_sampler.settings import SamplerSettings
from fovea_tinyvlm.families import ensure_families


def _write(directory: Path, **config: Any) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def test_language_models_and_known_families_are_served(tmp_path: Path) -> None:
    check_model(_write(tmp_path, model_type="llama"))
    check_model(_write(tmp_path, model_type="qwen3_moe", num_experts=128))
    check_model(_write(tmp_path, model_type="qwen3_vl", vision_config={}))


@pytest.mark.parametrize("model_type", ["some_vlm", "ernie4_5_vl_moe"])
def test_unknown_vision_models_are_refused(tmp_path: Path, model_type: str) -> None:
    with pytest.raises(ValueError, match=f"'{model_type}' is a vision model.*supported are .*qwen3_vl"):
        check_model(_write(tmp_path, model_type=model_type, vision_config={}))


@pytest.mark.parametrize("entry", ["attention_chunk_size", "interleave_moe_layer_step", "no_rope_layer_interval"])
def test_a_llama_4_that_vllm_would_compute_otherwise_is_refused(tmp_path: Path, entry: str) -> None:
    """Files may omit entries with transformers' defaults, and `layer_types`, which follows from others."""
    text = {"num_hidden_layers": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
    kinds = [*3 * ["chunked_attention"], "full_attention"]
    for model_type in ("llama4", "llama4_text"):
        for value, more in ((None, {}), (0, {"layer_types": kinds})):
            whole = {"model_type": model_type, "vision_config": {}, "text_config": text | more}
            config = whole if model_type == "llama4" else {"model_type": model_type, **text, **more}
            check_model(_write(tmp_path, **config))
            check_supported(config)
            part = config["text_config"] if model_type == "llama4" else config
            part[entry] = value
            message = f"{entry} of {model_type} is {value}, must be positive"
            with pytest.raises(ValueError, match=message):
                check_model(_write(tmp_path, **config))
            with pytest.raises(ValueError, match=message):
                check_supported(config)


def test_a_family_without_lora_in_vllm_gets_no_room_for_adapters(tmp_path: Path) -> None:
    model = _write(tmp_path, model_type="llava_onevision", vision_config={})
    capacity = measure_adapter_capacity(SamplerSettings(model=model))
    assert (capacity.batched, capacity.held_bytes) == (0, 0)
    assert str(capacity) == "adapters: none, because vLLM does not support LoRA for this model"


def test_workers_share_the_hosts_memory_for_adapters(tmp_path: Path) -> None:
    """Each holds all adapters, so two workers may use half as much each."""
    settings = SamplerSettings(model=_write(tmp_path, model_type="llama"), device="cpu")
    one = measure_adapter_capacity(settings).held_bytes
    assert measure_adapter_capacity(settings.model_copy(update={"tensor_parallel": 2})).held_bytes == one // 2


def test_entries_that_transformers_does_not_write_are_named() -> None:
    text = {"model_type": "lfm2", "hidden_size": 64}
    both = {"block_dim": 64, "conv_dim": 64}
    assert missing_entries({"model_type": "lfm2_vl", "text_config": text}) == {"text_config": both}
    routing = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    assert missing_entries({"model_type": "deepseek_v3"}) == routing
    assert missing_entries({"model_type": "deepseek_v3", **routing}) == {}
    assert missing_entries(text) == both
    assert missing_entries(text | {"conv_dim": 32}) == {"block_dim": 64}
    assert missing_entries(text | both) == missing_entries({"model_type": "llama"}) == {}


def test_blocks_that_do_not_divide_a_chunk_are_refused() -> None:
    settings = SamplerSettings(model=str(ensure_families(["llama4_text"])["llama4_text"]), device="cpu", block_size=64)
    with pytest.raises(ValueError, match=r"--block-size is 64, which does not divide .* attention_chunk_size 32: vLLM"):
        engine_config(settings, AdapterCapacity(0, 0, 0))


@pytest.mark.parametrize("name", ["llama4", "llama4_text"])
def test_a_shared_base_of_transposed_experts_is_refused(name: str) -> None:
    model = str(ensure_families([name])[name])
    settings = SamplerSettings(model=model, device="cpu", shared_base="/tmp/llama4-base")
    with pytest.raises(ValueError, match="--shared-base does not support Llama 4: vLLM stores its experts as"):
        engine_config(settings, AdapterCapacity(0, 0, 0))
