"""Supervised fine-tuning: steps, evaluations, early stopping, and resuming a run that was killed."""

from __future__ import annotations

import contextlib
import logging
import math
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from fovea.wire.conventions import MAX_PICTURE_SIDE
from fovea.wire.errors import FailedPrecondition, InvalidInput, NotFinite
from fovea_data.answer_counts import AnswerCounts
from fovea_data.connection import Connection, Server
from fovea_data.conversation import Conversation, check_positive, exact_match
from fovea_data.dataset import Dataset
from fovea_data.fine_tune_progress import CheckProgress, FineTuneProgress, FineTuneState
from fovea_data.row_check import BrokenRows, CheckedRows, RowEncoder, check_rows
from fovea_data.rows import Indices
from fovea_data.tuned_model import TunedModel, answers
from fovea_rollout.late_sdk import tinker
from fovea_rollout.line_chart import write_charts
from fovea_rollout.loop.live_reports import LiveReports, judgement
from fovea_rollout.loop.loggers import JsonLinesLogger, Logger, LoggerName, open_loggers
from fovea_rollout.policies.policy import Settings
from fovea_rollout.stopping import ending_with_a_line

logger = logging.getLogger(__name__)

Score = Callable[[str, Conversation], float]
_OF_DIVERGENCE = ("not finite", "NaN", " is nan", " is inf", "norm nan", "norm inf")
"""Words in servers' errors about a model with numbers that overflowed."""
_AMONG_DATA = re.compile(r"\bdat(a|um)\[\d+\]")
"""Servers' names of a datum in a request."""
_FORWARD_ROWS = 64
"""The most held-out rows of one request."""


@dataclass(frozen=True)
class FineTuneSettings(Settings):
    """Settings of fine-tuning. The defaults are for some hundreds to thousands of rows.

    Attributes:
        epochs: Number of passes over the rows.
        batch_size: Rows of a step.
        learning_rate: Peak of the learning rate; None computes it from the model's width.
        warm_up: Share of all steps in which the rate rises. Afterwards it falls to 0 on a half cosine.
        rank: Rank of the LoRA, limited by the server; 0 trains all parameters.
        train_unembed: Whether the LoRA adapts the unembedding. None adapts it unless the model ties it to its
            embeddings: PEFT's `merge_and_unload` would change both (docs/guides/first-fine-tune.md).
        weight_decay: Weight decay of AdamW.
        grad_clip_norm: Largest norm of the gradient; 0 does not clip.
        evaluate_every: Steps between evaluations, at which the run can resume; None is one epoch.
        patience: Evaluations without a better held-out loss after which training stops; None never stops early.
        sample_answers: Whether to answer held-out rows by sampling too, if the server samples the model.
        broken_rows: Treatment of rows that cannot be read or encoded, or that the server refuses, including held-out
            rows. `refuse` raises an error about the first before the first step; `skip` logs each and leaves it out.
        seed: Seed of the adapter and of the order of the rows.
    """

    epochs: int = 12
    batch_size: int = 16
    learning_rate: float | None = None
    warm_up: float = 0.1
    rank: int = 32
    train_unembed: bool | None = None
    weight_decay: float = 0.0
    grad_clip_norm: float = 1.0
    evaluate_every: int | None = None
    patience: int | None = 3
    sample_answers: bool = True
    broken_rows: BrokenRows = "refuse"
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(epochs=self.epochs, batch_size=self.batch_size)
        for name in ("evaluate_every", "patience"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidInput(f"{name} is {value}; it must be 1 or more, or None", field=name)
        for name in ("learning_rate", "rank", "weight_decay", "grad_clip_norm"):
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                raise InvalidInput(f"{name} is {value}; it must be 0 or more, and finite", field=name)
        if not 0 <= self.warm_up <= 1:
            raise InvalidInput(f"warm_up is {self.warm_up}; it must be from 0 to 1", field="warm_up")
        if self.broken_rows not in ("refuse", "skip"):
            raise InvalidInput(f"broken_rows is {self.broken_rows!r}; use 'refuse' or 'skip'", field="broken_rows")

    def rate_factor(self, step: int, step_count: int) -> float:
        """Returns the share of the peak learning rate at a step; steps count from 0."""
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
    """Trains a model to answer like the rows.

    All rows are encoded once before the first step, to find rows that are broken or have changed since an earlier run.
    A killed run resumes at its last evaluation: call `fine_tune` again with the same folder, settings and rows.

    Args:
        train: Rows to learn. The checkpoints record the limit of their pictures' size (`max_side`), and the question
            and system prompt if each row asks about one picture in the same words.
        held_out: Rows to evaluate on, with the same `max_side`. Without them training never stops early, and keeps the
            last weights.
        settings: Settings; None takes the defaults.
        out: Folder of `state.json`, `metrics.jsonl`, `chart.html` and the loggers' files.
        model: Name of a model on the server; None takes the first that can be trained.
        base_url: Address of a Tinker server; None reads TINKER_BASE_URL.
        api_key: API key; None reads TINKER_API_KEY.
        loggers: Names of installed packages, or own objects, to log to besides `metrics.jsonl`.
        score: Scores the answer to a held-out row, 0 to 1. The mean is `accuracy`.
        progress: Whether to show a line of progress, and one on the end of the run with the path of the weights. None
            shows the first on a terminal, and elsewhere a line after 5 seconds, and then up to every half minute.

    Returns:
        The model. Close it, or use it as a context manager. Until then the server keeps it in training.

    Raises:
        InvalidInput: A setting is wrong, a row is broken (the error names it), all rows are broken, or `out` belongs to
            a run with other settings or rows.
        NotFound: The server does not have the model.
        NotConnected: No server responds, or it refuses the API key. It is a FailedPrecondition.
        FailedPrecondition: The server trains no model, a logger's package is not installed, or the model diverged.
        Stopped: The user pressed Ctrl-C. It is a KeyboardInterrupt, and ends a program with one line.
        tinker.TinkerError: The server refuses a request, for example with a key that is revoked during the run.
    """
    settings = settings if settings is not None else FineTuneSettings()
    if held_out is not None and held_out.max_side != train.max_side:
        raise InvalidInput(
            f"held_out has max_side {held_out.max_side}, but train has {train.max_side}: give both the same, because a"
            " model should be evaluated on pictures of the size that it is trained on",
            field="held_out",
        )
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as exits, ending_with_a_line(lambda: _stop_line(folder)):
        server = Server(base_url, api_key, progress)
        exits.callback(server.service.close, "errored")
        served = server.model(model)
        limits = server.limits(served)
        limits.check_rank(settings.rank)
        samples = settings.sample_answers and served.sampleable is not False
        identity = {"model": served.model_name, **asdict(settings), "max_side": train.max_side}
        state_file = folder / "state.json"
        state = FineTuneState.begin_or_resume(state_file, identity, later=_ROWS)
        connection = Connection.open(
            server,
            served,
            state.state,
            rank=settings.rank,
            seed=settings.seed,
            train_unembed=settings.train_unembed,
            name=folder.resolve().name,
        )
        encoder = RowEncoder(connection.encoder, limits)
        learnt, kept = _checked(train, held_out, encoder, settings, state, state_file, progress)
        with ExitStack() as closing:
            lines = closing.enter_context(contextlib.closing(JsonLinesLogger(folder / "metrics.jsonl", state.step)))
            closing.callback(_draw, folder, lines)
            more = [closing.enter_context(contextlib.closing(one)) for one in open_loggers(loggers, folder)]
            scored = score if samples else None
            run = _Run(connection, encoder, learnt, kept, settings, state, state_file, [lines, *more], scored)
            was_finished = state.is_finished
            with FineTuneProgress(run.step_count, state.step, progress) as shown:
                sampling = run.run(shown)
            if progress is not False:
                print(state.ending(run.step_count, was_finished), file=sys.stderr)
        exits.pop_all()  # the model closes the connection from here on
        rows = lines.rows()
        return TunedModel(connection, state.weights, state.state, sampling, rows, train.max_side, learnt.asking)


_CHARTS = {"loss": "Loss of an answer token", "held_out_loss": "Held-out loss", "accuracy": "Held-out accuracy"}


def _draw(folder: pathlib.Path, lines: JsonLinesLogger) -> None:
    """Draws what the run has logged, also if it was stopped."""
    rows = lines.rows()
    curves: dict[str, list[float]] = {}
    for row in rows:
        for name, label in _CHARTS.items():
            if name in row:
                curve = curves.setdefault(label, [math.nan] * (1 + int(rows[-1]["step"])))
                curve[int(row["step"])] = row[name]
    if curves:
        write_charts(folder / "chart.html", folder.resolve().name, curves)


def _stop_line(folder: pathlib.Path) -> str:
    file = folder / "state.json"
    step = FineTuneState.read(file).step if file.exists() else 0
    again = f"call fine_tune again with the same settings and rows and out={str(folder)!r}"
    if not step:
        return f"stopped before the first evaluation finished, so nothing is kept: {again} to begin again"
    return f"stopped: {again} to resume after step {step}"


_ROWS = ("rows", "held-out rows")
"""Entries of a run's identity that are known only after all rows are encoded."""


def _checked(
    train: Dataset,
    held_out: Dataset | None,
    encoder: RowEncoder,
    settings: FineTuneSettings,
    state: FineTuneState,
    state_file: pathlib.Path,
    progress: bool | None,
) -> tuple[CheckedRows, Dataset | None]:
    """Returns the rows that can be learnt, and held-out ones. Raises InvalidInput if a resumed run had other rows."""
    named = {"train": train} if held_out is None else {"train": train, "held_out": held_out}
    with CheckProgress(sum(map(len, named.values())), progress) as shown:
        checked = {
            name: check_rows(rows, encoder, name, settings.broken_rows, shown.count_row) for name, rows in named.items()
        }
    for name, found in checked.items():
        if found.left_out:
            logger.warning("%d of %d rows of %s are broken and left out", found.left_out, len(named[name]), name)
    prints = [found.fingerprint for found in checked.values()]
    state.confirm(state_file, dict(zip_longest(_ROWS, prints)))
    return checked["train"], checked["held_out"].rows if held_out is not None else None


@dataclass
class _Submitted:
    """A submitted step. `number` counts from 0."""

    number: int
    rows: list[str]
    tokens: float
    rate: float
    skipped: int
    start: float
    backward: tinker.APIFuture[tinker.ForwardBackwardOutput]
    update: tinker.APIFuture[tinker.types.OptimStepResponse]


class _Run:
    """One run, from the step of its state to the end."""

    def __init__(
        self,
        connection: Connection,
        encoder: RowEncoder,
        learnt: CheckedRows,
        held_out: Dataset | None,
        settings: FineTuneSettings,
        state: FineTuneState,
        state_file: pathlib.Path,
        loggers: Sequence[Logger],
        score: Score | None,
    ) -> None:
        self._connection, self._encoder = connection, encoder
        train = learnt.rows
        self._train, self._held_out, self._settings = train, held_out, settings
        self._state, self._state_file, self._loggers, self._score = state, state_file, loggers, score
        self._epoch_steps = math.ceil(len(train) / settings.batch_size)
        self.step_count = settings.epochs * self._epoch_steps
        self._order: Callable[[int], Indices] = lru_cache(maxsize=1)(lambda epoch: train.order(settings.seed, epoch))
        self._peak = connection.learning_rate if settings.learning_rate is None else settings.learning_rate
        side = train.max_side
        asked = learnt.asking.metadata if learnt.asking else {}
        self._metadata = {MAX_PICTURE_SIDE: str(0 if side is None else side), **asked}
        self._live = LiveReports.of(connection.training)

    def run(self, shown: FineTuneProgress) -> tinker.SamplingClient | None:
        """Trains to the end; returns a client that samples from the best weights."""
        given = self._settings.evaluate_every
        evaluate_every = self._epoch_steps if given is None else given
        waiting: _Submitted | None = None
        begin = self._state.step if not self._state.is_finished else self.step_count
        for number in range(begin, self.step_count):
            submitted = self._submit(number)  # reads rows while the server computes the previous step
            if waiting:
                self._finish(waiting, shown)
            waiting = submitted
            if (number + 1) % evaluate_every == 0 or number + 1 == self.step_count:
                self._finish(waiting, shown)
                waiting = None
                with self._telling_divergence(number + 1):
                    self._evaluate(number + 1, shown)
                if self._state.is_finished:
                    break
        return self._connection.sampling(self._state.weights) if self._score else None

    def _submit(self, number: int) -> _Submitted | None:
        epoch, place = divmod(number, self._epoch_steps)
        size = self._settings.batch_size
        rows = self._order(epoch)[place * size : (place + 1) * size].tolist()
        start = time.monotonic()
        encoded = self._encoded(self._train, rows)
        data = [datum for _, row_data in encoded for datum in row_data]
        skipped = len(rows) - len(encoded)
        if not data:
            return None
        rate = self._rate(number)
        adam = tinker.AdamParams(
            learning_rate=rate, weight_decay=self._settings.weight_decay, grad_clip_norm=self._settings.grad_clip_norm
        )
        training = self._connection.training
        backward = training.forward_backward(data, "cross_entropy")
        names = [row.where for row, _ in encoded]
        return _Submitted(number, names, _weight(data), rate, skipped, start, backward, training.optim_step(adam))

    def _encoded(self, rows: Dataset, indices: Iterable[int]) -> list[tuple[Conversation, list[tinker.Datum]]]:
        """Returns rows with their datums. A row that was valid before the first step may be broken now."""
        found = []
        for index in indices:
            try:
                found.append(self._encoder.encoded(rows, index))
            except InvalidInput as error:
                if self._settings.broken_rows == "refuse":
                    raise
                logger.warning("skipped a row that was valid before the first step: %s", error.message)
        return found

    def _finish(self, step: _Submitted | None, shown: FineTuneProgress) -> None:
        if step is None:
            return
        with self._telling_divergence(step.number + 1), _naming_rows(step):
            loss = _finite(step.backward.result().metrics["loss:sum"] / step.tokens)
            step.update.result()
        figures = {"loss": loss, "learning_rate": step.rate, "answer_tokens": step.tokens, "skipped_rows": step.skipped}
        self._log(step.number + 1, {**figures, "seconds": time.monotonic() - step.start})
        shown.count_step(step.number + 1, loss)

    @contextmanager
    def _telling_divergence(self, step: int) -> Iterator[None]:
        """Converts errors that a diverged model causes (NaN, infinity) to FailedPrecondition."""
        try:
            yield
        except (tinker.TinkerError, NotFinite) as error:
            if isinstance(error, tinker.TinkerError) and not any(words in str(error) for words in _OF_DIVERGENCE):
                raise
            rate, clip = self._rate(step - 1), self._settings.grad_clip_norm
            raise FailedPrecondition(
                f"the model diverged at step {step}, at a learning rate of {rate:.3g}: lower learning_rate (its peak is"
                f" {self._peak:.3g}) or {'set grad_clip_norm to 1' if clip == 0 else f'grad_clip_norm ({clip:g})'}, and"
                f" begin in a new folder. The error was: {error}",
                field="learning_rate",
            ) from error

    def _rate(self, number: int) -> float:
        return self._peak * self._settings.rate_factor(number, self.step_count)

    def _evaluate(self, step: int, shown: FineTuneProgress) -> None:
        """Evaluates, saves the best weights and a state to resume from, and decides whether training is over."""
        state, training = self._state, self._connection.training
        weights = training.save_weights_for_sampler(f"step-{step}", user_metadata=self._metadata).result().path
        figures: dict[str, float] = {}
        counts: AnswerCounts | None = None
        judged: list[dict[str, Any]] = []
        if self._held_out is not None:
            figures["held_out_loss"] = self._held_out_loss(self._held_out)
            if self._score:
                sampling = self._connection.sampling(weights)
                figures["accuracy"], counts, judged = self._answered(self._held_out, sampling, self._score)
            self._log(step, figures)
            shown.count_evaluation(figures)
        loss = figures.get("held_out_loss")
        dropped = state.weights
        if loss is None or state.best_loss is None or loss < state.best_loss:
            state.weights, state.best_step, state.best_loss, state.misses = weights, step, loss, 0
        else:
            dropped, state.misses = weights, state.misses + 1
        if figures:
            best = {"kept_step": float(state.best_step)}
            self._live.send_metrics(figures | best, asdict(counts) if counts else None, judged)
        is_out_of_patience = self._settings.patience is not None and state.misses >= self._settings.patience
        state.is_finished = step == self.step_count or is_out_of_patience
        saved = training.save_state(state.next_name, overwrite=True, user_metadata=self._metadata).result()
        state.state, state.step = saved.path, step
        state.save(self._state_file)
        if dropped:
            self._connection.delete(dropped)

    def _held_out_loss(self, rows: Dataset) -> float:
        loss, tokens = 0.0, 0.0
        for begin in range(0, len(rows), _FORWARD_ROWS):
            encoded = self._encoded(rows, range(begin, min(begin + _FORWARD_ROWS, len(rows))))
            data = [datum for _, row_data in encoded for datum in row_data]
            if not data:
                continue
            loss += self._connection.training.forward(data, "cross_entropy").result().metrics["loss:sum"]
            tokens += _weight(data)
        if not tokens:
            raise InvalidInput("no held-out row could be encoded: all are broken now", field="held_out")
        return _finite(loss / tokens)

    def _answered(
        self, rows: Dataset, sampling: tinker.SamplingClient, score: Score
    ) -> tuple[float, AnswerCounts | None, list[dict[str, Any]]]:
        """Returns the accuracy, the counts of answers by label if the right answers are labels, and judgements."""
        encoder, total = self._connection.encoder, 0.0
        pairs: list[tuple[str, str]] = []
        judged: list[dict[str, Any]] = []
        for begin in range(0, len(rows), _FORWARD_ROWS):
            encoded = self._encoded(rows, range(begin, min(begin + _FORWARD_ROWS, len(rows))))
            asked = [row for row, _ in encoded]
            if not asked:
                continue
            # Long enough for every right answer. A longer answer is wrong anyway.
            longest = max(encoder.answer_length(one) for one in asked) + 1
            said = answers(sampling, encoder, [one.question for one in asked], longest)
            for one, (text, sequence_id) in zip(asked, said, strict=True):
                found = float(score(text, one))
                total += found
                pairs.append((one.answer, text))
                if sequence_id:
                    judged.append(judgement(sequence_id, found, one.answer, True))
        return total / len(pairs) if pairs else 0.0, AnswerCounts.of(pairs), judged

    def _log(self, step: int, figures: dict[str, float]) -> None:
        for one in self._loggers:
            one.log(step, figures)


@contextmanager
def _naming_rows(step: _Submitted) -> Iterator[None]:
    """Adds the names of a step's rows to an error of the server, which may refuse rows that passed the check."""
    try:
        yield
    except tinker.RequestFailedError as error:
        if _AMONG_DATA.search(str(error)) is None or any(words in str(error) for words in _OF_DIVERGENCE):
            raise
        raise InvalidInput(
            f"the server refused step {step.number + 1} with the rows {', '.join(step.rows)}: {error}", field="rows"
        ) from error


def _finite(loss: float) -> float:
    if not math.isfinite(loss):
        raise NotFinite(f"the loss is {loss}")
    return loss


def _weight(data: Sequence[tinker.Datum]) -> float:
    return float(sum(datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in data))
