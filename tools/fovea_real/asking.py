"""Asks a trained model about held-out drawings, in plain transformers or through a running Fovea, and marks by rule."""

from __future__ import annotations

import asyncio
import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from fovea_real.architecture import Tower
from fovea_real.drawings import Drawing, Question, marks, summary
from fovea_real.pretraining import Recipe
from fovea_rollout import (
    Answer,
    ChatTemplate,
    Message,
    RolloutSettings,
    SamplingSettings,
    Step,
    TinkerPolicy,
    connect,
    evaluate,
)
from fovea_rollout.messages import Picture

LONGEST_ANSWER = 96
QUESTIONS = 3
"""Questions about each held-out picture: its caption and others, drawn by its number."""
_SHEET_COLUMNS, _SHEET_ROWS = 6, 4


@dataclass
class Asked:
    """A question about a drawing, and the model's answer with its tokens, without the end token."""

    drawing: Drawing
    question: Question
    answer: str = ""
    tokens: tuple[int, ...] = ()

    @property
    def marks(self) -> dict[str, list[bool]]:
        """The marks of the answer."""
        return marks(self.question, self.answer)

    @property
    def is_right(self) -> bool:
        """True if the whole answer is right."""
        return all(all(found) for found in self.marks.values())


def questions(recipe: Recipe, pictures: int) -> list[Asked]:
    """Returns held-out questions: three about each of the first held-out pictures."""
    found = []
    for index in range(pictures):
        one = recipe.draw("held-out", index)
        others = 1 + np.random.default_rng([recipe.seed, index]).permutation(len(one.questions) - 1)
        found += [Asked(one, one.questions[at]) for at in (0, *others[: QUESTIONS - 1])]
    return found


def scores(asked: Sequence[Asked]) -> dict[str, float]:
    """Returns the shares of right marks (see `drawings.summary`)."""
    return summary([one.marks for one in asked])


def read_recipe(folder: Path) -> Recipe:
    """Returns the recipe of a checkpoint folder."""
    found = json.loads((folder / "recipe.json").read_text())
    return Recipe(**(found | {"tower": Tower(**found["tower"]), "tasks": tuple(found["tasks"])}))


def ask_transformers(folder: Path, asked: Sequence[Asked], device: torch.device, dtype: Any, batch: int) -> None:
    """Answers greedily with transformers, loaded from a checkpoint folder."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).to(device).eval()
    end = model.generation_config.eos_token_id
    # Answers of one kind are about equally long, so few sequences wait for the longest of their batch.
    ordered = sorted(asked, key=lambda one: (one.question.kind, len(one.question.answer)))
    for at in range(0, len(ordered), batch):
        part = ordered[at : at + batch]
        chats = [
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": one.question.text}]}]
            for one in part
        ]
        inputs = processor(
            text=processor.apply_chat_template(chats, add_generation_prompt=True),
            images=[[Image.fromarray(one.drawing.pixels)] for one in part],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(device)
        with torch.inference_mode():
            made = model.generate(**inputs, max_new_tokens=LONGEST_ANSWER, do_sample=False)
        for one, row in zip(part, made[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            one.tokens = tuple(row[: row.index(end)] if end in row else row)
            one.answer = processor.decode(one.tokens)


class _Question:
    """An episode of one question about one drawing."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def reset(self) -> list[Message]:
        """Returns the picture and the question."""
        return [Message("user", (Picture.of_pixels(self._asked.drawing.pixels), self._asked.question.text))]

    def step(self, answer: Answer) -> Step:
        """Ends the episode."""
        return Step(is_done=True)

    def close(self) -> None:
        """Does nothing: the environment has no resources."""


def ask_fovea(base_url: str, model: str, asked: Sequence[Asked]) -> None:
    """Answers greedily with a running Fovea, through the Tinker SDK. The key is TINKER_API_KEY, or that of `fovea up`.

    Raises:
        RuntimeError: A question failed.
    """
    settings = RolloutSettings(SamplingSettings(LONGEST_ANSWER, 0.0), max_turns=1)
    key = os.environ.get("TINKER_API_KEY", "tml-local")
    with connect(base_url, key) as service:
        sampling = service.create_sampling_client(base_model=model).result()
        sources = [partial(_Question, one) for one in asked]
        template = ChatTemplate(sampling.get_tokenizer())
        played = asyncio.run(evaluate(TinkerPolicy(sampling), template, sources, settings, concurrency=64))
    if played.failures:
        raise RuntimeError(f"{len(played.failures)} questions failed, the first: {played.failures[0]}")
    for one, trajectory in zip(asked, played.trajectories, strict=True):
        turn = trajectory.turns[0]
        ids = turn.sampled.ids
        one.answer, one.tokens = turn.answer.text, ids[:-1] if ids and ids[-1] in template.stop_ids else ids


def agreement(folder: Path, asked: Sequence[Asked]) -> int:
    """Returns the number of answers that equal those of transformers in float32 on the processor, token by token."""
    again = [Asked(one.drawing, one.question) for one in asked]
    ask_transformers(folder, again, torch.device("cpu"), torch.float32, 1)
    return sum(one.tokens == other.tokens for one, other in zip(asked, again, strict=True))


def write_sheet(path: Path, asked: Sequence[Asked]) -> None:
    """Writes a sheet of pictures with a question and an answer below each, green if it is right."""
    wide, high, font = 256, 336, ImageFont.load_default(13)
    sheet = Image.new("RGB", (_SHEET_COLUMNS * wide, _SHEET_ROWS * high), "white")
    draw = ImageDraw.Draw(sheet)
    # Captions and other questions in turns.
    shown = [asked[at + (at // QUESTIONS) % QUESTIONS] for at in range(0, len(asked) - QUESTIONS + 1, QUESTIONS)]
    for at, one in enumerate(shown[: _SHEET_COLUMNS * _SHEET_ROWS]):
        x, y = at % _SHEET_COLUMNS * wide, at // _SHEET_COLUMNS * high
        sheet.paste(Image.fromarray(one.drawing.pixels).resize((wide - 4, 256)), (x, y))
        lines = [*_wrapped(one.question.text, 40), *_wrapped(one.answer, 40)]
        asking = len(_wrapped(one.question.text, 40))
        for number, line in enumerate(lines[:5]):
            ink = "black" if number < asking else "darkgreen" if one.is_right else "crimson"
            draw.text((x + 4, y + 258 + 15 * number), line, fill=ink, font=font)
    sheet.save(path)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width) or [""]
