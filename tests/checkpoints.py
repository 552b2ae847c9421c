"""Checkpoints as others save them."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoProcessor, PretrainedConfig, PreTrainedTokenizerBase


def save_random(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """A language model in float32 with random weights, of a scale at which norms and biases speak too."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def with_one_processor_file(model: Path, folder: Path) -> Path:
    """A copy, below `folder`, whose processor is saved as transformers 5 does: one file in the place of three."""
    copy = folder / model.name
    shutil.copytree(model, copy)
    AutoProcessor.from_pretrained(model).save_pretrained(copy)
    for kind in ("", "video_"):
        (copy / f"{kind}preprocessor_config.json").unlink()
    assert (copy / "processor_config.json").is_file()
    return copy
