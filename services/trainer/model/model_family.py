"""What the trainer must know of a model family; `packed_model` lists those that there are.

Shapes: T packed tokens, P patches of all images, W bytes of one patch, M placeholder tokens of all images, D hidden.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from fovea.runtime.model_files import read_image_processor
from services.trainer.batches.micro_batch import Documents
from services.trainer.batches.vision_cache import VisionOutput
from services.trainer.model.layers import PACKED_ATTENTION


class Role(StrEnum):
    """What a linear module does; `LoraConfig` chooses modules by role."""

    ATTENTION = "attention"
    MLP = "mlp"
    UNEMBEDDING = "unembedding"


@dataclass(frozen=True)
class LoraTarget:
    """A linear module that an adapter may adapt.

    Args:
        name: Module path in the Hugging Face model, `model.visual.blocks.0.attn.qkv`.
        module: The module.
        role: What it does.
        vision: Whether it belongs to the vision tower or its mergers.
    """

    name: str
    module: nn.Linear
    role: Role
    vision: bool


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


class Family(ABC):
    """One model family, on the Hugging Face implementation of its model."""

    model_type: ClassVar[str]
    architecture: ClassVar[type[PreTrainedModel]]

    def load(self, model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
        """The model on the CPU, in training mode without dropout, with packed attention throughout.

        Raises, before it reads any weights, what `check` raises.
        """
        self.check(AutoConfig.from_pretrained(model_dir))
        model: Any = self.architecture.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager")
        model.config._attn_implementation = PACKED_ATTENTION
        return model.train()  # type: ignore[no-any-return]

    def check(self, config: PretrainedConfig) -> None:
        """Raises ValueError for a variant that would be computed wrongly where documents are packed."""
        text = config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(
                f"layer types {sorted(kinds)} of {config.model_type} are not supported, only full_attention"
            )
        rope_type = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
        if "dynamic" in rope_type or rope_type == "longrope":
            raise ValueError(
                f"rope_type {rope_type!r} of {config.model_type} is not supported: its frequencies depend on the "
                "longest document of a micro-batch, so what a document gets would depend on its neighbours. Take one "
                "whose frequencies are fixed: default, linear, llama3, yarn"
            )
        if getattr(text, "attention_dropout", 0.0):
            raise ValueError("attention_dropout must be 0")

    @abstractmethod
    def blocks(self, model: Any) -> Iterator[nn.Module]:
        """The modules that are sharded by themselves, in the order of the forward pass."""

    @abstractmethod
    def lora_targets(self, model: Any) -> Iterator[LoraTarget]:
        """All linear modules that an adapter may adapt and that vLLM can load an adapter for."""

    @abstractmethod
    def embed(self, model: Any, tokens_T: Tensor) -> Tensor:
        """Token embeddings [T, D]."""

    @abstractmethod
    def run_language(
        self,
        model: Any,
        embeddings_TD: Tensor,
        positions: Tensor,
        documents: Documents,
        vision: VisionOutput | None,
        image_index_M: Tensor | None,
    ) -> Tensor:
        """Final hidden states [T, D], after the last norm.

        Args:
            positions: int64 [3, T] for families with multimodal RoPE, else [1, T].
            vision: For families that feed vision into the layers; its embeddings are in `embeddings_TD` already.
            image_index_M: Packed positions of the placeholder tokens.
        """

    def run_vision(self, model: Any, pixels_PW: Tensor, grids_I3: Tensor) -> VisionOutput:
        """Runs the tower on normalised patches. Raises ValueError for a family without one."""
        raise ValueError(f"{self.model_type} has no vision tower")


def named_linears(prefix: str, root: nn.Module, roles: dict[str, Role], vision: bool) -> Iterator[LoraTarget]:
    """The linear modules below `root` whose last name is in `roles`."""
    for name, module in root.named_modules():
        role = roles.get(name.rpartition(".")[2])
        if role is not None and isinstance(module, nn.Linear):
            yield LoraTarget(f"{prefix}.{name}", module, role, vision)


LANGUAGE_ROLES = {
    "q_proj": Role.ATTENTION,
    "k_proj": Role.ATTENTION,
    "v_proj": Role.ATTENTION,
    "o_proj": Role.ATTENTION,
    "gate_proj": Role.MLP,
    "up_proj": Role.MLP,
    "down_proj": Role.MLP,
}
"""Names that the language layers of all Qwen families share; vLLM packs q, k, v and gate, up by itself."""
