"""Supervised fine-tuning: steps, evaluations, early stop, and a run that can be killed and goes on as if it had not."""

from __future__ import annotations

import contextlib
import logging
import math
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import zip_longest

import tinker

from fovea.wire.conventions import MAX_PICTURE_SIDE
from fovea.wire.errors import FailedPrecondition, InvalidInput, NotFinite
from fovea_data.connection import Connection, Server
from fovea_data.conversation import Conversation, check_positive
from fovea_data.dataset import Dataset
from fovea_data.fine_tune_progress import CheckProgress, FineTuneProgress
from fovea_data.fine_tune_state import FineTuneState
from fovea_data.row_check import BrokenRows, RowEncoder, check_rows
from fovea_data.rows import Indices
from fovea_data.tuned_model import TunedModel, answers, exact_match
from fovea_rollout.loggers import JsonLinesLogger, Logger, LoggerName, open_loggers

logger = logging.getLogger(__name__)

Score = Callable[[str, Conversation], float]
_OF_DIVERGENCE = ("not finite", "NaN", " is nan", " is inf", "norm nan", "norm inf")
"""Words of what servers say of a model whose numbers have overflowed."""
_AMONG_DATA = re.compile(r"\bdat(a|um)\[\d+\]")
"""How servers name a datum of a request."""
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
        rank: Of the LoRA, at most what the server takes; 0 trains all parameters.
        train_unembed: Whether the LoRA adapts the unembedding. None adapts it unless the model ties it to its
            embeddings: PEFT's `merge_and_unload` would change both (docs/guides/first-fine-tune.md).
        weight_decay: Of AdamW.
        grad_clip_norm: The longest gradient; 0 does not clip.
        evaluate_every: Steps between evaluations, each of which is a point to resume from; None is an epoch.
        patience: Evaluations without a better held-out loss after which training stops; None never stops early.
        sample_answers: Whether held-out rows are answered by sampling too, where the server samples the model.
        broken_rows: What becomes of rows that cannot be read, encoded or taken by the server, held-out ones too.
            `refuse` names the first before the first step; `skip` logs each and leaves it out.
        seed: Of the adapter and of the order of rows.
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

    All rows are encoded once before the first step: broken ones are told by name, and a changed row is noticed. Called
    again with the same folder, settings and rows after it was killed, it goes on at the last evaluation.

    Args:
        train: Rows to learn. The size of their pictures (`max_side`) stays with the model.
        held_out: Rows to evaluate on, of the same `max_side`; without them nothing stops early, and the last weights
            are kept.
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
        InvalidInput: Settings are wrong, a row cannot be learnt (named), all rows are broken, or `out` is of a run of
            other settings or rows.
        FailedPrecondition: No server answers, it trains no model, a logger's package is not installed, or the model
            diverged.
        Stopped: Ctrl-C. It is a KeyboardInterrupt, and ends a program with one line.
        Exception: What the SDK raises.
    """
    settings = settings if settings is not None else FineTuneSettings()
    if held_out is not None and held_out.max_side != train.max_side:
        raise InvalidInput(
            f"held_out has max_side {held_out.max_side}, and train has {train.max_side}: give both the same, since a"
            " model is asked about pictures of the size that it is trained on",
            field="held_out",
        )
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as exits:
        server = Server(base_url, api_key)
        exits.callback(server.service.close, "errored")
        served = server.model(model)
        limits = server.limits(served)
        limits.check_rank(settings.rank)
        samples = settings.sample_answers and served.sampleable is not False
        identity = {"model": served.model_name, **asdict(settings), "max_side": train.max_side}
        state_file = folder / "state.json"
        state = FineTuneState.begin_or_resume(state_file, identity, later=_ROWS)
        try:
            connection = Connection.open(
                server,
                served,
                state.state,
                rank=settings.rank,
                seed=settings.seed,
                train_unembed=settings.train_unembed,
            )
            encoder = RowEncoder(connection.encoder, limits)
            train, held_out = _checked(train, held_out, encoder, settings, state, state_file, progress)
            with ExitStack() as closing:
                lines = closing.enter_context(contextlib.closing(JsonLinesLogger(folder / "metrics.jsonl", state.step)))
                more = [closing.enter_context(contextlib.closing(one)) for one in open_loggers(loggers, folder)]
                scored = score if samples else None
                run = _Run(connection, encoder, train, held_out, settings, state, state_file, [lines, *more], scored)
                with FineTuneProgress(run.step_count, state.step, progress) as shown:
                    sampling = run.run(shown)
        except KeyboardInterrupt:
            raise Stopped(
                f"stopped: called again with the same settings and rows and out={str(folder)!r}, fine_tune goes on"
                f" after step {state.step}"
            ) from None
        exits.pop_all()  # the model closes the connection from here on
        return TunedModel(connection, state.weights, state.state, sampling, lines.rows(), train.max_side)


class Stopped(KeyboardInterrupt, SystemExit):
    """Ctrl-C, with a line that says at which step the run will resume.

    A program that does not catch it prints the line and ends, as with `sys.exit(line)`.
    """

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.code = line


_ROWS = ("rows", "held-out rows")
"""Parts of a run's identity that are known when all rows have been encoded."""


def _checked(
    train: Dataset,
    held_out: Dataset | None,
    encoder: RowEncoder,
    settings: FineTuneSettings,
    state: FineTuneState,
    state_file: pathlib.Path,
    progress: bool | None,
) -> tuple[Dataset, Dataset | None]:
    """The rows that can be learnt, once it is sure that a resumed run had the same. Raises InvalidInput."""
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
    return checked["train"].rows, checked["held_out"].rows if held_out is not None else None


@dataclass
class _Submitted:
    """A step on its way. `number` counts from 0."""

    number: int
    rows: list[str]
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
        encoder: RowEncoder,
        train: Dataset,
        held_out: Dataset | None,
        settings: FineTuneSettings,
        state: FineTuneState,
        state_file: pathlib.Path,
        loggers: Sequence[Logger],
        score: Score | None,
    ) -> None:
        self._connection, self._encoder = connection, encoder
        self._train, self._held_out, self._settings = train, held_out, settings
        self._state, self._state_file, self._loggers, self._score = state, state_file, loggers, score
        self._epoch_steps = math.ceil(len(train) / settings.batch_size)
        self.step_count = settings.epochs * self._epoch_steps
        self._order: Callable[[int], Indices] = lru_cache(maxsize=1)(lambda epoch: train.order(settings.seed, epoch))
        self._peak = connection.learning_rate if settings.learning_rate is None else settings.learning_rate
        side = train.max_side
        self._metadata = {MAX_PICTURE_SIDE: str(0 if side is None else side)}

    def run(self, shown: FineTuneProgress) -> tinker.SamplingClient | None:
        """Trains to the end; returns what samples from the best weights."""
        given = self._settings.evaluate_every
        evaluate_every = self._epoch_steps if given is None else given
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
        """Rows and what training has of them. All were right before the first step; one may have broken since."""
        found = []
        for index in indices:
            try:
                found.append(self._encoder.encoded(rows, index))
            except InvalidInput as error:
                if self._settings.broken_rows == "refuse":
                    raise
                logger.warning("skipped, though it was right before the first step: %s", error.message)
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
        """Raises FailedPrecondition in place of what the numbers of a model that diverged make others raise."""
        try:
            yield
        except (tinker.TinkerError, NotFinite) as error:
            if isinstance(error, tinker.TinkerError) and not any(words in str(error) for words in _OF_DIVERGENCE):
                raise
            rate, clip = self._rate(step - 1), self._settings.grad_clip_norm
            raise FailedPrecondition(
                f"the model diverged at step {step}, at a learning rate of {rate:.3g}: lower learning_rate (its peak is"
                f" {self._peak:.3g}) or {'set grad_clip_norm to 1' if clip == 0 else f'grad_clip_norm ({clip:g})'}, and"
                f" begin in a new folder. Seen: {error}",
                field="learning_rate",
            ) from error

    def _rate(self, number: int) -> float:
        return self._peak * self._settings.rate_factor(number, self.step_count)

    def _evaluate(self, step: int, shown: FineTuneProgress) -> None:
        """Evaluates, keeps the best weights and a state to resume from, and says when training is over."""
        state, training = self._state, self._connection.training
        weights = training.save_weights_for_sampler(f"step-{step}", user_metadata=self._metadata).result().path
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
        return _finite(loss / tokens)

    def _accuracy(self, rows: Dataset, sampling: tinker.SamplingClient, score: Score) -> float:
        encoder, total, count = self._connection.encoder, 0.0, 0
        for begin in range(0, len(rows), _FORWARD_ROWS):
            encoded = self._encoded(rows, range(begin, min(begin + _FORWARD_ROWS, len(rows))))
            asked = [row for row, _ in encoded]
            if not asked:
                continue
            # A right answer is not cut; a longer one is wrong whatever follows.
            longest = max(encoder.answer_length(one) for one in asked) + 1
            said = answers(sampling, encoder, [one.question for one in asked], longest)
            total += sum(score(answer, one) for answer, one in zip(said, asked, strict=True))
            count += len(asked)
        return total / count

    def _log(self, step: int, figures: dict[str, float]) -> None:
        for one in self._loggers:
            one.log(step, figures)


@contextmanager
def _naming_rows(step: _Submitted) -> Iterator[None]:
    """Adds the rows of a step to what the server says of its data: it refuses more than the check can know."""
    try:
        yield
    except tinker.RequestFailedError as error:
        if _AMONG_DATA.search(str(error)) is None or any(words in str(error) for words in _OF_DIVERGENCE):
            raise
        raise InvalidInput(
            f"the server refuses step {step.number + 1}, which trains {', '.join(step.rows)}: {error}", field="rows"
        ) from error


def _finite(loss: float) -> float:
    if not math.isfinite(loss):
        raise NotFinite(f"the loss is {loss}")
    return loss


def _weight(data: Sequence[tinker.Datum]) -> float:
    return float(sum(datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in data))
