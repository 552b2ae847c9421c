"""The list of all families, and the function that builds one."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel

from fovea_tinyvlm.families.declaration import Family
from fovea_tinyvlm.families.llama4 import LLAMA4
from fovea_tinyvlm.families.minicpm import MINICPM
from fovea_tinyvlm.families.qwen_likes import QWEN_LIKES
from fovea_tinyvlm.families.qwen_omni import QWEN_OMNI
from fovea_tinyvlm.families.text_models import TEXT_FAMILIES
from fovea_tinyvlm.families.tiled import TILED
from fovea_tinyvlm.families.vocabulary import family_tokenizer
from fovea_tinyvlm.families.whole_images import WHOLE_IMAGES

_ALL = (*QWEN_LIKES, *QWEN_OMNI, *WHOLE_IMAGES, *TILED, *LLAMA4, MINICPM, *TEXT_FAMILIES)
FAMILIES = {family.name: family for family in _ALL}


def build_family(name: str, directory: Path, seed: int = 0, max_shard_size: str = "5GB") -> None:
    """Writes model, tokenizer and processor of a family into `directory`, which may exist.

    Raises KeyError for a name that is not in `FAMILIES`.
    """
    family = FAMILIES[name]
    tokenizer = family_tokenizer(family)
    ids = tokenizer.get_added_vocab()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family.architecture(family.config(ids))
        _randomize(model)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    directory.mkdir(parents=True, exist_ok=True)
    if family.experts == "one by one":
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    else:
        model.save_pretrained(
            directory, state_dict=_published(model, family), max_shard_size=max_shard_size, save_original_format=False
        )
    saver = tokenizer if family.processor is None else family.processor(tokenizer)
    saver.save_pretrained(directory)


def _published(model: PreTrainedModel, family: Family) -> dict[str, torch.Tensor]:
    # Even when asked for the published layout, transformers splits such experts or leaves them as its modules store
    # them.
    state: dict[str, torch.Tensor] = model.state_dict()
    if family.experts == "together, transposed":
        for name in state:
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                state[name] = state[name].mT.contiguous()
    return state


@torch.no_grad()
def _randomize(model: PreTrainedModel) -> None:
    # As in fovea_tinyvlm.architecture, matrices get a scale that suits so few channels. Vectors keep the initial values
    # of the architecture (norms of Gemma and Qwen3.5 start from 0, decays from a range) plus noise, so that a test
    # detects an omitted one.
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
        else:
            is_table = parameter.dim() == 2 and "embed" in name and "proj" not in name
            is_experts = parameter.dim() == 3 and "experts" in name  # [experts, outputs, inputs]
            fan_in = parameter.shape[-1] if is_table or is_experts else parameter[0].numel()
            parameter.normal_(std=fan_in**-0.5)
    # Gemma 4 has buffers in its checkpoint: factors near 1, offsets, and bounds of +-inf, which would have no effect.
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            buffer.clamp_(-2.0, 2.0).add_(torch.randn_like(buffer), alpha=0.1)
