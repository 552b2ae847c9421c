"""The files of a base model, from a directory or from the hub, and those that an exported model takes along."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Container
from typing import TYPE_CHECKING

from fovea.wire.errors import NotFound, ResourceExhausted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
"""What a checkpoint has besides its weights: configuration, tokenizer, processor, chat template, generation."""

_INDEX = ".index.json"
_GIB = 2**30


def base_directory(name: str, *, with_weights: bool) -> pathlib.Path:
    """Where a base model's files are: a directory, or those of a hub name, downloaded if they are not here.

    Raises:
        NotFound: It is neither, or the hub cannot be reached.
    """
    directory = pathlib.Path(name).expanduser()
    if name and (directory / "config.json").is_file():
        return directory
    from huggingface_hub import snapshot_download

    patterns = [*SMALL_FILES, *(["*.safetensors"] if with_weights else [])]
    try:
        return pathlib.Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's own errors, those of its transport, and OSError
        raise NotFound(
            f"the base model {name!r} is no directory here, and the hub does not have it or cannot be reached: give"
            f" base (--base), its directory or hub name ({' '.join(str(error).split())[:200]})",
            field="base",
        ) from error


def is_tied(config: PreTrainedConfig) -> bool:
    """Returns whether a model uses its embeddings as its unembedding too, by its configuration."""
    return bool(config.tie_word_embeddings or config.get_text_config().tie_word_embeddings)


def copy_small_files(base: pathlib.Path, out: pathlib.Path, *, but: Container[str] = ()) -> None:
    """Copies what a checkpoint has besides its weights and their index."""
    for pattern in SMALL_FILES:
        for path in base.glob(pattern):
            if path.is_file() and path.name not in but and not path.name.endswith(_INDEX):
                shutil.copyfile(path, out / path.name)


def check_room(place: pathlib.Path, size_bytes: int) -> None:
    """Raises ResourceExhausted if so many bytes do not fit onto a folder's disk."""
    free = shutil.disk_usage(place).free
    if free < size_bytes:
        raise ResourceExhausted(
            f"the merged model takes {size_bytes / _GIB:.1f} GiB, and the disk of {place} has {free / _GIB:.1f} GiB"
        )
