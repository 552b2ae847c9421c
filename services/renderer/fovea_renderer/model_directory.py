"""Reads the files of a model directory that the renderer itself needs: config.json and the added tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea import vision
from fovea.runtime.model_files import context_length, language_entries, read_added_tokens, read_json
from fovea.vision.vision_family import VisionFamily


@dataclass(frozen=True)
class Checkpoint:
    """The parts of a model directory that the renderer needs."""

    directory: Path
    config: dict[str, Any]
    family: VisionFamily | None
    """The vision family, bound to the checkpoint; None for a text model."""

    @property
    def model_type(self) -> str:
        """The `model_type` of config.json."""
        return str(self._require(self.config, "model_type"))

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids in the vocabulary of the embedding."""
        return int(self._require(language_entries(self.config), "vocab_size"))

    @property
    def max_position_count(self) -> int:
        """The longest sequence that the model supports, in tokens."""
        length = context_length(self.config)
        if length is None:
            raise ValueError(f"{self.directory / 'config.json'} has no max_position_embeddings")
        return length

    def _require(self, entries: Mapping[str, Any], key: str) -> Any:
        if entries.get(key) is None:
            raise ValueError(f"{self.directory / 'config.json'} has no {key}")
        return entries[key]


def read(directory: Path) -> Checkpoint:
    """Reads a model directory. Raises ValueError if it is not a model directory, or if its family is unknown."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json; --model takes a model directory or a hub name")
    config = read_json(directory / "config.json")
    return Checkpoint(directory, config, vision.bind(config, read_added_tokens(directory)))


def locate(model: str) -> Path:
    """Returns the directory of `model`. A hub name is downloaded, without weights.

    Raises the error of huggingface_hub if the model does not exist or the hub cannot be reached.
    """
    directory = Path(model).expanduser()
    if directory.exists() or model.startswith((".", "/", "~")):
        return directory
    from huggingface_hub import snapshot_download  # slow to import, and only needed for a hub name

    return Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja", "*.txt"]))
