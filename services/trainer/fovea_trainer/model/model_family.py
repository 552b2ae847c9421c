"""The supported model families and the facts that the trainer needs about each.

Shapes: T packed tokens, P patches of all images, W bytes per patch, M embeddings of all images, D hidden size.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM

from fovea.runtime.model_files import LLAMA_LIKE, STATE_LAYERS, check_variant, read_image_processor
from fovea_trainer.batches.micro_batch import Documents
from fovea_trainer.batches.vision_cache import VisionOutput
from fovea_trainer.model import linear_attention
from fovea_trainer.model.document_masks import Packing, contiguous_runs, use_document_rules
from fovea_trainer.model.expert_routing import ROUTED_EXPERTS, is_experts, replay_routing
from fovea_trainer.model.experts import factor_shapes, use_experts
from fovea_trainer.model.fused_layers import add_level, fuse_language, fuse_qwen_tower
from fovea_trainer.model.lora_linear import embedding
from fovea_trainer.model.packed_attention import MAX_FLASH_CHANNELS, PACKED_ATTENTION


class Role(StrEnum):
    """The function of a linear module. `LoraConfig` selects modules by role."""

    ATTENTION = "attention"
    MLP = "mlp"
    UNEMBEDDING = "unembedding"


@dataclass(frozen=True)
class LoraTarget:
    """A linear module, or a layer's experts, that an adapter may adapt.

    Args:
        name: Module path in the Hugging Face model, for example `model.visual.blocks.0.attn.qkv`.
        module: The module.
        role: Its function.
        vision: True if it belongs to the vision tower or its mergers.
    """

    name: str
    module: nn.Module
    role: Role
    vision: bool

    @property
    def is_experts(self) -> bool:
        """True if the module is a layer's experts."""
        return not isinstance(self.module, nn.Linear)

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that the adapter modifies."""
        names = ("gate_up_proj", "down_proj") if self.is_experts else ("weight",)
        return [f"{self.name}.{name}" for name in names]

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the adapter's tensors, keyed by tensor name."""
        if isinstance(self.module, nn.Linear):
            shapes: dict[str, tuple[int, ...]] = {
                "lora_A": (rank, self.module.in_features),
                "lora_B": (self.module.out_features, rank),
            }
        else:
            shapes = dict(factor_shapes(self.module, rank))
        return {f"{self.name}.{part}": shape for part, shape in shapes.items()}


@dataclass(frozen=True)
class PatchNormalizer:
    """Converts the image processor's uint8 patches to the tower's input: (x * rescale - mean) / std.

    Args:
        scale_W: float32, factor of each byte.
        shift_W: float32, added after scaling.
    """

    scale_W: Tensor
    shift_W: Tensor

    @classmethod
    def from_checkpoint(cls, model_dir: Path, channel_count: int, patch_bytes: int) -> "PatchNormalizer":
        """Reads the constants of the checkpoint's image processor. A patch contains its channels one after another."""
        config = read_image_processor(model_dir)
        rescale = config["rescale_factor"] if config.get("do_rescale", True) else 1.0
        normalize = config.get("do_normalize", True)
        mean = config["image_mean"] if normalize else [0.0] * channel_count
        std = config["image_std"] if normalize else [1.0] * channel_count
        repeats = patch_bytes // channel_count
        scale_W = torch.tensor([rescale / s for s in std], dtype=torch.float64).repeat_interleave(repeats)
        shift_W = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=torch.float64)
        return cls(scale_W.float(), shift_W.repeat_interleave(repeats).float())

    def to(self, device: torch.device) -> "PatchNormalizer":
        """Returns a copy on another device."""
        return PatchNormalizer(self.scale_W.to(device), self.shift_W.to(device))

    def __call__(self, patches_PW: Tensor, dtype: torch.dtype) -> Tensor:
        """Converts uint8 [P, W] to normalised [P, W] of the given dtype."""
        return torch.addcmul(self.shift_W, patches_PW.float(), self.scale_W).to(dtype)


@dataclass(frozen=True)
class Family:
    """One model family, built on its Hugging Face implementation.

    General rules, equal for all families, give everything that is not declared here.

    Args:
        model_type: `model_type` of the checkpoint's configuration.
        fuse_tower: Replaces layers of the vision tower by faster ones; None leaves them.
        tower_roles: Roles of the linear modules of the vision tower and its mergers that vLLM can adapt, keyed by the
            last component of the module path.
        sees_images_whole: True if the tokens of an image see each other in both directions in the language model.
        part: The part of the checkpoint that is trained, as in `thinker_config` and `thinker.lm_head`; empty for all.
    """

    model_type: str
    fuse_tower: Callable[[Any], None] | None = None
    tower_roles: Mapping[str, Role] = field(default_factory=dict)
    sees_images_whole: bool = False
    part: str = ""

    def build(self, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """Builds the model on the meta device, in training mode without dropout, with packed attention in all layers.

        Raises:
            ValueError: The variant is not supported.
        """
        check_variant(config.to_dict())
        config = getattr(config, f"{self.part}_config", config)
        kind: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with torch.device("meta"), meta_device_safe_creation_ops():
            model: Any = kind.from_config(config, dtype=dtype, attn_implementation="sdpa")
        if self.part:
            model.audio_tower, model._keys_to_ignore_on_load_unexpected = None, {"."}  # other parts stay in the files
        for language in filter(lambda part: isinstance(part, Llama4ForCausalLM), model.modules()):
            language.get_decoder = partial(getattr, language, "model")  # transformers' method returns the whole
        _pack_attention(model)
        if model.get_output_embeddings().bias is not None:
            raise ValueError(f"{config.model_type} has an unembedding with a bias, which is not supported")
        if dropouts := [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p]:
            raise ValueError(f"dropout is not supported: {config.model_type} has dropout in {dropouts[0]}")
        decoder = model.get_decoder()
        if hasattr(decoder, "_deepstack_process"):
            decoder._deepstack_process = MethodType(add_level, decoder)
        linear_attention.pack(decoder)
        use_experts(decoder)
        if config.get_text_config().model_type in LLAMA_LIKE:
            fuse_language(model)
        if self.fuse_tower is not None:
            self.fuse_tower(model)
        replay_routing(decoder)
        return model.train()  # type: ignore[no-any-return]

    def blocks(self, model: Any) -> Iterator[nn.Module]:
        """Returns the modules that are sharded and recomputed separately, in the order of the forward pass.

        These are the modules that transformers itself can recompute, in the tower and in the language model. Its list
        `_no_split_modules` is not used: it names parts of layers in some towers (Idefics 3), and also embeddings in
        others (SigLIP).
        """
        return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))

    def lora_targets(self, model: Any) -> Iterator[LoraTarget]:
        """Yields all linear modules and experts that can be adapted and for which vLLM can load an adapter."""
        language = _name_of(model, model.get_decoder())
        for name, module in model.named_modules():
            is_language = name.startswith(f"{language}.")
            role = (LANGUAGE_ROLES if is_language else self.tower_roles).get(name.rpartition(".")[2])
            if role is not None and isinstance(module, nn.Linear):
                yield LoraTarget(name, module, role, vision=not is_language)
            elif is_experts(module):
                yield LoraTarget(name, module, Role.MLP, vision=False)
        head = model.get_output_embeddings()
        yield LoraTarget(_name_of(model, head), head, Role.UNEMBEDDING, vision=False)

    def embed(self, model: Any, tokens_T: Tensor) -> Tensor:
        """Returns token embeddings [T, D]."""
        table = model.get_input_embeddings()
        if type(table).forward is nn.Embedding.forward:
            return embedding(tokens_T, table.weight)
        rows_TD: Tensor = table(tokens_T)  # Gemma scales its embeddings
        return rows_TD

    def can_be_shared(self, model: Any) -> bool:
        """Returns True if one pass of the language model can compute calls of several adapters.

        The result of a call must depend on the size of the pass alone. Experts, sliding windows and recurrent states
        choose kernels by the contents of a batch.
        """
        text = model.config.get_text_config()
        return (
            text.model_type in LLAMA_LIKE
            and "sliding_attention" not in (getattr(text, "layer_types", None) or ())
            and not any(map(is_experts, model.modules()))
        )

    def can_be_recorded(self, model: Any) -> bool:
        """Returns True if passes of the language model can be recorded as CUDA graphs.

        Batches of equal sizes must run equal kernels, but float32 attention chooses kernels by the contents of a batch.
        """
        text = model.config.get_text_config()
        head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return (
            model.device.type == "cuda"
            and model.dtype in (torch.bfloat16, torch.float16)
            and head_size <= MAX_FLASH_CHANNELS
            and self.can_be_shared(model)
        )

    def can_share_datums(self, model: Any) -> bool:
        """Returns True if ranks can compute a datum together: in all layers but attention, tokens are independent."""
        text = model.config.get_text_config()
        return text.model_type in LLAMA_LIKE and not any(map(is_experts, model.modules()))

    def run_vision(self, model: Any, tensors: Mapping[str, Tensor]) -> VisionOutput:
        """Runs the vision tower and the projection to the language model.

        Args:
            model: The model.
            tensors: Inputs of one or several images, without token ids. Keys are the processor's names.
        """
        core = model if self.part else getattr(model, "model", model)
        if hasattr(core, "visual"):
            # `get_image_features` splits its output into images, which makes the host wait for the GPU.
            output = core.visual(tensors["pixel_values"], grid_thw=tensors["image_grid_thw"], return_dict=True)
            return VisionOutput(output.pooler_output, tuple(getattr(output, "deepstack_features", None) or ()))
        if "target_sizes" in tensors:  # MiniCPM-V: the patches of all images are one row
            tensors = {**tensors, "pixel_values": torch.cat(tensors["pixel_values"].unbind(), -1)[None]}
        taken = signature(core.get_image_features).parameters
        output = core.get_image_features(**{name: tensors[name] for name in tensors if name in taken}, return_dict=True)
        found = output.pooler_output
        if found is None:  # Llama 4 projects them elsewhere
            found = core.multi_modal_projector(output.last_hidden_state)
        images = [found] if isinstance(found, Tensor) else found
        return VisionOutput(torch.cat([image.reshape(-1, image.shape[-1]) for image in images]), ())

    def run_language(
        self,
        model: Any,
        tokens_T: Tensor | None,
        embeddings_TD: Tensor,
        positions: Tensor,
        documents: Documents,
        vision: VisionOutput | None,
        image_index_M: Tensor | None,
        experts_TLk: Tensor | None,
    ) -> Tensor:
        """Returns the final hidden states [T, D], after the last norm. Each document sees only itself.

        Args:
            model: The model.
            tokens_T: int64. Families with per-layer embeddings look them up from these ids; others need none.
            embeddings_TD: Input embeddings, with image embeddings already inserted.
            positions: int64 [3, T] for families with multimodal RoPE, else int64 [1, T].
            documents: Bounds of the documents.
            vision: Output of the tower, for families that add vision features in later layers.
            image_index_M: int64, packed positions of the image placeholder tokens.
            experts_TLk: Experts that layers must use, as in `Batch`.
        """
        more: dict[str, Any] = {}
        text, decoder, count = model.config.get_text_config(), model.get_decoder(), len(embeddings_TD)
        layer_types = getattr(text, "layer_types", None) or ()
        if vision is not None and vision.deepstack and image_index_M is not None:
            more = {"visual_pos_masks": image_index_M, "deepstack_visual_embeds": list(vision.deepstack)}
        if {"sliding_attention", "chunked_attention"} & set(layer_types):
            only_windows = getattr(text, "use_bidirectional_attention", None) == "vision"
            whole = image_index_M is not None and (self.sees_images_whole or only_windows)
            blocks_T = contiguous_runs(image_index_M, count) if image_index_M is not None and whole else None
            all_count = count if documents.share is None else count * documents.share.size
            more["packing"] = Packing(documents.bounds, all_count, blocks_T, only_windows)
        if getattr(text, "hidden_size_per_layer_input", 0):
            assert tokens_T is not None
            ids_T = tokens_T if image_index_M is None else tokens_T.index_fill(0, image_index_M, text.pad_token_id)
            more["per_layer_inputs"] = decoder.get_per_layer_inputs(ids_T.unsqueeze(0), None)
        if text.model_type in STATE_LAYERS:
            positions_T = torch.arange(count, device=embeddings_TD.device)
            index_T = torch.searchsorted(documents.bounds[1:], positions_T, right=True, out_int32=True)
            more["seq_idx"] = index_T.unsqueeze(0)
        if documents.share is not None:
            more["share"] = documents.share
        if experts_TLk is not None:
            more[ROUTED_EXPERTS] = experts_TLk
        output = decoder(
            inputs_embeds=embeddings_TD.unsqueeze(0),
            position_ids=positions.unsqueeze(1) if len(positions) > 1 else positions,
            use_cache=False,
            cu_seq_lens_q=documents.bounds,
            cu_seq_lens_k=documents.bounds,
            max_length_q=documents.longest,
            max_length_k=documents.longest,
            **more,
        )
        hidden_1TD: Tensor = output.last_hidden_state
        return hidden_1TD.squeeze(0)


def _pack_attention(model: Any) -> None:
    """Installs packed attention in the language model and in towers that concatenate images.

    All other towers use sdpa.
    """
    decoder = model.get_decoder()
    decoder.config._attn_implementation = PACKED_ATTENTION
    use_document_rules(decoder)
    for part in model.modules():
        is_tower = isinstance(part, PreTrainedModel) and decoder not in part.modules()
        if is_tower and any("cu_seqlens" in signature(module.forward).parameters for module in part.modules()):
            part.config._attn_implementation = PACKED_ATTENTION


def _name_of(model: PreTrainedModel, part: nn.Module) -> str:
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    return names[part]


LANGUAGE_ROLES = {
    "q_proj": Role.ATTENTION,
    "k_proj": Role.ATTENTION,
    "v_proj": Role.ATTENTION,
    "qkv_proj": Role.ATTENTION,
    "o_proj": Role.ATTENTION,
    "out_proj": Role.ATTENTION,
    # DeepSeek-V3's, but kv_b_proj: vLLM multiplies it into other weights, without its adapter.
    **dict.fromkeys(("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"), Role.ATTENTION),
    # Short convolutions and gated delta nets replace attention.
    **dict.fromkeys(("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), Role.ATTENTION),
    **dict.fromkeys(("in_proj_qkvz", "in_proj_ba"), Role.ATTENTION),
    "gate_proj": Role.MLP,
    "up_proj": Role.MLP,
    "gate_up_proj": Role.MLP,
    "down_proj": Role.MLP,
    **dict.fromkeys(("w1", "w2", "w3"), Role.MLP),
}
"""Roles of the linear modules in language layers, keyed by module name. vLLM fuses q, k, v and gate, up itself."""

_QWEN_ROLES = {"qkv": Role.ATTENTION, "proj": Role.ATTENTION}
# Blocks, merger and deepstack mergers, if there are any, all call their linear modules linear_fc1 and linear_fc2.
_QWEN3_ROLES = {**_QWEN_ROLES, "linear_fc1": Role.MLP, "linear_fc2": Role.MLP}

_GLM_ROLES = {"proj": Role.ATTENTION, "down_proj": Role.MLP}
"""The other modules of the tower are omitted: vLLM fuses them differently or does not have them."""

_LLAMA4_ROLES = {
    **{f"{name}_proj": Role.ATTENTION for name in "qkvo"},
    **dict.fromkeys(("fc1", "fc2", "linear_1"), Role.MLP),
}  # without the patch embedding, for which vLLM maps rows to adapters as if the class token were already there
_PLAIN = (
    *("internvl", "llava", "llava_next", "llava_onevision", "mistral3", "idefics3", "smolvlm", "lfm2_vl", "gemma4"),
    *("qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "llama", "mistral", "mixtral"),
    *("gemma3_text", "glm4_moe", "deepseek_v3", "llama4_text", "minicpmv4_6"),
)
"""Values of `model_type` for which the general rules give everything."""

FAMILIES = {
    family.model_type: family
    for family in (
        *map(Family, _PLAIN),
        Family("qwen3_vl", fuse_qwen_tower, _QWEN3_ROLES),
        # The mergers of these three are sequences with linear modules 0 and 2.
        Family("qwen2_5_vl", fuse_qwen_tower, {**LANGUAGE_ROLES, **_QWEN_ROLES, "0": Role.MLP, "2": Role.MLP}),
        Family("qwen2_vl", fuse_qwen_tower, {**_QWEN_ROLES, **dict.fromkeys(("fc1", "fc2", "0", "2"), Role.MLP)}),
        Family("qwen3_omni_moe", fuse_qwen_tower, {**_QWEN3_ROLES, "0": Role.MLP, "2": Role.MLP}, part="thinker"),
        Family("gemma3", sees_images_whole=True),
        Family("glm4v", tower_roles=_GLM_ROLES),
        Family("glm4v_moe", tower_roles=_GLM_ROLES),
        Family("llama4", tower_roles=_LLAMA4_ROLES),
        Family("qwen3_vl_moe", fuse_qwen_tower, _QWEN3_ROLES),
        Family("qwen3_5", tower_roles=_QWEN3_ROLES),
        Family("qwen3_5_moe", tower_roles=_QWEN3_ROLES),
    )
}
"""Families keyed by `model_type`."""


def family_of(model_type: str) -> Family:
    """Returns the family of a checkpoint.

    Raises:
        ValueError: The family is not supported. The error lists the supported ones.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; supported are: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
