"""The files of a base model, from a directory or the hub, and the small ones that an export copies."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Container
from typing import TYPE_CHECKING

from fovea.wire.errors import NotFound, ResourceExhausted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
"""Files of a checkpoint besides weights: configuration, tokenizer, processor, chat template, generation."""

_INDEX = ".index.json"
_GIB = 2**30


def base_directory(name: str, *, with_weights: bool) -> pathlib.Path:
    """Returns the folder of a base model's files, which are downloaded if the name is a hub name.

    Args:
        name: Directory or hub name.
        with_weights: Whether to download weights too.

    Raises:
        NotFound: The name is neither of the two, or the hub cannot be reached.
    """
    directory = pathlib.Path(name).expanduser()
    if name and (directory / "config.json").is_file():
        return directory
    from huggingface_hub import snapshot_download

    patterns = [*SMALL_FILES, *(["*.safetensors"] if with_weights else [])]
    try:
        return pathlib.Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # errors of the hub and of its HTTP library, and OSError
        raise NotFound(
            f"the base model {name!r} is not a directory here, and the hub does not have it or cannot be reached: give"
            f" its directory or hub name as base (--base) ({' '.join(str(error).split())[:200]})",
            field="base",
        ) from error


def is_tied(config: PreTrainedConfig) -> bool:
    """Returns whether a model uses its embeddings as its unembedding too, by its configuration."""
    return any(getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config()))


def trained_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the configuration of the part of a model that Fovea trains: Qwen3-Omni's thinker; all of other models."""
    return getattr(config, "thinker_config", config)


def copy_small_files(base: pathlib.Path, out: pathlib.Path, *, but: Container[str] = ()) -> None:
    """Copies the files of a checkpoint except its weights and their index.

    Args:
        base: Folder of the checkpoint.
        out: Folder to copy to.
        but: Names of files to leave out.
    """
    for pattern in SMALL_FILES:
        for path in base.glob(pattern):
            if path.is_file() and path.name not in but and not path.name.endswith(_INDEX):
                shutil.copyfile(path, out / path.name)


def check_room(place: pathlib.Path, size_bytes: int) -> None:
    """Raises ResourceExhausted if the disk of the folder `place` has less than `size_bytes` free."""
    free = shutil.disk_usage(place).free
    if free < size_bytes:
        raise ResourceExhausted(
            f"the merged model needs {size_bytes / _GIB:.1f} GiB; the disk of {place} has {free / _GIB:.1f} GiB free"
        )
