"""Checkpoints in the file formats of other programs."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoProcessor, PretrainedConfig, PreTrainedTokenizerBase


def save_random(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Saves a float32 language model with random weights, large enough that norms and biases matter."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def with_one_processor_file(model: Path, folder: Path) -> Path:
    """Copies a checkpoint below `folder`, with its processor in one file, as transformers 5 stores it."""
    copy = folder / model.name
    shutil.copytree(model, copy)
    AutoProcessor.from_pretrained(model).save_pretrained(copy)
    for kind in ("", "video_"):
        (copy / f"{kind}preprocessor_config.json").unlink()
    assert (copy / "processor_config.json").is_file()
    return copy
