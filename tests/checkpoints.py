"""Checkpoints as others save them."""

import shutil
from pathlib import Path

from transformers import AutoProcessor


def with_one_processor_file(model: Path, folder: Path) -> Path:
    """A copy, below `folder`, whose processor is saved as transformers 5 does: one file in the place of three."""
    copy = folder / model.name
    shutil.copytree(model, copy)
    AutoProcessor.from_pretrained(model).save_pretrained(copy)
    for kind in ("", "video_"):
        (copy / f"{kind}preprocessor_config.json").unlink()
    assert (copy / "processor_config.json").is_file()
    return copy
