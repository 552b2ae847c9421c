"""Supervised fine-tuning: steps, evaluations, early stop, and a run that can be killed and goes on as if it had not."""

from __future__ import annotations

import contextlib
import logging
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal

import tinker

from fovea.wire.errors import InvalidInput
from fovea_data.connection import Connection, Server
from fovea_data.conversation import Conversation
from fovea_data.dataset import Dataset
from fovea_data.fine_tune_progress import FineTuneProgress
from fovea_data.fine_tune_state import FineTuneState
from fovea_data.rows import Indices
from fovea_data.tuned_model import TunedModel, answers, check_positive, exact_match
from fovea_rollout.loggers import JsonLinesLogger, Logger, LoggerName, open_loggers

logger = logging.getLogger(__name__)

Score = Callable[[str, Conversation], float]
_FORWARD_ROWS = 64
"""Held-out rows of one request."""


@dataclass(frozen=True)
class FineTuneSettings:
    """How to fine-tune. The defaults are for some hundreds to thousands of rows.

    Attributes:
        epochs: Passes over the rows.
        batch_size: Rows of a step.
        learning_rate: At its peak; None takes one by the model's width.
        warm_up: Share of all steps in which the rate rises; then it falls on a half cosine to nothing.
        rank: Of the LoRA; 0 trains all parameters.
        weight_decay: Of AdamW.
        grad_clip_norm: The longest gradient; 0 does not clip.
        evaluate_every: Steps between evaluations, each of which is a point to resume from; None is an epoch.
        patience: Evaluations without a better held-out loss after which training stops; None never stops early.
        sample_answers: Whether held-out rows are answered by sampling too, where the server samples the model.
        broken_rows: `refuse` ends the run at a row that cannot be learnt; `skip` logs it and goes on.
        seed: Of the adapter and of the order of rows.
    """

    epochs: int = 12
    batch_size: int = 16
    learning_rate: float | None = None
    warm_up: float = 0.1
    rank: int = 32
    weight_decay: float = 0.0
    grad_clip_norm: float = 1.0
    evaluate_every: int | None = None
    patience: int | None = 3
    sample_answers: bool = True
    broken_rows: Literal["refuse", "skip"] = "refuse"
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(epochs=self.epochs, batch_size=self.batch_size)
        if self.broken_rows not in ("refuse", "skip"):
            raise InvalidInput(f"broken_rows is {self.broken_rows!r}; use 'refuse' or 'skip'", field="broken_rows")

    def rate_factor(self, step: int, step_count: int) -> float:
        """Share of the peak learning rate at a step, from 0."""
        rise = min(1.0, (step + 1) / max(1.0, self.warm_up * step_count))
        return rise * 0.5 * (1.0 + math.cos(math.pi * step / step_count))


def fine_tune(
    train: Dataset,
    held_out: Dataset | None = None,
    settings: FineTuneSettings | None = None,
    *,
    out: str | pathlib.Path = "fine-tune",
    model: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    loggers: Sequence[LoggerName | Logger] = (),
    score: Score = exact_match,
    progress: bool | None = None,
) -> TunedModel:
    """Trains a model to answer as the rows do.

    Called again with the same folder after it was killed, it goes on at the last evaluation.

    Args:
        train: Rows to learn.
        held_out: Rows to evaluate on; without them nothing stops early, and the last weights are kept.
        settings: How.
        out: Folder of `state.json`, `metrics.jsonl` and what loggers write.
        model: A model's name on the server; None is the first that it trains.
        base_url: Of a server that speaks the Tinker API; None reads TINKER_BASE_URL.
        api_key: None reads TINKER_API_KEY.
        loggers: Names of installed packages, and objects of your own, besides `metrics.jsonl`.
        score: Of a held-out row's answer, 0 to 1: its mean is `accuracy`.
        progress: Whether a line shows how far it is; None shows it on a terminal only.

    Returns:
        The model. Close it, or use it as a context manager: until then the server keeps it in training.

    Raises:
        InvalidInput: Settings are wrong, a row cannot be learnt (named), or `out` is of another run.
        FailedPrecondition: A logger's package is not installed, or the server trains no model.
        Exception: What the SDK raises.
    """
    settings = settings or FineTuneSettings()
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as exits:
        server = Server(base_url, api_key)
        exits.callback(server.service.close, "errored")
        served = server.model(model)
        samples = settings.sample_answers and served.sampleable is not False
        identity = {
            "model": served.model_name,
            **asdict(settings),
            "rows": train.fingerprint,
            "held-out rows": held_out.fingerprint if held_out else None,
        }
        state = FineTuneState.begin_or_resume(folder / "state.json", identity)
        connection = Connection.open(server, served, state.state, rank=settings.rank, seed=settings.seed)
        with ExitStack() as closing:
            lines = closing.enter_context(contextlib.closing(JsonLinesLogger(folder / "metrics.jsonl", state.step)))
            opened = [lines, *(closing.enter_context(contextlib.closing(one)) for one in open_loggers(loggers, folder))]
            run = _Run(
                connection, train, held_out, settings, state, folder / "state.json", opened, score if samples else None
            )
            with FineTuneProgress(run.step_count, state.step, progress) as shown:
                sampling = run.run(shown)
        exits.pop_all()  # the model closes the connection from here on
        return TunedModel(connection, state.weights, state.state, sampling, lines.rows())


@dataclass
class _Submitted:
    """A step on its way. `number` counts from 0."""

    number: int
    tokens: float
    rate: float
    skipped: int
    start: float
    backward: tinker.APIFuture[tinker.ForwardBackwardOutput]
    update: tinker.APIFuture[tinker.types.OptimStepResponse]


class _Run:
    """One run, from where its state says to its end."""

    def __init__(
        self,
        connection: Connection,
        train: Dataset,
        held_out: Dataset | None,
        settings: FineTuneSettings,
        state: FineTuneState,
        state_file: pathlib.Path,
        loggers: Sequence[Logger],
        score: Score | None,
    ) -> None:
        self._connection, self._train, self._held_out, self._settings = connection, train, held_out, settings
        self._state, self._state_file, self._loggers, self._score = state, state_file, loggers, score
        self._epoch_steps = math.ceil(len(train) / settings.batch_size)
        self.step_count = settings.epochs * self._epoch_steps
        self._order: Callable[[int], Indices] = lru_cache(maxsize=1)(lambda epoch: train.order(settings.seed, epoch))
        self._peak = settings.learning_rate or connection.learning_rate

    def run(self, shown: FineTuneProgress) -> tinker.SamplingClient | None:
        """Trains to the end; returns what samples from the best weights."""
        evaluate_every = self._settings.evaluate_every or self._epoch_steps
        waiting: _Submitted | None = None
        begin = self._state.step if not self._state.is_finished else self.step_count
        for number in range(begin, self.step_count):
            submitted = self._submit(number)  # reads rows while the step before is computed
            if waiting:
                self._finish(waiting, shown)
            waiting = submitted
            if (number + 1) % evaluate_every == 0 or number + 1 == self.step_count:
                self._finish(waiting, shown)
                waiting = None
                self._evaluate(number + 1, shown)
                if self._state.is_finished:
                    break
        return self._connection.sampling(self._state.weights) if self._score else None

    def _submit(self, number: int) -> _Submitted | None:
        epoch, place = divmod(number, self._epoch_steps)
        size = self._settings.batch_size
        rows = self._order(epoch)[place * size : (place + 1) * size].tolist()
        start, data, skipped = time.monotonic(), list[tinker.Datum](), 0
        for row in rows:
            try:
                data += self._connection.encoder.datums(self._train[row])
            except InvalidInput as error:
                if self._settings.broken_rows == "refuse":
                    raise
                logger.warning("skipped: %s", error.message)
                skipped += 1
        if not data:
            return None
        rate = self._peak * self._settings.rate_factor(number, self.step_count)
        adam = tinker.AdamParams(
            learning_rate=rate, weight_decay=self._settings.weight_decay, grad_clip_norm=self._settings.grad_clip_norm
        )
        training = self._connection.training
        backward = training.forward_backward(data, "cross_entropy")
        return _Submitted(number, _weight(data), rate, skipped, start, backward, training.optim_step(adam))

    def _finish(self, step: _Submitted | None, shown: FineTuneProgress) -> None:
        if step is None:
            return
        loss = step.backward.result().metrics["loss:sum"] / step.tokens
        step.update.result()
        figures = {"loss": loss, "learning_rate": step.rate, "answer_tokens": step.tokens, "skipped_rows": step.skipped}
        self._log(step.number + 1, {**figures, "seconds": time.monotonic() - step.start})
        shown.count_step(step.number + 1, loss)

    def _evaluate(self, step: int, shown: FineTuneProgress) -> None:
        """Evaluates, keeps the best weights and a state to resume from, and says when training is over."""
        state, training = self._state, self._connection.training
        weights = training.save_weights_for_sampler(f"step-{step}").result().path
        figures: dict[str, float] = {}
        if self._held_out is not None:
            figures["held_out_loss"] = self._held_out_loss(self._held_out)
            if self._score:
                figures["accuracy"] = self._accuracy(self._held_out, self._connection.sampling(weights), self._score)
            self._log(step, figures)
            shown.count_evaluation(figures)
        loss = figures.get("held_out_loss")
        dropped = state.weights
        if loss is None or state.best_loss is None or loss < state.best_loss:
            state.weights, state.best_step, state.best_loss, state.misses = weights, step, loss, 0
        else:
            dropped, state.misses = weights, state.misses + 1
        is_out_of_patience = self._settings.patience is not None and state.misses >= self._settings.patience
        state.is_finished = step == self.step_count or is_out_of_patience
        state.state, state.step = training.save_state(state.next_name, overwrite=True).result().path, step
        state.save(self._state_file)
        if dropped:
            self._connection.delete(dropped)

    def _held_out_loss(self, rows: Dataset) -> float:
        loss, tokens = 0.0, 0.0
        for begin in range(0, len(rows), _FORWARD_ROWS):
            data = [
                datum
                for index in range(begin, min(begin + _FORWARD_ROWS, len(rows)))
                for datum in self._connection.encoder.datums(rows[index])
            ]
            loss += self._connection.training.forward(data, "cross_entropy").result().metrics["loss:sum"]
            tokens += _weight(data)
        return loss / tokens

    def _accuracy(self, rows: Dataset, sampling: tinker.SamplingClient, score: Score) -> float:
        encoder, total = self._connection.encoder, 0.0
        for begin in range(0, len(rows), _FORWARD_ROWS):
            asked = [rows[index] for index in range(begin, min(begin + _FORWARD_ROWS, len(rows)))]
            # A right answer is not cut; a longer one is wrong whatever follows.
            longest = max(encoder.answer_length(one) for one in asked) + 1
            said = answers(sampling, encoder, [one.question for one in asked], longest)
            total += sum(score(answer, one) for answer, one in zip(said, asked, strict=True))
        return total / len(rows)

    def _log(self, step: int, figures: dict[str, float]) -> None:
        for one in self._loggers:
            one.log(step, figures)


def _weight(data: Sequence[tinker.Datum]) -> float:
    return float(sum(datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in data))
