"""What this trainer trains, by `model_type`: known before torch is imported, so that others are refused at once."""

from pathlib import Path

from fovea.runtime.checkpoint import read_config, read_image_processor

MODEL_TYPES = ("qwen2_5_vl", "qwen3", "qwen3_vl")
"""Those of services/trainer/families."""


def check_checkpoint(model: str) -> None:
    """Reads little files only. Raises ValueError or OSError for a checkpoint that cannot be trained."""
    from huggingface_hub import hf_hub_download

    config = read_config(model, hf_hub_download)
    if config.get("model_type") not in MODEL_TYPES:
        raise ValueError(
            f"model_type {config.get('model_type')!r} of {model} is not supported; known: {', '.join(MODEL_TYPES)}"
        )
    if "vision_config" in config and Path(model).is_dir():
        read_image_processor(Path(model))
