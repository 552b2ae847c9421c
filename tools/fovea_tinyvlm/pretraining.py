"""The short pre-training: cross-entropy on the answers, one-cycle AdamW, a fixed number of steps.

Shapes: B pictures a step, T tokens a sequence, N patches a picture, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen3VLForConditionalGeneration

from fovea_tinyvlm.curriculum import Lesson, draw_lessons
from fovea_tinyvlm.patches import MERGE_SIZE, PATCH_SIZE, SIDE, TOKENS_PER_PICTURE, StillPatchEmbedding, patchify
from fovea_tinyvlm.prose import PROSE
from fovea_tinyvlm.recipe import Recipe
from fovea_tinyvlm.signs import invent_alphabet
from fovea_tinyvlm.special_tokens import IM_END, IM_START, VISION_END, VISION_START

logger = logging.getLogger(__name__)

IGNORED = -100
_PROSE_LINES = 4
_WARM_UP_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Sequences padded on the right.

    Attributes:
        tokens: int64 [B, T].
        targets: int64 [B, T], the next token where it is learnt, else -100.
    """

    tokens: Tensor
    targets: Tensor


def pretrain(model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    """Trains all weights of `model` in place for `recipe.step_count` steps.

    The result is deterministic for a recipe.
    """
    rng = np.random.default_rng(recipe.seed)
    alphabet = invent_alphabet(rng)
    teacher = _Teacher(model, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.monotonic()
    loss_average = math.nan
    model.train()
    columns = (TextColumn("pre-training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, TextColumn("loss {task.fields[loss]:.3f}"), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task("steps", total=recipe.step_count, loss=loss_average)
        for step in range(recipe.step_count):
            lessons = draw_lessons(alphabet, recipe.batch_size, rng)
            lines = [PROSE[index] for index in rng.integers(0, len(PROSE), _PROSE_LINES)]
            loss = teacher.picture_loss(lessons) + 0.1 * teacher.prose_loss(lines)
            optimizer.param_groups[0]["lr"] = recipe.learning_rate * _schedule(step, recipe.step_count)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            value = float(loss.detach())
            loss_average = value if math.isnan(loss_average) else 0.95 * loss_average + 0.05 * value
            progress.update(task, advance=1, loss=loss_average)
            if step % 25 == 24:
                logger.debug("step %d loss %.3f", step + 1, loss_average)
    teacher.dismiss()
    model.eval()
    logger.info(
        "pre-trained for %d steps of %d pictures in %.0f s, loss %.3f",
        recipe.step_count,
        recipe.batch_size,
        time.monotonic() - started,
        loss_average,
    )


def _progress() -> Progress:
    columns = (TextColumn("pre-training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    loss = TextColumn("loss {task.fields[loss]:.3f}")
    return Progress(*columns, loss, console=Console(stderr=True), transient=True)


def _schedule(step: int, step_count: int) -> float:
    warm_up = min(1.0, (step + 1) / (_WARM_UP_SHARE * step_count))
    return warm_up * 0.5 * (1.0 + math.cos(math.pi * step / step_count))


class _Teacher:
    """Computes the losses. While it exists, the patch embedding of the model processes each frame only once."""

    def __init__(self, model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._patch_embedding = model.model.visual.patch_embed
        model.model.visual.patch_embed = StillPatchEmbedding(self._patch_embedding.proj)
        self._opening = tokenizer(f"{IM_START}user\n{VISION_START}")["input_ids"]
        self._image_token_id = model.config.image_token_id

    def dismiss(self) -> None:
        self._model.model.visual.patch_embed = self._patch_embedding

    def picture_loss(self, lessons: list[Lesson]) -> Tensor:
        """Returns the mean cross-entropy of the answer tokens, float32 []."""
        batch = _pad([self._lesson_tokens(lesson) for lesson in lessons])
        side = SIDE // PATCH_SIZE
        grid = torch.tensor([[1, side, side]] * len(lessons))
        patches = patchify([lesson.pixels for lesson in lessons])
        vision = self._model.model.visual(patches, grid_thw=grid)
        is_image = batch.tokens == self._image_token_id
        embeddings = self._model.model.language_model.embed_tokens(batch.tokens)
        embeddings = embeddings.masked_scatter(is_image[..., None], vision.pooler_output)
        hidden = self._model.model.language_model(
            inputs_embeds=embeddings,
            position_ids=self._positions(batch.tokens.shape[1])[:, None].expand(3, len(lessons), -1),
            visual_pos_masks=is_image,
            deepstack_visual_embeds=vision.deepstack_features,
            use_cache=False,
        ).last_hidden_state
        return self._loss(hidden, batch.targets)

    def prose_loss(self, lines: list[str]) -> Tensor:
        """Returns the mean cross-entropy of all tokens, float32 []."""
        rows = [[(token, True) for token in self._tokenizer(line + IM_END)["input_ids"]] for line in lines]
        batch = _pad(rows)
        hidden = self._model.model.language_model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        return self._loss(hidden, batch.targets)

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        # Only the learnt positions pass through the head, because the vocabulary is ten times as wide as the model.
        learnt = targets != IGNORED
        return nn.functional.cross_entropy(self._model.lm_head(hidden[learnt]), targets[learnt])

    def _lesson_tokens(self, lesson: Lesson) -> list[tuple[int, bool]]:
        image = [*self._opening, *[self._image_token_id] * TOKENS_PER_PICTURE]
        row = [(token, False) for token in image]
        for index, (question, answer) in enumerate(lesson.turns):
            opening = VISION_END if index == 0 else f"\n{IM_START}user\n"
            text = f"{opening}{question}{IM_END}\n{IM_START}assistant\n"
            row += [(token, False) for token in self._tokenizer(text)["input_ids"]]
            row += [(token, True) for token in self._tokenizer(answer + IM_END)["input_ids"]]
        return row

    def _positions(self, length: int) -> Tensor:
        """Returns the MRoPE positions, int64 [3, T], of a sequence that begins with one picture."""
        start, side = len(self._opening), SIDE // PATCH_SIZE // MERGE_SIZE
        cell = torch.arange(TOKENS_PER_PICTURE)
        image = start + torch.stack([torch.zeros_like(cell), cell // side, cell % side])
        before = torch.arange(start).expand(3, -1)
        after = (start + side + torch.arange(length - start - TOKENS_PER_PICTURE)).expand(3, -1)
        return torch.cat([before, image, after], dim=1)


def _pad(rows: list[list[tuple[int, bool]]]) -> TokenBatch:
    length = max(len(row) for row in rows) - 1
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    targets = torch.full((len(rows), length), IGNORED, dtype=torch.int64)
    for index, row in enumerate(rows):
        # Attention is causal and padding comes last, so no learnt position attends to padding and no mask is needed.
        tokens[index, : len(row) - 1] = torch.tensor([token for token, _ in row[:-1]])
        targets[index, : len(row) - 1] = torch.tensor([token if learnt else IGNORED for token, learnt in row[1:]])
    return TokenBatch(tokens, targets)
