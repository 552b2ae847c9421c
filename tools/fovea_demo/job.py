"""Fine-tunes a LoRA on the scans through the Tinker SDK, and samples held-out pictures before, during and after."""

import math
import time
from dataclasses import dataclass, field

import numpy as np
import tinker
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tinker import AdamParams, SamplingClient, SamplingParams, ServiceClient, TrainingClient

from fovea_demo.digits import Prompter, Scan


@dataclass(frozen=True)
class Recipe:
    """The training settings. The defaults were found for the tiny model by a search.

    Attributes:
        rank: The rank of the adapter.
        epochs: The number of passes over the training scans.
        batch_size: The number of scans in one step.
        learning_rate: The peak learning rate. It rises over `warmup_steps` and then falls to zero on a half cosine.
        warmup_steps: The number of steps over which the learning rate rises.
        image_token_count: The number of placeholder tokens of one picture: 256 x 256 pixels in patches of 16, merged
            2 x 2.
    """

    rank: int = 32
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 7
    image_token_count: int = 64

    def learning_rate_at(self, step: int, step_count: int) -> float:
        """Returns the learning rate of a step; steps are counted from 0."""
        rise = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * rise * 0.5 * (1.0 + math.cos(math.pi * step / step_count))


@dataclass
class History:
    """The results of the job, for the report.

    Attributes:
        losses: The mean negative log-probability of an answer token, for each step.
        accuracies: Pairs of a step and the fraction of held-out scans that the model reads correctly after it.
        answers: The model's answer to each held-out scan after training.
        first_answers: The model's answer to each held-out scan before training.
    """

    losses: list[float] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    first_answers: list[str] = field(default_factory=list)
    train_s: float = 0.0


def fine_tune(
    base_url: str, api_key: str, base_model: str, train: list[Scan], held_out: list[Scan], recipe: Recipe, seed: int
) -> History:
    """Runs the job on a Tinker server and returns its results."""
    with ServiceClient(base_url=base_url, api_key=api_key) as service, _progress() as progress:
        training = service.create_lora_training_client(base_model=base_model, rank=recipe.rank, seed=seed).result()
        prompter = Prompter(training.get_tokenizer())
        history = History()
        before = service.create_sampling_client(base_model=base_model).result()
        history.first_answers = _ask(before, prompter, held_out, progress, "accuracy before")
        history.accuracies.append((0, _accuracy(history.first_answers, held_out)))
        start = time.monotonic()
        _train(training, prompter, train, held_out, recipe, seed, history, progress)
        history.train_s = time.monotonic() - start
        return history


def _train(
    training: TrainingClient,
    prompter: Prompter,
    train: list[Scan],
    held_out: list[Scan],
    recipe: Recipe,
    seed: int,
    history: History,
    progress: Progress,
) -> None:
    rng = np.random.default_rng(seed)
    datums = [prompter.datum(scan, recipe.image_token_count) for scan in train]
    steps_per_epoch = math.ceil(len(datums) / recipe.batch_size)
    step_count = recipe.epochs * steps_per_epoch
    task = progress.add_task("training", total=step_count)
    for epoch in range(recipe.epochs):
        order = rng.permutation(len(datums))
        for batch in np.array_split(order, steps_per_epoch):
            _step(training, [datums[i] for i in batch], recipe, step_count, history)
            progress.update(task, advance=1, description=f"training, loss {history.losses[-1]:.3f}")
        sampling = training.save_weights_and_get_sampling_client().result()
        history.answers = _ask(sampling, prompter, held_out, progress, f"accuracy after epoch {epoch + 1}")
        history.accuracies.append((len(history.losses), _accuracy(history.answers, held_out)))


def _step(
    training: TrainingClient, batch: list[tinker.Datum], recipe: Recipe, step_count: int, history: History
) -> None:
    rate = recipe.learning_rate_at(len(history.losses), step_count)
    backward = training.forward_backward(batch, "cross_entropy")
    step = training.optim_step(AdamParams(learning_rate=rate, eps=1e-8))
    metrics = backward.result().metrics
    step.result()
    answer_tokens = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in batch)
    history.losses.append(metrics["loss:sum"] / answer_tokens)


def _ask(
    sampling: SamplingClient, prompter: Prompter, scans: list[Scan], progress: Progress, description: str
) -> list[str]:
    params = SamplingParams(max_tokens=4, temperature=0.0, stop=[prompter.end_token])
    task = progress.add_task(description, total=len(scans))
    pending = [sampling.sample(prompter.prompt(scan), num_samples=1, sampling_params=params) for scan in scans]
    answers: list[str] = []
    for future in pending:
        answers.append(prompter.read(list(future.result().sequences[0].tokens)))
        share = sum(map(_is_right, answers, scans)) / len(answers)
        progress.update(task, advance=1, description=f"{description}: {share:.3f}")
    return answers


def _is_right(answer: str, scan: Scan) -> bool:
    return answer == str(scan.digit)


def _accuracy(answers: list[str], scans: list[Scan]) -> float:
    return sum(map(_is_right, answers, scans)) / len(scans)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        refresh_per_second=4,
    )
