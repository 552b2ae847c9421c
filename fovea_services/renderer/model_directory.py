"""The files of a model directory that the renderer reads itself: config.json and the added tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea import vision
from fovea.runtime.model_files import context_length, language_entries, read_added_tokens, read_json
from fovea.vision.vision_family import VisionFamily


@dataclass(frozen=True)
class Checkpoint:
    """A model directory, as far as the renderer reads it: config.json and the added tokens of tokenizer.json."""

    directory: Path
    config: dict[str, Any]
    family: VisionFamily | None
    """None for a model that takes text only."""

    @property
    def model_type(self) -> str:
        """`model_type` of config.json."""
        return str(self._require(self.config, "model_type"))

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids that the embedding knows."""
        return int(self._require(language_entries(self.config), "vocab_size"))

    @property
    def max_position_count(self) -> int:
        """The longest sequence that the model was made for, in tokens."""
        length = context_length(self.config)
        if length is None:
            raise ValueError(f"{self.directory / 'config.json'} has no max_position_embeddings")
        return length

    def _require(self, entries: Mapping[str, Any], key: str) -> Any:
        if entries.get(key) is None:
            raise ValueError(f"{self.directory / 'config.json'} has no {key}")
        return entries[key]


def read(directory: Path) -> Checkpoint:
    """Reads a model directory. Raises ValueError, naming the file, if it is no model, or one of no known family."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json; --model takes a model directory or a hub name")
    config = read_json(directory / "config.json")
    return Checkpoint(directory, config, vision.bind(config, read_added_tokens(directory)))


def locate(model: str) -> Path:
    """The directory of `model`: itself, or that of a hub name, downloaded without weights.

    Raises what huggingface_hub raises if there is no such model or no network.
    """
    directory = Path(model).expanduser()
    if directory.exists() or model.startswith((".", "/", "~")):
        return directory
    from huggingface_hub import snapshot_download  # Only a hub name needs it, and its import takes a while.

    return Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja", "*.txt"]))
