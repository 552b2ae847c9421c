"""Chat templates that tests render with, and sampled turns for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import fovea_tinyvlm
from fovea_rollout.messages import Message, Picture
from fovea_rollout.policies.policy import Chunk, Sampled, Tokens, WeightVersions

_FOLDERS = {
    "released": Path(__file__).parent / "templates",
    "tiny": Path(fovea_tinyvlm.__file__).parent / "chat_templates",
}
NAMES = sorted(f"{kind}/{path.stem}" for kind, folder in _FOLDERS.items() for path in folder.glob("*.jinja"))
TEXT_ONLY = {"released/qwen3", "tiny/qwen3"}
WITHOUT_TOOLS = {"tiny/qwen3_vl"}

PLACEHOLDER = "<|image_pad|>"
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "calc_score",
            "description": "Scores a solution.",
            "parameters": {"type": "object", "properties": {"value": {"type": "number"}}},
        },
    },
)


@cache
def tokenizer(name: str) -> Any:
    """Returns the tiny model's tokenizer with a chat template of `NAMES`."""
    from transformers import AutoTokenizer

    kind, _, stem = name.partition("/")
    loaded = AutoTokenizer.from_pretrained(fovea_tinyvlm.ensure("qwen3_vl"))
    loaded.chat_template = (_FOLDERS[kind] / f"{stem}.jinja").read_text()
    return loaded


def square(red: int, green: int, blue: int) -> Picture:
    """Returns a square of 56 x 56 pixels."""
    return Picture.of_pixels(np.full((56, 56, 3), (red, green, blue), np.uint8))


def sampled(name: str, text: str, *, is_cut: bool = False) -> Sampled:
    """Returns a turn with its canonical tokens; `text` includes the end of turn."""
    return sampled_ids(tokenizer(name).encode(text, add_special_tokens=False), is_cut=is_cut)


def sampled_ids(ids: Sequence[int], *, is_cut: bool = False) -> Sampled:
    """Returns a turn with any tokens."""
    return Sampled(tuple(ids), (-0.5,) * len(ids), "length" if is_cut else "stop", WeightVersions(0, 0))


def flat(name: str, chunks: Sequence[Chunk]) -> list[int]:
    """Returns the token ids, with one placeholder per picture."""
    placeholder = tokenizer(name).convert_tokens_to_ids(PLACEHOLDER)
    return [token for chunk in chunks for token in (chunk.ids if isinstance(chunk, Tokens) else (placeholder,))]


def text_of(name: str, chunks: Sequence[Chunk]) -> str:
    """Returns the decoded prompt."""
    return str(tokenizer(name).decode(flat(name, chunks)))


def user(*parts: str | Picture) -> Message:
    return Message("user", parts)
