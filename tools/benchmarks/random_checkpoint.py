"""Writes checkpoints with safetensors files that are a header and a hole: a model of any size without disk space.

With a seed, trainer and sampler draw its weights (`fovea_weights`). Without one they read zeros, as
from files in the page cache, which is for `benchmarks.loading`. As a program it copies another checkpoint with its
shapes, configuration and tokenizer: `python -m benchmarks.random_checkpoint CHECKPOINT DIRECTORY --seed 0`.
"""

import argparse
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from fovea_weights import SEED_ENTRY

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write(directory: Path, tensors: Mapping[str, Tensor], seed: int | None) -> None:
    """Writes `model.safetensors` for tensors with these names, shapes and dtypes, which may be on the meta device."""
    metadata = {"format": "pt"} | ({} if seed is None else {SEED_ENTRY: str(seed)})
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + math.prod(tensor.shape) * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        file.truncate(8 + len(said) + end)


def published_tensors(model: Any, experts: str) -> dict[str, Tensor]:
    """Returns a model's tensors on the meta device in the hub's layout; `experts` as in `fovea_tinyvlm.families`."""
    if experts == "one by one":
        return dict(revert_weight_conversion(model, _state(model)))
    turned = (".experts.gate_up_proj", ".experts.down_proj") if experts == "together, transposed" else ()
    return {name: tensor.mT if name.endswith(turned) else tensor for name, tensor in _state(model).items()}


def write_model(model: Any, directory: Path, experts: str, seed: int | None) -> None:
    """Writes the header of a model's weights and its configurations; `experts` as in `fovea_tinyvlm.families`."""
    write(directory, published_tensors(model, experts), seed)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)


def _state(model: Any) -> dict[str, Tensor]:
    tied = model.all_tied_weights_keys
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def copy(checkpoint: Path, directory: Path, seed: int | None) -> None:
    """Copies a checkpoint without its data. `directory` must not exist."""
    shutil.copytree(checkpoint, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: dict[str, Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name).to("meta") for name in file.keys()}  # noqa: SIM118 - not a mapping
    write(directory, tensors, seed)


def main() -> None:
    """Writes one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, help="seed of the weights; without it they are zeros")
    options = parser.parse_args()
    copy(options.checkpoint, options.directory, options.seed)


if __name__ == "__main__":
    main()
