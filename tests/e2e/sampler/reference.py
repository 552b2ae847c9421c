"""Reference numbers: Hugging Face's float32 forward, with adapters merged into the weights."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from fovea.wire.tensors import FeatureTensors
from fovea_sampler.engine.manifest_check import checkpoint_shapes

ALPHA = 32.0
StateDict = dict[str, torch.Tensor]


class Reference:
    """A checkpoint in transformers.

    Args:
        model: The checkpoint.
        state: Parameters that replace the checkpoint's.
    """

    def __init__(self, model: Path, state: StateDict | None = None) -> None:
        torch.set_num_threads(1)
        config = AutoConfig.from_pretrained(model)
        kind = AutoModelForImageTextToText if "vision_config" in config.to_dict() else AutoModelForCausalLM
        self.module = kind.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
        self._preprocessor = model / "preprocessor_config.json"
        self._image_token_id = getattr(config, "image_token_id", None)
        if state is not None:
            self.module.load_state_dict(state, strict=False)
            self.module.tie_weights()

    def parameters(self) -> StateDict:
        """Returns a dict of all parameters, with tied ones once."""
        return {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}

    def merge(self, adapter: Mapping[str, torch.Tensor], rank: int) -> "Reference":
        """Adds an adapter, given by PEFT names, to the weights. It unties a tied unembedding first."""
        halves = {name for name in adapter if name.endswith(".lora_A.weight")}
        for name in halves:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            delta = (ALPHA / rank) * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
            parent, _, part = path.rpartition(".")
            if part in (
                "w1",
                "w2",
                "w3",
            ):  # delta [experts, outputs, inputs]; a factor exists once or per expert
                _add_to_experts(self.module.get_submodule(parent), part, delta)
                continue
            linear = self.module.get_submodule(path)
            linear.weight = torch.nn.Parameter(linear.weight.detach().clone() + delta)
        return self

    def prompt_logprobs(
        self, tokens: npt.NDArray[np.int32], images: list[FeatureTensors] | None = None
    ) -> npt.NDArray[np.float32]:
        """Returns log p(token i | tokens before i), with NaN first."""
        table = self.table(tokens, images)
        values = np.full(len(tokens), np.nan, dtype=np.float32)
        values[1:] = table[np.arange(len(tokens) - 1), tokens[1:]]
        return values

    @torch.no_grad()
    def table(
        self, tokens: npt.NDArray[np.int32], images: list[FeatureTensors] | None = None, temperature: float = 1.0
    ) -> npt.NDArray[np.float32]:
        """Returns log-softmax(logits / temperature), [tokens, vocabulary]; row i is the distribution of token i + 1."""
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images:
            pixels = torch.from_numpy(np.concatenate([image["pixel_values"] for image in images]))
            inputs["pixel_values"] = self._normalised(pixels)
            inputs["image_grid_thw"] = torch.from_numpy(np.concatenate([i["image_grid_thw"] for i in images]))
            inputs["mm_token_type_ids"] = (ids == self._image_token_id).int()
        logits = self.module(**inputs).logits[0].float()
        return (logits / temperature).log_softmax(-1).numpy()

    def _normalised(self, patches: torch.Tensor) -> torch.Tensor:
        """Returns (x / 255 - mean) / std; a patch row is [channel, frame, height, width]."""
        settings = json.loads(self._preprocessor.read_text())
        mean, std = (torch.tensor(settings[name]) for name in ("image_mean", "image_std"))
        by_channel = patches.view(len(patches), 3, -1).float() / 255
        return ((by_channel - mean[:, None]) / std[:, None]).view(len(patches), -1)


def _add_to_experts(experts: torch.nn.Module, part: str, delta: torch.Tensor) -> None:
    """Adds to the gate (w1), down (w2) or up (w3) projection of all experts of a layer."""
    with torch.no_grad():
        gate, up = experts.gate_up_proj.chunk(2, dim=1)
        {"w1": gate, "w2": experts.down_proj, "w3": up}[part].add_(delta)


def expert_factors(experts: torch.nn.Module, rank: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the shapes of A and B by projection. Factors with the model's width exist once for all experts of a
    layer.
    """
    count, outer, inner = experts.down_proj.shape
    outside = ((1, rank, outer), (count, inner, rank))
    return {"w1": outside, "w2": ((count, rank, inner), (1, outer, rank)), "w3": outside}


def as_in_files(state: StateDict, model: Path) -> StateDict:
    """Converts parameters of transformers' modules to checkpoint files: one tensor per expert, or transposed."""
    shapes, found = checkpoint_shapes(model), {}
    for name, tensor in state.items():
        prefix, _, projection = name.rpartition(".")
        if name in shapes:
            found[name] = tensor if tuple(tensor.shape) == shapes[name] else tensor.mT.contiguous()
            continue
        parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
        for part, half in zip(parts, tensor.chunk(len(parts), dim=1), strict=True):
            found |= {f"{prefix}.{expert}.{part}.weight": one.contiguous() for expert, one in enumerate(half)}
    return found


def random_adapter(reference: Reference, rank: int, seed: int, scale: float = 0.05) -> dict[str, torch.Tensor]:
    """Returns an adapter of attention, MLP, vision tower, mergers and unembedding, large enough to change every
    logprob.
    """
    generator = torch.Generator().manual_seed(seed)
    adapter: dict[str, torch.Tensor] = {}
    for name, module in reference.module.named_modules():
        if isinstance(module, torch.nn.Linear):
            out_width, in_width = module.weight.shape
            prefix = f"base_model.model.{name}"
            adapter[f"{prefix}.lora_A.weight"] = torch.randn(rank, in_width, generator=generator) * scale
            adapter[f"{prefix}.lora_B.weight"] = torch.randn(out_width, rank, generator=generator) * scale
        elif name.endswith(".experts"):
            for part, (a_shape, b_shape) in expert_factors(module, rank).items():
                prefix = f"base_model.model.{name}.{part}"
                adapter[f"{prefix}.lora_A.weight"] = torch.randn(a_shape, generator=generator) * scale
                adapter[f"{prefix}.lora_B.weight"] = torch.randn(b_shape, generator=generator) * scale
    return adapter
