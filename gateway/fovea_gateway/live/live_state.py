"""The data that only the live page needs: curves, samples, errors and the load of the services.

Curves are in memory and in the database. A model's first curves are written at once, so that each trained model has a
row. Later ones are written half a minute after they have grown. A restart restores them; a kill may lose the last half
minute. Samples and errors are only in memory.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import sqlalchemy as sa
from cachetools import LRUCache
from google.protobuf.message import DecodeError
from pydantic import Field, model_validator

from fovea.api.v1 import gateway_pb2
from fovea.wire.errors import FoveaError, NotFound, SessionEnded
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import checkpoints, live_curves
from fovea_gateway.database.sql_engine import insert_new
from fovea_gateway.http.request_body import Body, ModelNumber, off_loop_by_size
from fovea_gateway.live.alerts import Alerts
from fovea_gateway.live.sample_gallery import Group, SampleGallery, places_of, read_drawn, read_input
from fovea_gateway.live.step_curves import RewardHistogram, StepCurves, read_losses
from fovea_gateway.replicas.base_models import BaseModels
from fovea_gateway.replicas.samplers import version_of
from fovea_gateway.sampling.sampling_sessions import Sampling
from fovea_gateway.sessions.future import Activity, Ending, Failure, Kind, split_messages
from fovea_gateway.sessions.session_routes import FINISHED
from fovea_gateway.training.models import Models

logger = logging.getLogger(__name__)


TICK_S = 0.5
_MOST_MODELS = 512
_SAVE_S = 30.0
_SAVES_PER_TICK = 8
_ERRORS_PER_OWNER = 50
_ERROR_OWNERS = 512
_BUSY_S = 60.0
_MOST_PARTS = 4096
_DATUM_BYTES = 32 * 2**20

_DENOMINATORS = ("weights:sum", "policy_tokens:sum")


def _mean(values: list[float]) -> float:
    """Returns the mean, which is infinite or NaN if the sum is; `statistics.fmean` would raise OverflowError."""
    return sum(values) / len(values)


_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"mean": _mean, "max": max, "min": min}
_NOT_SHOWN = ("expert_load/layer_", "loss:", *_DENOMINATORS)


@dataclass
class SeenError:
    """An error and the number of its occurrences."""

    what: str
    subject: str
    reason: str
    field: str
    message: str
    at: float = 0.0
    count: int = 0


class AnswerCounts(Body):
    """Numbers of held-out rows by label and answer: `counts` has a row for each label, and a column for each label and,
    last, for other answers.
    """

    labels: Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=32)]
    counts: Annotated[list[list[ModelNumber]], Field(max_length=32)]

    @model_validator(mode="after")
    def _is_matrix(self) -> Self:
        size = len(self.labels)
        if [len(row) for row in self.counts] != [size + 1] * size:
            raise ValueError(f"counts must have {size} rows of {size + 1} numbers, because there are {size} labels")
        return self


class LiveState:
    """The state of the live page. Call `tick` regularly and `close` at the end."""

    def __init__(
        self,
        activity: Activity,
        database: Database,
        models: Models,
        sampling: Sampling,
        base_models: BaseModels,
        alerts: Alerts,
    ) -> None:
        self._activity, self._database, self._models = activity, database, models
        self._sampling, self._base_models, self.alerts = sampling, base_models, alerts
        self.rewards: LRUCache[str, RewardHistogram] = LRUCache(_MOST_MODELS)  # by model
        self.answers: LRUCache[str, tuple[int, AnswerCounts]] = LRUCache(_MOST_MODELS)  # with their step, by model
        self.token_counts: Counter[str] = Counter()  # by kind of usage, of all requests that have ended
        self.gallery = SampleGallery()
        self.datums = SampleGallery(_DATUM_BYTES)  # those with the largest loss
        self._curves: OrderedDict[str, StepCurves] = OrderedDict()
        # The metrics of the forward_backwards since a model's last step.
        self._since: defaultdict[str, deque[Mapping[str, float]]] = defaultdict(lambda: deque(maxlen=_MOST_PARTS))
        self._processing = asyncio.Lock()
        self._unsaved: OrderedDict[str, float] = OrderedDict()
        self._errors: OrderedDict[str, OrderedDict[tuple[str, ...], SeenError]] = OrderedDict()
        self._work: deque[tuple[float, str, bool, float]] = deque()

    async def tick(self) -> None:
        """Processes new events, and writes some of the curves that are not in the database yet."""
        await self._process_activity()
        await self._save(time.time() - _SAVE_S, _SAVES_PER_TICK)

    async def close(self) -> None:
        """Processes the remaining events and writes all unsaved curves."""
        await self._process_activity()
        await self._save(time.time(), _MOST_MODELS)

    async def curves(self, model_id: str) -> StepCurves:
        """Returns the curves of a model; empty ones if nothing is known."""
        found = self._curves.get(model_id)
        if found is None:
            blob = await self._database.read(lambda connection: read_curves(connection, model_id))
            found = self._curves.setdefault(model_id, _from_blob(model_id, blob))
            while len(self._curves) > _MOST_MODELS:
                oldest, curves = self._curves.popitem(last=False)
                if self._unsaved.pop(oldest, None) is not None:
                    await self._write({oldest: curves.to_blob()})
        self._curves.move_to_end(model_id)
        return found

    async def report(
        self,
        model_id: str,
        step: int | None,
        metrics: Mapping[str, float],
        rewards: Sequence[float] = (),
        answers: AnswerCounts | None = None,
    ) -> int:
        """Records a client's values for a step of its model, by default the last one. Returns the step."""
        await self._process_activity()
        curves = await self.curves(model_id)
        at = curves.last_step if step is None else step
        curves.add(at, metrics)
        if rewards:
            self.rewards.setdefault(model_id, RewardHistogram()).add(at, rewards)
        if answers is not None:
            self.answers[model_id] = at, answers
        self._save_soon(model_id, curves)
        self._watch(model_id, curves)
        return at

    def errors(self, owner: str | None) -> list[tuple[str, SeenError]]:
        """Returns the newest errors of one owner or of all, with their owners, newest first."""
        owners = list(self._errors) if owner is None else [owner]
        found = [(name, error) for name in owners for error in self._errors.get(name, {}).values()]
        return sorted(found, key=lambda pair: -pair[1].at)[:_ERRORS_PER_OWNER]

    def busy(self, base_model: str, is_training: bool, devices: int) -> float:
        """Returns the share of the last minute, 0 to 1, that the trainer or the samplers spent on ended futures."""
        begun = time.time() - _BUSY_S
        while self._work and self._work[0][0] < begun:
            self._work.popleft()
        seconds = sum(s for _, base, trains, s in self._work if base == base_model and trains is is_training)
        return min(seconds / (_BUSY_S * max(devices, 1)), 1.0)

    async def _process_activity(self) -> None:
        async with self._processing:  # Events must be processed in order, even by concurrent callers.
            # Samples first: a loss may contain them.
            for add, ended in (
                (self._add_sample, self._activity.pop_samples()),
                (self._add_command, self._activity.pop_training()),
            ):
                for ending in ended:
                    try:
                        await add(ending)
                    except (FoveaError, ValueError, ArithmeticError, DecodeError) as error:
                        logger.info("the live page omits %s: %s", ending.pending.submission.future_id, error)
            for failure in self._activity.pop_failures():
                self._add_failure(failure)

    async def _add_command(self, ending: Ending) -> None:
        submission, outcome = ending.pending.submission, ending.outcome
        kind, model_id = submission.kind, submission.scope
        self.alerts.note_end(ending)
        self.token_counts["trained"] += ending.pending.usage.trained_tokens
        if ending.pending.device_seconds:
            model = await self._models.load(model_id)
            self._work.append((time.time(), model.base_model, True, ending.pending.device_seconds))
        if outcome.error is not None:
            if kind is Kind.OPTIM_STEP:
                self._since.pop(model_id, None)
            return
        if kind in (Kind.CREATE_MODEL, Kind.LOAD_STATE):
            self._since.pop(model_id, None)
            await self._continue(submission.owner, model_id, outcome.result)
        if kind in (Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP):
            metrics = _metrics_of(outcome.result)
            if kind is Kind.FORWARD_BACKWARD:
                self._since[model_id].append(metrics)
            if kind is not Kind.OPTIM_STEP:
                await self._add_losses(ending)
            if kind is Kind.FORWARD_BACKWARD:
                return
            curves = await self.curves(model_id)
            if kind is Kind.FORWARD:
                loss = summed([metrics])
                curves.add(
                    curves.last_step, {f"forward_{name}": loss[name] for name in loss if name.startswith("loss")}
                )
            else:
                since = self._since.pop(model_id, ())
                curves.add(curves.last_step + 1, summed(since) | _of_step(metrics))
            self._save_soon(model_id, curves)
            self._watch(model_id, curves)

    async def _add_losses(self, ending: Ending) -> None:
        """Keeps the datums with the largest loss, and the log-probabilities that the trainer computed for samples."""
        submission, request = ending.pending.submission, ending.pending.request
        has_samples = self.gallery.awaits_losses(submission.owner, submission.scope)
        if request is None or (submission.kind is Kind.FORWARD and not has_samples):
            return
        owner, source, result, at = submission.owner, submission.scope, ending.outcome.result, time.time()
        size = len(request) + len(result)
        found = await off_loop_by_size(size, read_losses, submission.future_id, request, result, at, has_samples)
        self.gallery.note_losses(owner, source, found.by_place)
        if found.worst:
            base_model = (await self._models.load(source)).base_model
            step = (await self.curves(source)).last_step + 1
            for loss, digest, pieces, drawn in found.worst:
                self.datums.add(Group(owner, source, step, digest, base_model, pieces, loss=loss), [drawn])

    async def _continue(self, owner: str, model_id: str, result: bytes) -> None:
        """Gives a new model that continues from a checkpoint with its optimizer the curves until then."""
        loaded = next((one.state_loaded for one in _messages(result) if one.HasField("state_loaded")), None)
        own = await self.curves(model_id)
        if loaded is None or not loaded.step or own.names:
            return
        source = await self._database.read(lambda connection: _saved_by(connection, owner, loaded.path))
        curves = (await self.curves(source) if source else StepCurves()).continued(loaded.path, loaded.step)
        self._curves[model_id] = curves
        self._save_soon(model_id, curves)

    async def _add_sample(self, ending: Ending) -> None:
        submission, outcome = ending.pending.submission, ending.outcome
        self.token_counts["sampled"] += ending.pending.usage.sampled_tokens
        if outcome.error is not None or ending.pending.request is None:
            return
        request = gateway_pb2.SampleTokensRequest.FromString(ending.pending.request)
        snapshot, drawn = read_drawn(submission.future_id, outcome.result, time.time())
        if not drawn:
            return
        sampling = await self._sampling.get(submission.owner, submission.scope)
        base = self._base_models.get(sampling.base_model)
        if ending.pending.device_seconds:
            self._work.append((time.time(), base.name, False, ending.pending.device_seconds))
        if not any(len(one.tokens) for one in drawn) or (len(drawn[0].tokens) == 1 and request.prompt_logprobs):
            return  # The request only scored a prompt.
        version, step = version_of(snapshot), 0
        if version is not None:
            try:
                step = (await base.snapshots.get(snapshot)).identity.step
            except NotFound:  # The snapshot has been freed meanwhile.
                step = (await self.curves(version[0])).last_step
        size = len(ending.pending.request)
        digest, pieces = await off_loop_by_size(size, read_input, request.prompt)
        for one, place in zip(drawn, await off_loop_by_size(size, places_of, request.prompt, drawn), strict=True):
            one.place = place
        source = version[0] if version is not None else base.name
        self.gallery.add(Group(submission.owner, source, step, digest, base.name, pieces), drawn)

    def _add_failure(self, failure: Failure) -> None:
        error = failure.error
        # A client that ends its session leaves work and heartbeats behind, which is no error.
        is_own_end = isinstance(error, SessionEnded) and error.metadata.get("end_reason") in FINISHED
        if not failure.owner or is_own_end:
            return
        kept = self._errors.setdefault(failure.owner, OrderedDict())
        self._errors.move_to_end(failure.owner)
        key = failure.what, failure.subject, error.reason, error.field or "", error.message
        seen = kept.setdefault(key, SeenError(*key))
        seen.at, seen.count = time.time(), seen.count + 1
        kept.move_to_end(key)
        if len(kept) > _ERRORS_PER_OWNER:
            kept.popitem(last=False)
        if len(self._errors) > _ERROR_OWNERS:
            self._errors.popitem(last=False)

    async def _save(self, before: float, most: int) -> None:
        due = [model_id for model_id, since in self._unsaved.items() if since <= before][:most]
        if not due:
            return
        blobs = {model_id: self._curves[model_id].to_blob() for model_id in due}
        for model_id in due:
            del self._unsaved[model_id]
        try:
            await self._write(blobs)
        except BaseException:
            for model_id in due:  # Retry after the full delay: a full disk should not be logged twice a second.
                self._unsaved.setdefault(model_id, time.time())
            raise
        for model_id in due:
            if curves := self._curves.get(model_id):
                curves.mark_stored()

    def _watch(self, model_id: str, curves: StepCurves) -> None:
        if model := self._models.find(model_id):
            self.alerts.note_values(model, curves.last)

    def _save_soon(self, model_id: str, curves: StepCurves) -> None:
        self._unsaved.setdefault(model_id, time.time() if curves.is_stored else 0.0)

    async def _write(self, blobs: Mapping[str, bytes]) -> None:
        await self._database.write(lambda connection: write_curves(connection, blobs, time.time()))


def summed(parts: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Combines the metrics of the forward_backwards of one step according to their reduction: sum, mean, max or min.

    The loss is given per token (`loss_per_token`) if the calls report their number of tokens, otherwise as the sum
    (`loss_sum`).
    """
    found: dict[str, float] = {}
    names = dict.fromkeys(name for part in parts for name in part)
    for name in names:
        values = [part[name] for part in parts if name in part]
        reduction = name.partition(":")[2]
        found[name] = float(_REDUCTIONS.get(reduction, sum)(values))
    shown = {_plain(name): value for name, value in found.items() if not name.startswith(_NOT_SHOWN)}
    if "loss:sum" in found:
        count = next((found[name] for name in _DENOMINATORS if found.get(name)), 0.0)
        shown = {"loss_per_token" if count else "loss_sum": found["loss:sum"] / (count or 1.0)} | shown
    if clipped := shown.pop("clipped_tokens", None):
        shown["clipped_share"] = clipped / (found.get("policy_tokens:sum") or 1.0)
    return shown


def _of_step(metrics: Mapping[str, float]) -> dict[str, float]:
    return {_plain(name): value for name, value in metrics.items()}


def _plain(name: str) -> str:
    """Returns a metric's name without its reduction, unless that is a maximum or minimum."""
    plain, _, reduction = name.partition(":")
    return f"{plain}_{reduction}" if reduction in ("max", "min") else plain


def _metrics_of(result: bytes) -> dict[str, float]:
    """Returns the metrics of a stored result, which are in its last message."""
    records = _messages(result)
    return dict(records[-1].metrics.values) if records else {}


def _messages(result: bytes) -> list[gateway_pb2.WaitFutureResponse]:
    return split_messages(gateway_pb2.WaitFutureResponse, result)


def _from_blob(model_id: str, blob: bytes | None) -> StepCurves:
    if blob is None:
        return StepCurves()
    try:
        return StepCurves.from_blob(blob)
    except Exception:
        logger.exception("the curves of %s cannot be read and start again", model_id)
        return StepCurves()


def _saved_by(connection: sa.Connection, owner: str, path: str) -> str | None:
    """Returns the model that saved a checkpoint of an owner. Curves of others stay theirs, also of a public one."""
    found = sa.select(checkpoints.c.model_id).where(checkpoints.c.path == path, checkpoints.c.owner == owner)
    source: str | None = connection.scalar(found)
    return source


def read_curves(connection: sa.Connection, model_id: str) -> bytes | None:
    """Returns the stored curves of a model, or None."""
    blob: bytes | None = connection.scalar(sa.select(live_curves.c.curves).where(live_curves.c.model_id == model_id))
    return blob


def write_curves(connection: sa.Connection, blobs: Mapping[str, bytes], now: float) -> None:
    """Writes curves by model, replacing earlier ones. Deletes the least recently written above `_MOST_MODELS`."""
    for model_id, blob in blobs.items():
        values: dict[str, Any] = {"updated_at": now, "curves": blob}
        if not insert_new(connection, live_curves, {"model_id": model_id} | values):
            connection.execute(sa.update(live_curves).where(live_curves.c.model_id == model_id).values(values))
    newest = sa.select(live_curves.c.model_id).order_by(live_curves.c.updated_at.desc()).offset(_MOST_MODELS).limit(64)
    old = list(connection.scalars(newest))
    if old:
        connection.execute(sa.delete(live_curves).where(live_curves.c.model_id.in_(old)))
