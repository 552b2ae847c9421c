"""Trains a vision tower, its connector and the language model behind them on drawings, in a plain torch loop.

First the tower alone learns to make tokens that are close to the words of what they show, and then the whole model to
answer. All questions about a picture share its tokens: each sees the picture and itself, but no other question.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from fovea_real.architecture import AROUND, END, IMAGE, START, WHOLE, Tower
from fovea_real.drawings import COLOURS, MOST_SHAPES, SHAPES, TASKS, Drawing, Split, drawing

Arrays = dict[str, npt.NDArray]
Say = Callable[[str], None]
NOTHING = "nothing"
NAMES = (NOTHING, *SHAPES, "dot", "bar", "wall", *"0123456789", *"abcdefghijklmnopqrstuvwxyz")
"""The words to which the tokens of a picture come close, one for each; the first for the ground."""
IGNORED = -100
_PADDING = -1
_SHARPNESS = 16.0
"""Factor of a cosine as a logit."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a run. Its pictures depend on nothing else; the number of steps depends on the machine.

    Attributes:
        seed: Seed of new weights and pictures.
        seconds: Duration of training.
        steps: Number of steps; None trains for `seconds`.
        tower: Size of the tower.
        tasks, most_shapes: The drawings (see `drawing`).
        batch, micro_batch: Pictures a step, and at once.
        length: Tokens of a picture and the questions about it; questions that do not fit are left out.
        tower_share: Share of the run in which the tower learns alone.
        tower_rate, language_rate: The highest learning rates of the new parts and of the language model.
        word_weight: Weight of the words' loss at the beginning; it falls to a fifth.
        workers: Processes that draw; 0 draws in this process.
        compiles: Compiles each layer.
    """

    seed: int = 0
    seconds: float = 480.0
    steps: int | None = None
    tower: Tower = field(default_factory=Tower)
    tasks: tuple[str, ...] = TASKS
    most_shapes: int = MOST_SHAPES
    batch: int = 256
    micro_batch: int = 128
    length: int = 192
    tower_share: float = 0.12
    tower_rate: float = 8e-4
    language_rate: float = 2e-4
    word_weight: float = 0.5
    workers: int = 0
    compiles: bool = False

    def draw(self, split: Split, index: int) -> Drawing:
        """Draws a picture of this recipe."""
        return drawing(self.seed, split, index, self.tower.side, self.tasks, self.most_shapes)


class Encoder:
    """Turns drawings into arrays: tokens of pictures and questions, and the words of what each token shows."""

    def __init__(self, tokenizer: Any, tower: Tower, length: int) -> None:
        self._tower, self._length = tower, length
        self._ids = lru_cache(maxsize=65536)(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
        opening = self._ids(f"{START}user\n{AROUND}{WHOLE}")
        self.first = len(opening)
        """The position of a picture's first token."""
        self._prefix = [*opening, *self._ids(IMAGE) * tower.cells**2, *self._ids(AROUND)]
        self.names = [self._word(name) for name in NAMES]
        self.colours = [self._word(colour) for colour in COLOURS]
        self._pad = self._ids(END)[0]

    def _word(self, word: str) -> int:
        return int(self._ids(word if word.isdigit() else f" {word}")[0])

    def encode(self, drawings: Sequence[Drawing], seed: int) -> tuple[Arrays, list[list[str]]]:
        """Returns the arrays of a batch, and the kinds of each picture's questions.

        Arrays: `pixels` uint8 [B, side, side, 3]; `ids`, `positions`, `parts` (0 the picture, then a number for each
        question) and `labels` int64 [B, length]; `names` and `colours` int64 [B, cells * cells].
        """
        size, cells = (len(drawings), self._length), self._tower.cells
        found = {
            "pixels": np.stack([one.pixels for one in drawings]),
            "ids": np.full(size, self._pad),
            "positions": np.zeros(size, np.int64),
            "parts": np.full(size, _PADDING),
            "labels": np.full(size, IGNORED),
            "names": np.zeros((len(drawings), cells, cells), np.int64),
            "colours": np.full((len(drawings), cells, cells), IGNORED),
        }
        kinds = []
        for row, one in enumerate(drawings):
            kinds.append(self._write(one, row, found, np.random.default_rng([seed, row])))
            self._name(one, found["names"][row], found["colours"][row])
        return found, kinds

    def _write(self, one: Drawing, row: int, found: Arrays, rng: np.random.Generator) -> list[str]:
        end = len(self._prefix)
        found["ids"][row, :end], found["positions"][row, :end], found["parts"][row, :end] = self._prefix, range(end), 0
        # The caption first, so that it is never left out, and then the others in any order.
        order = [0, *(1 + rng.permutation(len(one.questions) - 1))]
        kinds: list[str] = []
        for question in (one.questions[at] for at in order):
            asked = self._ids(f"{question.text}{END}\n{START}assistant\n")
            ids = [*asked, *self._ids(f"{question.answer}{END}")]
            stop = end + len(ids) - 1  # the last token is only predicted
            if stop > self._length:
                continue
            kinds.append(question.kind)
            found["ids"][row, end:stop] = ids[:-1]
            found["positions"][row, end:stop] = range(len(self._prefix), len(self._prefix) + stop - end)
            found["parts"][row, end:stop] = len(kinds)
            found["labels"][row, end + len(asked) - 1 : stop] = ids[len(asked) :]
            end = stop
        return kinds

    def _name(self, one: Drawing, names: npt.NDArray, colours: npt.NDArray) -> None:
        cell = 256 / self._tower.cells
        for thing in one.things:
            left, top, right, bottom = (max(0.0, min(edge, 255.9)) / cell for edge in thing.box)
            rows, columns = _centres(top, bottom), _centres(left, right)
            names[rows, columns] = NAMES.index(thing.word)
            colours[rows, columns] = list(COLOURS).index(thing.colour)


def _centres(low: float, high: float) -> slice:
    """Returns the cells with their centres between two edges; the cell in the middle if there is none."""
    first, last = math.ceil(low - 0.5), math.floor(high - 0.5)
    middle = int((low + high) / 2)
    return slice(first, last + 1) if first <= last else slice(middle, middle + 1)


@contextmanager
def batches(recipe: Recipe, encoder: Encoder) -> Iterator[Iterator[Arrays]]:
    """Yields an endless iterator of training batches, in the same order for any number of workers.

    A batch is valid until the caller takes the next one. Workers draw into memory that they share with this process.
    Enter before the first use of a GPU, because workers are forks.
    """
    if recipe.workers == 0:
        yield (_drawn(recipe, encoder, step) for step in _steps())
        return
    context = multiprocessing.get_context("fork")
    example = _drawn(recipe, encoder, 0)
    slots = [[_shared(example) for _ in range(2)] for _ in range(recipe.workers)]
    free = [context.Semaphore(2) for _ in slots]
    ready = [context.Semaphore(0) for _ in slots]

    def work(worker: int) -> None:
        for turn in _steps():
            free[worker].acquire()
            for name, array in _drawn(recipe, encoder, turn * recipe.workers + worker).items():
                slots[worker][turn % 2][name][:] = array
            ready[worker].release()

    def take() -> Iterator[Arrays]:
        for step in _steps():
            turn, worker = divmod(step, recipe.workers)
            if not ready[worker].acquire(timeout=120.0):
                raise RuntimeError(f"worker {worker} has drawn nothing for two minutes")
            yield slots[worker][turn % 2]
            free[worker].release()

    processes = [context.Process(target=work, args=(worker,), daemon=True) for worker in range(recipe.workers)]
    for process in processes:
        process.start()
    try:
        yield take()
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _steps() -> Iterator[int]:
    step = 0
    while True:
        yield step
        step += 1


def _drawn(recipe: Recipe, encoder: Encoder, step: int) -> Arrays:
    indices = range(step * recipe.batch, (step + 1) * recipe.batch)
    return encoder.encode([recipe.draw("train", index) for index in indices], step)[0]


def _shared(example: Arrays) -> Arrays:
    """Returns arrays like the example's in memory that is shared with forks, and is not limited by /dev/shm."""
    return {
        name: np.frombuffer(mmap.mmap(-1, array.nbytes), array.dtype).reshape(array.shape)
        for name, array in example.items()
    }


def dtype_on(device: torch.device) -> torch.dtype:
    """Returns the element type of the checkpoint that is trained on a device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Learner:
    """The model in the element type of its checkpoint, with float32 copies of its weights for the optimizer."""

    def __init__(self, model: Any, encoder: Encoder, recipe: Recipe, device: torch.device) -> None:
        self.dtype = dtype_on(device)
        self.model: Any = model.to(device, self.dtype).train()
        self._parts, self._recipe, self._encoder, self._device = model.model, recipe, encoder, device
        self._names, self._colours = (torch.tensor(ids, device=device) for ids in (encoder.names, encoder.colours))
        self._name_weights = torch.ones(len(NAMES), device=device)
        self._name_weights[0] = 0.05  # most of a picture is ground
        new = [*self._parts.vision_model.parameters(), *self._parts.connector.parameters()]
        is_new = {id(weight) for weight in new}
        language = [weight for weight in model.parameters() if id(weight) not in is_new]
        self._weights: list[Any] = [*new, *language]
        self._masters = [weight.detach().float().clone() for weight in self._weights]
        groups = [
            {"params": self._masters[: len(new)], "weight_decay": 0.05},
            {"params": self._masters[len(new) :], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=device.type == "cuda")
        if recipe.compiles:
            for layer in (*self._parts.vision_model.encoder.layers, *self._parts.text_model.layers):
                layer.compile()

    def step(self, arrays: Arrays, progress: float, warm: float) -> tuple[Tensor, Tensor]:
        """Learns from a batch; returns the mean losses of answers and words.

        Args:
            arrays: The batch.
            progress: Share of the run that is done.
            warm: Share of the warm-up of the parts that learn now.
        """
        recipe = self._recipe
        is_whole = progress >= recipe.tower_share
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
        rates = recipe.tower_rate, recipe.language_rate if is_whole else 0.0
        # The tower is warm when the language model begins, but must not run away from it.
        warmths = (max(warm, 0.3) if is_whole else warm), warm
        for group, rate, warmth in zip(self._optimizer.param_groups, rates, warmths, strict=True):
            group["lr"] = rate * decay * min(1.0, warmth)
        weight = recipe.word_weight * (1 - 0.8 * progress) if is_whole else 1.0
        parts, told, named = recipe.batch // recipe.micro_batch, [], []
        for at in range(parts):
            rows = slice(at * recipe.micro_batch, (at + 1) * recipe.micro_batch)
            answer, words = self.losses(self._moved(arrays, rows), is_whole)
            torch.autograd.backward((answer + weight * words) / parts)
            told.append(answer.detach())
            named.append(words.detach())
        self._update()
        return torch.stack(told).mean(), torch.stack(named).mean()

    def losses(self, batch: dict[str, Tensor], is_whole: bool) -> tuple[Tensor, Tensor]:
        """Returns the loss of the answers (0 for the tower alone), and of the words of a picture's tokens."""
        images = self._images(batch)
        words = self._word_loss(images, batch)
        if not is_whole:
            return torch.zeros((), device=self._device), words
        labels = batch["labels"]
        logits = self._logits(images, batch)
        return cross_entropy(logits.float(), labels[labels != IGNORED]), words

    @torch.no_grad()
    def exact(self, arrays: Arrays, kinds: Sequence[Sequence[str]]) -> dict[str, float]:
        """Returns the share of a batch's questions with a greedy answer that is right to the letter, captions apart.

        A greedy answer is the right one if and only if each of its tokens is the likeliest after those before it.
        """
        found: dict[str, list[bool]] = {}
        self.model.eval()
        for at in range(0, len(kinds), self._recipe.micro_batch):
            batch = self._moved(arrays, slice(at, at + self._recipe.micro_batch))
            labels, parts = batch["labels"].cpu(), batch["parts"].cpu()
            likeliest = torch.full_like(labels, IGNORED)
            likeliest[labels != IGNORED] = self._logits(self._images(batch), batch).argmax(-1).cpu()
            for row, names in enumerate(kinds[at : at + self._recipe.micro_batch]):
                for number, name in enumerate(names, 1):
                    mine = parts[row] == number
                    is_right = bool((likeliest[row, mine] == labels[row, mine]).all())
                    found.setdefault("captions" if name == "caption" else "short answers", []).append(is_right)
        self.model.train()
        return {name: sum(right) / len(right) for name, right in found.items()}

    def _moved(self, arrays: Arrays, rows: slice) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array[rows].copy()).to(self._device) for name, array in arrays.items()}

    def _images(self, batch: dict[str, Tensor]) -> Tensor:
        pixels = (batch["pixels"].permute(0, 3, 1, 2).float() / 127.5 - 1).to(self.dtype)
        seen: Tensor = self._parts.connector(self._parts.vision_model(pixel_values=pixels).last_hidden_state)
        return seen

    def _word_loss(self, images: Tensor, batch: dict[str, Tensor]) -> Tensor:
        seen = normalize(images.flatten(0, 1).float(), dim=-1)
        table = self.model.get_input_embeddings().weight.detach()
        names, colours = (normalize(table[ids].float(), dim=-1) for ids in (self._names, self._colours))
        named, coloured = batch["names"].flatten(), batch["colours"].flatten()
        loss = cross_entropy(_SHARPNESS * seen @ names.T, named, self._name_weights)
        shown = coloured != IGNORED
        return loss + cross_entropy(_SHARPNESS * seen[shown] @ colours.T, coloured[shown])

    def _logits(self, images: Tensor, batch: dict[str, Tensor]) -> Tensor:
        first, last = self._encoder.first, self._encoder.first + images.shape[1]
        texts = self.model.get_input_embeddings()(batch["ids"])
        embedded = torch.cat([texts[:, :first], images.to(texts.dtype), texts[:, last:]], dim=1)
        parts, order = batch["parts"], torch.arange(texts.shape[1], device=self._device)
        is_seen = (parts[:, None] == 0) | (parts[:, None] == parts[:, :, None])
        is_seen = is_seen & (order[None] <= order[:, None])
        mask = torch.where(is_seen, 0.0, torch.finfo(self.dtype).min).to(self.dtype)[:, None]
        hidden = self._parts.text_model(
            inputs_embeds=embedded, attention_mask=mask, position_ids=batch["positions"], use_cache=False
        ).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden[batch["labels"] != IGNORED])
        return logits

    @torch.no_grad()
    def _update(self) -> None:
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        torch._foreach_copy_(self._weights, self._masters)


def train(
    model: Any,
    processor: Any,
    recipe: Recipe,
    device: torch.device,
    say: Say,
    every_s: float = 20.0,
    checked: int = 128,
) -> list[dict[str, float]]:
    """Trains the model in place; returns what was logged: step, pictures, seconds, losses and held-out scores.

    Args:
        model: The model, in float32.
        processor: Its processor.
        recipe: Settings of the training.
        device: The device.
        say: Prints a line.
        every_s: Seconds between two lines.
        checked: Number of held-out pictures that are asked about for each line.
    """
    encoder = Encoder(processor.tokenizer, recipe.tower, recipe.length)
    held_out = encoder.encode([recipe.draw("held-out", index) for index in range(10_000, 10_000 + checked)], 0)
    log: list[dict[str, float]] = []
    with batches(recipe, encoder) as source:
        learner = Learner(model, encoder, recipe, device)
        begun = logged = time.monotonic()
        progress, step, joined = 0.0, 0, 0
        while progress < 1:
            is_whole = progress >= recipe.tower_share
            joined = joined or (step if is_whole else 0)
            warm = (step - joined + 1) / 100
            answer, words = learner.step(next(source), progress, warm)
            step += 1
            now = time.monotonic()
            progress = step / recipe.steps if recipe.steps else (now - begun) / recipe.seconds
            if step == 1 or now - logged >= every_s or progress >= 1:
                logged = now
                line = {"step": step, "pictures": step * recipe.batch, "seconds": round(now - begun, 1)}
                losses = {"answer loss": round(float(answer), 4), "word loss": round(float(words), 4)}
                exact = learner.exact(*held_out) if is_whole else {}
                log.append({**line, **losses, **{name: round(share, 4) for name, share in exact.items()}})
                say(", ".join(f"{name} {value}" for name, value in log[-1].items()))
    model.eval()
    return log
