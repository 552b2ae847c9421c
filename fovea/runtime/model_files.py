"""What the files of a base model say that several services must read alike. Needs neither torch nor transformers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TEXT_MODEL_TYPES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""`model_type` of the models that take text only and that a whole Fovea runs; `fovea.vision` has the others."""


def read_config(model: str, download: Callable[[str, str], str]) -> dict[str, Any]:
    """`config.json` of a checkpoint's directory or, by hub name, of the hub.

    Args:
        download: Fetches (hub name, file) and returns its path, as `hf_hub_download` does.

    Raises OSError if there is none, ValueError if it is none.
    """
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        if path.parent.is_dir() or model.startswith((".", "/", "~")):
            raise FileNotFoundError(f"{path} does not exist; --model names a checkpoint directory or a hub name")
        path = Path(download(model, "config.json"))
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ValueError, naming the file, if it does not."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def language_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's entries of `config.json`: at the top or, in newer checkpoints, in `text_config`."""
    return {**config, **(config.get("text_config") or {})}


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest sequence that a model was made for, in tokens; None if its configuration does not say.

    `max_position_embeddings`, scaled as the rotary embeddings are. With YaRN some checkpoints give the length after
    scaling there (DeepSeek), some the one before it, as Qwen's own instructions do: the longer of the two holds.
    """
    text = language_entries(config)
    length = text.get("max_position_embeddings")
    if length is None:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor") or 1.0
    if kind == "yarn":
        return max(int(length), int((rope.get("original_max_position_embeddings") or length) * factor))
    return int(length * (factor if kind == "linear" else 1))


def read_added_tokens(directory: Path) -> dict[str, int]:
    """Ids of the added tokens of a directory's `tokenizer.json` by their text; empty if there is no such file."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return {}
    return {token["content"]: int(token["id"]) for token in read_json(path).get("added_tokens", [])}


def read_image_processor(directory: Path) -> dict[str, Any]:
    """Settings of a checkpoint's image processor, found as transformers 5 finds them.

    It saves a processor as one `processor_config.json` with the image processor in it; before, that one had a
    `preprocessor_config.json` of its own. Raises ValueError, naming both files, if neither says.
    """
    whole, own = directory / "processor_config.json", directory / "preprocessor_config.json"
    nested = read_json(whole).get("image_processor") if whole.is_file() else None
    if isinstance(nested, dict):
        return nested
    if own.is_file():
        return read_json(own)
    raise ValueError(
        f"{directory} describes no image processor: neither {own.name} nor image_processor in {whole.name}"
    )
