"""The folder in which recipes run. Local folders with the names of hub datasets take precedence there.

`datasets.load_dataset("openai/gsm8k")` and `AutoTokenizer.from_pretrained("Qwen/...")` both use a relative path if it
exists, so recipes stay unchanged and download nothing.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from cookbook import material
from cookbook.material import Row
from fovea_tinyvlm.scenes import COLOUR_QUESTION, COLOURS, GROUND_QUESTION, GROUNDS, shape_scene

GUESSES_FILE = "guesses.jsonl"
PROMPT_DISTILLATION_FILE = "prompt_distillation/data.jsonl"
_GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""
_CODE_PARTS = {"primeintellect": ("train",), "taco": ("train",), "lcbv5": ("train", "test"), "codeforces": ("test",)}
_CLASSES = [f"{colour}_on_{ground}" for ground in GROUNDS for colour in COLOURS if colour != ground]
_PICTURES_OF_A_CLASS = {"train": 40, "test": 10}


def lay_out(folder: Path, model_name: str, tokenizer: Path | None, seed: int = 0, problems: int = 256) -> None:
    """Writes the datasets into a new `folder` and links the tokenizer under the model's name.

    Args:
        folder: Folder to create anew.
        model_name: Model name of the server.
        tokenizer: Folder of the tokenizer and image processor; None if the name itself is a folder.
        seed: Seed of all texts to train on.
        problems: Number of problems to train on.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if tokenizer is not None:
        link = folder / model_name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(tokenizer.resolve(), target_is_directory=True)
    chat = folder / "HuggingFaceH4/no_robots"
    _write(chat / "train.jsonl", material.chat_rows(640, 2 * seed))
    _write(chat / "test.jsonl", material.chat_rows(32, seed=1))
    maths = folder / "openai/gsm8k"
    _write(maths / "main/train.jsonl", material.maths_rows(problems, 2 * seed))
    _write(maths / "main/test.jsonl", material.maths_rows(8, seed=1))
    (maths / "README.md").write_text(_GSM8K_CARD)
    preferences = folder / "Anthropic/hh-rlhf"
    _write(preferences / "train.jsonl", material.preference_rows(96, 2 * seed))
    _write(preferences / "test.jsonl", material.preference_rows(8, seed=1))
    _write(folder / GUESSES_FILE, material.guess_rows(256, 2 * seed))
    _write(folder / PROMPT_DISTILLATION_FILE, material.distilled_rows(160, 2 * seed))
    _write(folder / "tangqiaoyu/ToolAlpaca/train.jsonl", material.demonstration_rows(64, 2 * seed))
    _write_code(folder / "agentica-org/DeepCoder-Preview-Dataset", seed)
    _write_pictures(folder / "dpdl-benchmark/caltech101")


def _write_code(folder: Path, seed: int) -> None:
    """Writes tasks in the layout of DeepCoder: several sets of one or two splits."""
    card = ["---", "configs:"]
    for place, (name, splits) in enumerate(_CODE_PARTS.items()):
        card += [f"- config_name: {name}", "  data_files:"]
        for split in splits:
            card += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
            rows = material.code_rows(16, 2 * (seed + 1000 * place) + (split == "test"))
            _write(folder / name / f"{split}.jsonl", rows)
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


def _write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_pictures(folder: Path) -> None:
    """Writes coloured shapes in the layout of Caltech-101: by split and class, `red_on_black/image_0001.jpg`, none
    twice.
    """
    rng = np.random.default_rng(0)
    for split, most in _PICTURES_OF_A_CLASS.items():
        drawn: Counter[str] = Counter()
        while drawn.total() < most * len(_CLASSES):
            scene = shape_scene(rng)
            if GROUND_QUESTION not in scene.facts:
                continue
            name = f"{scene.facts[COLOUR_QUESTION]}_on_{scene.facts[GROUND_QUESTION]}"
            if drawn[name] == most:
                continue
            drawn[name] += 1
            path = folder / split / name / f"image_{drawn[name]:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(scene.pixels).save(path, quality=95)
