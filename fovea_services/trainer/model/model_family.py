"""What the trainer must know of a model family, and those that there are.

Shapes: T packed tokens, P patches of all images, W bytes of one patch, M embeddings of all images, D hidden.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_layers import GradientCheckpointingLayer

from fovea.runtime.model_files import STATE_LAYERS, check_variant, read_image_processor
from fovea_services.trainer.batches.micro_batch import Documents
from fovea_services.trainer.batches.vision_cache import VisionOutput
from fovea_services.trainer.model import linear_attention, router_replay
from fovea_services.trainer.model.document_masks import Packing
from fovea_services.trainer.model.experts import factor_shapes, is_experts, use_experts
from fovea_services.trainer.model.fused_layers import LLAMA_LIKE, fuse_language, fuse_qwen_tower
from fovea_services.trainer.model.lora_linear import embedding
from fovea_services.trainer.model.packed_attention import PACKED_ATTENTION


class Role(StrEnum):
    """What a linear module does; `LoraConfig` chooses modules by role."""

    ATTENTION = "attention"
    MLP = "mlp"
    UNEMBEDDING = "unembedding"


@dataclass(frozen=True)
class LoraTarget:
    """A linear module, or the experts of a layer, that an adapter may adapt.

    Args:
        name: Module path in the Hugging Face model, `model.visual.blocks.0.attn.qkv`.
        module: The module.
        role: What it does.
        vision: Whether it belongs to the vision tower or its mergers.
    """

    name: str
    module: nn.Module
    role: Role
    vision: bool

    @property
    def is_experts(self) -> bool:
        """Whether it is the experts of a layer."""
        return not isinstance(self.module, nn.Linear)

    @property
    def parameters(self) -> list[str]:
        """Names of those of its parameters that an adapter adds to."""
        names = ("gate_up_proj", "down_proj") if self.is_experts else ("weight",)
        return [f"{self.name}.{name}" for name in names]

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Of all tensors of its adapter, by name."""
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
    """Turns the processor's uint8 patches into what the tower was trained on: (x * rescale - mean) / std."""

    scale_W: Tensor
    shift_W: Tensor

    @classmethod
    def from_checkpoint(cls, model_dir: Path, channel_count: int, patch_bytes: int) -> "PatchNormalizer":
        """As the checkpoint's image processor says; a patch holds its channels one after another."""
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
        """The same on another device."""
        return PatchNormalizer(self.scale_W.to(device), self.shift_W.to(device))

    def __call__(self, patches_PW: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 [P, W] to normalised [P, W]."""
        return torch.addcmul(self.shift_W, patches_PW.float(), self.scale_W).to(dtype)


@dataclass(frozen=True)
class Family:
    """One model family, on the Hugging Face implementation of its model; what is not declared here goes by rule.

    Args:
        model_type: In the checkpoint's configuration.
        fuse_tower: Puts faster forms of the vision tower's layers in their place; None leaves them.
        tower_roles: Linear modules of the vision tower and its mergers that vLLM can adapt, by last name.
        sees_images_whole: Whether the tokens of an image see each other both ways in the language model.
    """

    model_type: str
    fuse_tower: Callable[[Any], None] | None = None
    tower_roles: Mapping[str, Role] = field(default_factory=dict)
    sees_images_whole: bool = False

    def build(self, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """The model on the meta device, in training mode without dropout, with packed attention throughout.

        Raises ValueError for a variant that would be computed wrongly.
        """
        check_variant(config.to_dict())
        kind: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with torch.device("meta"), meta_device_safe_creation_ops():
            model: Any = kind.from_config(config, dtype=dtype, attn_implementation="sdpa")
        _pack_attention(model)
        if model.get_output_embeddings().bias is not None:
            raise ValueError(f"{config.model_type} has an unembedding with a bias, which is not supported")
        if dropouts := [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p]:
            raise ValueError(f"dropout is not supported: {config.model_type} has some in {dropouts[0]}")
        decoder = model.get_decoder()
        if hasattr(decoder, "_deepstack_process"):
            decoder._deepstack_process = MethodType(_add_level, decoder)
        linear_attention.pack(decoder)
        use_experts(decoder)
        if config.get_text_config().model_type in LLAMA_LIKE:
            fuse_language(model)
        if self.fuse_tower is not None:
            self.fuse_tower(model)
        router_replay.install(decoder)
        return model.train()  # type: ignore[no-any-return]

    def blocks(self, model: Any) -> Iterator[nn.Module]:
        """The modules that are sharded and recomputed by themselves, in the order of the forward pass.

        Those that transformers itself can recompute, of tower and language model alike. Its `_no_split_modules` names
        the same ones, but parts of layers in some towers (Idefics 3) and embeddings in others (SigLIP).
        """
        return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))

    def lora_targets(self, model: Any) -> Iterator[LoraTarget]:
        """All linear modules and experts that an adapter may adapt and that vLLM can load an adapter for."""
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
        """Token embeddings [T, D]."""
        table = model.get_input_embeddings()
        if type(table).forward is nn.Embedding.forward:
            return embedding(tokens_T, table.weight)
        rows_TD: Tensor = table(tokens_T)  # Gemma's are scaled
        return rows_TD

    def run_vision(self, model: Any, tensors: Mapping[str, Tensor]) -> VisionOutput:
        """Runs the tower and what joins it to the language model.

        Args:
            tensors: Of one image or several, as the family's processor names them, without the ids among them.
        """
        core = model.model
        if hasattr(core, "visual"):
            # `get_image_features` cuts its output into images, for which it has to wait for the GPU.
            output = core.visual(tensors["pixel_values"], grid_thw=tensors["image_grid_thw"], return_dict=True)
            return VisionOutput(output.pooler_output, tuple(getattr(output, "deepstack_features", None) or ()))
        taken = signature(core.get_image_features).parameters
        output = core.get_image_features(**{name: tensors[name] for name in tensors if name in taken}, return_dict=True)
        found = output.pooler_output
        images = [found] if isinstance(found, Tensor) else found
        return VisionOutput(torch.cat([image.reshape(-1, image.shape[-1]) for image in images]), ())

    def run_language(
        self,
        model: Any,
        tokens_T: Tensor,
        embeddings_TD: Tensor,
        positions: Tensor,
        documents: Documents,
        vision: VisionOutput | None,
        image_index_M: Tensor | None,
        experts_TLk: Tensor | None,
    ) -> Tensor:
        """Final hidden states [T, D], after the last norm, of documents each of which sees itself alone.

        Args:
            tokens_T: For families that look up more of a token than its embedding.
            positions: int64 [3, T] for families with multimodal RoPE, else [1, T].
            vision: For families that feed vision into the layers; its embeddings are in `embeddings_TD` already.
            image_index_M: Packed positions of the placeholder tokens.
            experts_TLk: What layers with experts follow, as `Batch` has it.
        """
        more: dict[str, Any] = {}
        text, decoder, count = model.config.get_text_config(), model.get_decoder(), len(tokens_T)
        layer_types = getattr(text, "layer_types", None) or ()
        if vision is not None and vision.deepstack and image_index_M is not None:
            more = {"visual_pos_masks": image_index_M, "deepstack_visual_embeds": list(vision.deepstack)}
        if "sliding_attention" in layer_types:
            only_windows = getattr(text, "use_bidirectional_attention", None) == "vision"
            whole = image_index_M is not None and (self.sees_images_whole or only_windows)
            blocks_T = _runs(image_index_M, count) if image_index_M is not None and whole else None
            more["packing"] = Packing(documents.bounds, count, blocks_T, only_windows)
        if getattr(text, "hidden_size_per_layer_input", 0):
            ids_T = tokens_T if image_index_M is None else tokens_T.index_fill(0, image_index_M, text.pad_token_id)
            more["per_layer_inputs"] = decoder.get_per_layer_inputs(ids_T.unsqueeze(0), None)
        if text.model_type in STATE_LAYERS:
            places_T = torch.arange(count, device=embeddings_TD.device)
            index_T = torch.searchsorted(documents.bounds[1:], places_T, right=True, out_int32=True)
            more["seq_idx"] = index_T.unsqueeze(0)
        if experts_TLk is not None:
            more[router_replay.ARGUMENT] = experts_TLk
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


def _runs(index_M: Tensor, token_count: int) -> Tensor:
    """int64 [T]: of the ascending positions, each run without a gap has a number from 0 on; -1 elsewhere."""
    gaps = torch.diff(index_M, prepend=index_M[:1]) > 1
    return torch.full((token_count,), -1, device=index_M.device).index_copy(0, index_M, gaps.cumsum(0))


def _pack_attention(model: Any) -> None:
    """Packed attention in the language model, and in towers that take images end to end; others have sdpa's."""
    decoder = model.get_decoder()
    decoder.config._attn_implementation = PACKED_ATTENTION
    for part in model.modules():
        is_tower = isinstance(part, PreTrainedModel) and decoder not in part.modules()
        if is_tower and any("cu_seqlens" in signature(module.forward).parameters for module in part.modules()):
            part.config._attn_implementation = PACKED_ATTENTION


def _name_of(model: PreTrainedModel, part: nn.Module) -> str:
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    return names[part]


def _add_level(_: Any, hidden_1TD: Tensor, image_index_M: Tensor, level_MD: Tensor) -> Tensor:
    """Adds one level of deepstack features where the images are.

    The module's own takes a mask, for which the host has to wait for the GPU six times a pass.
    """
    return hidden_1TD.index_add(1, image_index_M, level_MD.to(hidden_1TD.dtype).unsqueeze(0))


LANGUAGE_ROLES = {
    "q_proj": Role.ATTENTION,
    "k_proj": Role.ATTENTION,
    "v_proj": Role.ATTENTION,
    "qkv_proj": Role.ATTENTION,
    "o_proj": Role.ATTENTION,
    "out_proj": Role.ATTENTION,
    # Of short convolutions and gated delta nets, which stand in attention's place.
    **dict.fromkeys(("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), Role.ATTENTION),
    "gate_proj": Role.MLP,
    "up_proj": Role.MLP,
    "gate_up_proj": Role.MLP,
    "down_proj": Role.MLP,
    **dict.fromkeys(("w1", "w2", "w3"), Role.MLP),
}
"""Names that language layers share; vLLM packs q, k, v and gate, up by itself."""

_QWEN_ROLES = {"qkv": Role.ATTENTION, "proj": Role.ATTENTION}

FAMILIES = {
    family.model_type: family
    for family in (
        # linear_fc1 and linear_fc2 name the linears of the blocks, of the merger and of the deepstack mergers alike.
        Family("qwen3_vl", fuse_qwen_tower, {**_QWEN_ROLES, "linear_fc1": Role.MLP, "linear_fc2": Role.MLP}),
        # The merger is a Sequential: its linears are called 0 and 2.
        Family("qwen2_5_vl", fuse_qwen_tower, {**LANGUAGE_ROLES, **_QWEN_ROLES, "0": Role.MLP, "2": Role.MLP}),
        Family("qwen2_vl", fuse_qwen_tower, {**_QWEN_ROLES, **dict.fromkeys(("fc1", "fc2", "0", "2"), Role.MLP)}),
        Family("internvl"),
        Family("llava_next"),
        Family("llava_onevision"),
        Family("mistral3"),
        Family("gemma3", sees_images_whole=True),
        Family("llava"),
        # What is one module in vLLM and not here, or has parts of which vLLM does not know, takes no adapters there.
        Family("glm4v", tower_roles={"proj": Role.ATTENTION, "down_proj": Role.MLP}),
        Family("idefics3"),
        Family("smolvlm"),
        Family("lfm2_vl"),
        Family("gemma4"),
        # Towers as Qwen3-VL's, without its deepstack mergers.
        Family("qwen3_5", tower_roles={**_QWEN_ROLES, "linear_fc1": Role.MLP, "linear_fc2": Role.MLP}),
        Family("qwen3_vl_moe", fuse_qwen_tower, {**_QWEN_ROLES, "linear_fc1": Role.MLP, "linear_fc2": Role.MLP}),
        Family("qwen3_5_moe", tower_roles={**_QWEN_ROLES, "linear_fc1": Role.MLP, "linear_fc2": Role.MLP}),
        Family("qwen3"),
        Family("qwen3_moe"),
        Family("qwen2"),
        Family("llama"),
        Family("mistral"),
        Family("gemma3_text"),
        Family("qwen3_5_text"),
    )
}
"""By `model_type` of the checkpoint's configuration."""


def family_of(model_type: str) -> Family:
    """The family of a checkpoint. Raises ValueError naming the known ones."""
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
