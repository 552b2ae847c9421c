"""The files of a model directory that the renderer reads itself: config.json and the special tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea.runtime.checkpoint import context_length, read_json

# A configuration with any of these has a vision tower, whatever its model_type.
_VISION_KEYS = ("vision_config", "visual", "vision_tower", "mm_vision_tower", "image_token_id", "image_token_index")


@dataclass(frozen=True)
class Checkpoint:
    """One model directory."""

    directory: Path
    config: dict[str, Any]
    special_ids: dict[str, int]
    """Ids of the added tokens of tokenizer.json, by their text."""

    @property
    def model_type(self) -> str:
        """`model_type` of config.json."""
        return str(self.require("model_type"))

    @property
    def has_vision(self) -> bool:
        """Whether the configuration has a vision tower."""
        return any(self.config.get(key) is not None for key in _VISION_KEYS)

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids that the embedding knows."""
        return int(self._text("vocab_size"))

    @property
    def max_position_count(self) -> int:
        """The longest sequence that the model was made for, in tokens."""
        length = context_length(self.config)
        if length is None:
            raise ValueError(f"{self.directory / 'config.json'} has no max_position_embeddings")
        return length

    def require(self, key: str) -> Any:
        """A top-level entry of config.json. Raises ValueError if it is missing."""
        if self.config.get(key) is None:
            raise ValueError(f"{self.directory / 'config.json'} has no {key}")
        return self.config[key]

    def _text(self, key: str) -> Any:
        # Released checkpoints keep the language model's entries at the top or, newer ones, in text_config.
        text_config = self.config.get("text_config") or {}
        return text_config[key] if key in text_config else self.require(key)


def read(directory: Path) -> Checkpoint:
    """Reads a model directory. Raises ValueError, naming the file, if it is no model."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json; --model takes a model directory or a hub name")
    return Checkpoint(directory, read_json(directory / "config.json"), _special_ids(directory / "tokenizer.json"))


def locate(model: str) -> Path:
    """The directory of `model`: itself, or that of a hub name, downloaded without weights.

    Raises what huggingface_hub raises if there is no such model or no network.
    """
    directory = Path(model).expanduser()
    if directory.exists() or model.startswith((".", "/", "~")):
        return directory
    from huggingface_hub import snapshot_download  # Only a hub name needs it, and its import takes a while.

    return Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja", "*.txt"]))


def _special_ids(path: Path) -> dict[str, int]:
    if not path.is_file():
        return {}
    return {token["content"]: int(token["id"]) for token in read_json(path).get("added_tokens", [])}
