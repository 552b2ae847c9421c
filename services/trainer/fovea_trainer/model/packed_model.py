"""The root module that FSDP wraps: from a packed micro-batch to the log-probabilities of its targets.

Shapes: T packed tokens, K targets per position, D hidden size, M placeholder tokens.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import (
    MergeModulelist,
    Transpose,
    WeightConverter,
    revert_weight_conversion,
)

from fovea import vision
from fovea.runtime.model_files import read_added_tokens
from fovea.vision.vision_family import VisionFamily
from fovea_trainer.batches.micro_batch import Batch, Documents, TowerInput
from fovea_trainer.batches.vision_cache import VisionOutput, split_output
from fovea_trainer.model.expert_routing import ExpertLoads, is_experts
from fovea_trainer.model.experts import ExpertLayout
from fovea_trainer.model.lora_linear import LoraPair
from fovea_trainer.model.model_family import Family, PatchNormalizer, family_of
from fovea_trainer.model.target_logprobs import target_logprobs
from fovea_trainer.model.weight_reading import read_weights
from fovea_trainer.settings import TrainerSettings

HF_PREFIX = "hf."
MIB = 2**20


class PackedModel(nn.Module):
    """A Hugging Face model of a supported family, run on packed micro-batches.

    Everything that needs gathered parameters happens inside `forward`, including the unembedding, because FSDP's hooks
    surround `forward`.

    Args:
        family: The model's family.
        vision: Image handling of the family; None for a text-only model.
        hf: The Hugging Face model.
        normalizer: Converts byte patches to pixels; None for a family that sends none.
        chunk_positions: Number of positions for which logits are computed at a time.
        head_dtype: Dtype of logits.
    """

    def __init__(
        self,
        family: Family,
        vision: VisionFamily | None,
        hf: Any,
        normalizer: PatchNormalizer | None,
        chunk_positions: int,
        head_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.family = family
        self.vision = vision
        self.hf = hf
        self._layers = list(family.blocks(hf.get_decoder()))
        self._blocks = list(family.blocks(hf))
        self.expert_loads = ExpertLoads(hf.get_decoder())
        self._normalizer = normalizer
        self._chunk_positions = chunk_positions
        self._head_dtype = head_dtype
        hf.gradient_checkpointing_enable({"use_reentrant": False})

    @cached_property
    def file_names(self) -> dict[str, str]:
        """The result of the function `file_names`. Known once the weights are read."""
        part, found = self.family.part, file_names(self.hf)
        return {name: f"{part}.{stored}" for name, stored in found.items()} if part else found

    @cached_property
    def expert_layouts(self) -> dict[str, ExpertLayout]:
        """Layout of the experts in checkpoint files, keyed by `file_names`. Known once the weights are read."""
        layout = _expert_layout(self.hf)
        return {stored: layout for name, stored in self.file_names.items() if _is_of_experts(self.hf, name)}

    def forward(
        self,
        batch: Batch,
        unembedding: LoraPair | Tensor | None,
        cached: dict[str, VisionOutput] | None,
        recompute: float = 0.0,
        temperature: float = 1.0,
    ) -> Tensor:
        """Returns the log-probabilities of the targets, float32 [T, K], with gradients.

        For a shared datum, T is the number of all its tokens.

        Args:
            batch: The micro-batch.
            unembedding: Trained tensor of the unembedding, as for `target_logprobs`.
            cached: Outputs of a frozen tower, keyed by image digest; new ones are added. None if the tower is trained.
            recompute: As for `set_recompute`. Must be equal on ranks that run a pass together.
            temperature: Divisor of the logits.
        """
        self.set_recompute(recompute)
        embeddings_TD, vision, index_M = self.embed(batch, cached)
        hidden_TD = self.run_language(
            embeddings_TD, batch.positions, batch.documents, vision, index_M, batch.tokens_T, batch.experts_TLk
        )
        logprobs_TK = self.logprobs(hidden_TD, unembedding, batch.targets_TK, temperature, support_TM=batch.support_TM)
        share = batch.documents.share
        return logprobs_TK if share is None else share.whole(logprobs_TK)

    def set_recompute(self, share: float) -> None:
        """Sets the share of layers, the first ones, that retain only their input; if it is not 0, so does the tower."""
        for block in self._blocks:
            block.gradient_checkpointing = share > 0  # type: ignore[assignment]
        for layer in self._layers[math.ceil(share * len(self._layers)) :]:
            layer.gradient_checkpointing = False  # type: ignore[assignment]

    @cached_property
    def can_be_recorded(self) -> bool:
        """True if passes of the language model can be recorded; see `Family.can_be_recorded`."""
        return self.family.can_be_recorded(self.hf)

    @cached_property
    def can_be_shared(self) -> bool:
        """True if a pass can compute calls of several adapters; see `Family.can_be_shared`."""
        return self.family.can_be_shared(self.hf)

    @cached_property
    def deepstack_levels(self) -> int:
        """The number of levels of deepstack features. Each is added to one of the first language layers."""
        vision = getattr(self.hf.config, "vision_config", None)
        return len(getattr(vision, "deepstack_visual_indexes", None) or ())

    def embed(
        self, batch: Batch, cached: dict[str, VisionOutput] | None
    ) -> tuple[Tensor, VisionOutput | None, Tensor | None]:
        """Returns the embeddings of a micro-batch, with those of its images inserted.

        Args:
            batch: The micro-batch.
            cached: As for `forward`.

        Returns:
            The embeddings [T, D]; and the tower's output and its packed positions, int64 [M], or None and None if the
            micro-batch has no image.
        """
        embeddings_TD = self.family.embed(self.hf, batch.tokens_T)
        vision, placement = self._vision(batch, cached), batch.placement
        if placement is not None and placement.dealt is not None:
            vision = placement.dealt.exchanged(vision, embeddings_TD, self.deepstack_levels)
        if placement is not None and vision is not None:
            index_M = placement.index_M
            return embeddings_TD.index_copy(0, index_M, vision.embeddings.to(embeddings_TD.dtype)), vision, index_M
        if vision is not None:
            embeddings_TD = embeddings_TD + vision.anchored()
        return embeddings_TD, None, None

    def run_language(
        self,
        embeddings_TD: Tensor,
        positions: Tensor,
        documents: Documents,
        vision: VisionOutput | None,
        index_M: Tensor | None,
        tokens_T: Tensor | None = None,
        experts_TLk: Tensor | None = None,
    ) -> Tensor:
        """Returns the final hidden states [T, D]; arguments are those of `Family.run_language`."""
        return self.family.run_language(
            self.hf, tokens_T, embeddings_TD, positions, documents, vision, index_M, experts_TLk
        )

    def logprobs(
        self,
        hidden_TD: Tensor,
        unembedding: LoraPair | Tensor | None,
        targets_TK: Tensor,
        temperature: float,
        takes_all: bool = False,
        support_TM: Tensor | None = None,
    ) -> Tensor:
        """Returns the log-probabilities of the targets, float32 [T, K]; arguments are those of `target_logprobs`."""
        return target_logprobs(
            hidden_TD,
            self.hf.get_output_embeddings().weight,
            unembedding,
            targets_TK,
            self._chunk_positions,
            self._head_dtype,
            getattr(self.hf.config.get_text_config(), "final_logit_softcapping", None),
            temperature,
            takes_all,
            support_TM,
        )

    def _vision(self, batch: Batch, cached: dict[str, VisionOutput] | None) -> VisionOutput | None:
        """Returns the tower's output for a micro-batch's images or for a blank image; None if neither is needed."""
        if cached is None:
            return self._run_tower(batch.tower) if batch.tower else None
        if batch.tower is not None:
            with torch.no_grad():
                output = self._run_tower(batch.tower)
            if batch.tower.images:
                images = split_output(output, [count for _, count in batch.tower.images])
                cached |= {digest: image for (digest, _), image in zip(batch.tower.images, images, strict=True)}
        if batch.placement is None or not batch.placement.digests:
            return None
        return VisionOutput.joined([cached[digest] for digest in batch.placement.digests])

    def _run_tower(self, tower: TowerInput) -> VisionOutput:
        """Returns the output for the images, or for blank ones if there is no image."""
        outputs = [self.family.run_vision(self.hf, self._in_model_type(tensors)) for tensors in tower.calls]
        found = VisionOutput.joined(outputs)
        return found.first(sum(count for _, count in tower.images)) if tower.images else found

    def _in_model_type(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts pixels to the model's dtype. Byte patches, which some families send, are also normalised."""
        found = {
            name: tensor.to(self.hf.dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
        }
        if (patches_PW := found["pixel_values"]).dtype == torch.uint8:
            assert self._normalizer is not None
            found["pixel_values"] = self._normalizer(patches_PW, self.hf.dtype)
        return found


def file_names(model: PreTrainedModel) -> dict[str, str]:
    """Returns the names of parameters and constants in the files of the checkpoint, keyed by their names in the model.

    On loading, transformers renames modules of some models. vLLM, like other programs that load an exported model,
    expects the names of the files. Stacked experts keep their own name, below the name of their layer in the files.

    Raises:
        ValueError: The files store a parameter other than experts in another shape.
    """
    every = [name for name, _ in (*model.named_parameters(), *constants(model))]
    experts = {name: name.rpartition(".") for name in every if _is_of_experts(model, name)}
    alone = {name: torch.empty(0) for name in every if name not in experts}
    alone |= {f"{parent}.weight": torch.empty(0) for parent, _, _ in experts.values()}
    names = {id(tensor): name for name, tensor in revert_weight_conversion(model, dict(alone)).items()}
    if changed := [name for name, tensor in alone.items() if id(tensor) not in names]:
        raise ValueError(f"{changed[0]} of {model.config.model_type} has another shape in checkpoints: not supported")
    found = {name: names[id(tensor)] for name, tensor in alone.items()}
    parents = {name: found[f"{parent}.weight"].removesuffix("weight") for name, (parent, _, _) in experts.items()}
    return {name: parents[name] + experts[name][2] if name in experts else found[name] for name in every}


def _is_of_experts(model: PreTrainedModel, name: str) -> bool:
    return is_experts(model.get_submodule(name.rpartition(".")[0]))


def _expert_layout(model: Any) -> ExpertLayout:
    """Derives the layout from the conversions that transformers applied on loading."""
    converters = [one for one in model._weight_conversions if isinstance(one, WeightConverter)]
    own = [one for one in converters if any(".experts." in name for name in one.target_patterns)]
    steps = {type(step) for one in own for step in one.operations}
    if MergeModulelist in steps:
        is_numbered = any("w1" in pattern for one in own for pattern in one.source_patterns)
        return ExpertLayout.NUMBERED if is_numbered else ExpertLayout.ONE_BY_ONE
    return ExpertLayout.TRANSPOSED if Transpose in steps else ExpertLayout.AS_IN_MODULE


def constants(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that checkpoints contain. They are not trained. Gemma 4's layers have one."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def build_model(
    settings: TrainerSettings, model_dir: Path, device: torch.device
) -> tuple[Family, torch.dtype, PackedModel]:
    """Returns the family, the dtype and the base model on the meta device, ready to be sharded and loaded.

    Raises:
        ValueError: The model is not supported.
    """
    config = AutoConfig.from_pretrained(model_dir)
    family = family_of(config.model_type)
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = default if settings.dtype == "auto" else getattr(torch, settings.dtype)
    hf = family.build(config, dtype)
    images = vision.bind(config.to_dict(), read_added_tokens(model_dir))
    normalizer = None
    if images is not None and (patches := images.blank_image()["pixel_values"]).dtype == np.uint8:
        channels = int(hf.config.vision_config.in_channels)
        normalizer = PatchNormalizer.from_checkpoint(model_dir, channels, patches.shape[1]).to(device)
    head_dtype = torch.float32 if settings.head_dtype == "float32" else dtype
    chunk = _logit_chunk(settings.logit_chunk_mib * MIB, hf.config.get_text_config().vocab_size, head_dtype)
    return family, dtype, PackedModel(family, images, hf, normalizer, chunk, head_dtype)


def load_model(
    settings: TrainerSettings, model_dir: Path, device: torch.device
) -> tuple[Family, torch.dtype, PackedModel]:
    """Returns the family, the dtype and the unsharded base model with its weights."""
    family, dtype, module = build_model(settings, model_dir, device)
    read_weights(module.hf, model_dir, device)
    return family, dtype, module


def _logit_chunk(size_bytes: int, vocabulary_size: int, dtype: torch.dtype) -> int:
    """Returns the number of positions per chunk: a multiple of 128, the tile of a matrix product, where possible."""
    positions = max(1, size_bytes // (dtype.itemsize * vocabulary_size))
    return positions // 128 * 128 or positions
