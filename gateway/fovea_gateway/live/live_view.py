"""The sections of the live page for one owner or for all. A section is sent again when it has changed."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from cachetools import LRUCache

from fovea.api.v1 import sampler_pb2, trainer_pb2, weights_pb2
from fovea.wire.errors import NotFound
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import checkpoints, models, run_labels, sessions
from fovea_gateway.database.sql_engine import insert_new
from fovea_gateway.http.endpoint import iso_time
from fovea_gateway.live.live_state import LiveState
from fovea_gateway.live.sample_gallery import Drawn, Group, Picture
from fovea_gateway.live.step_curves import StepCurves, SystemHistory
from fovea_gateway.replicas.base_models import BaseModel, BaseModels, token_texts
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.replicas.samplers import Sampler
from fovea_gateway.replicas.snapshot_pushes import PushTimes
from fovea_gateway.sessions.futures import Futures
from fovea_gateway.sessions.sessions import Sessions
from fovea_gateway.training.models import Model
from fovea_gateway.training.models import get_row as get_model

_MODELS = 200
_WAITING = 40
_SPARK_POINTS = 40
_DRAWN = 1024
_ROWS_S = 2.0
_SECTION_S = 0.9
SYSTEM_S = 10.0
"""Seconds between two figures of the services."""
_SPARKS = ("reward", "loss_per_token", "loss_sum")
_TOKENS = ("trained", "sampled")

Section = dict[str, Any]
Info = trainer_pb2.GetTrainerInfoResponse | sampler_pb2.GetSamplerInfoResponse


class LiveView:
    """A builder of the page's sections. It builds the sections of one owner once a second for all its viewers.

    In its methods, `owner` selects the owner of the data. None selects all owners, for callers with the scope admin.

    Attributes:
        closing: Set at the end of the process.
    """

    def __init__(
        self, state: LiveState, sessions: Sessions, futures: Futures, base_models: BaseModels, database: Database
    ) -> None:
        self.state, self._sessions = state, sessions
        self._futures, self._base_models, self._database = futures, base_models, database
        self._made: dict[str | None, tuple[float, dict[str, Section]]] = {}
        self._rows: dict[str | None, tuple[float, list[Section], str, Section]] = {}
        # For each model: its curves, their version, and the section that was made from that version.
        self._drawn: LRUCache[str, tuple[StepCurves, int, Section]] = LRUCache(_DRAWN)
        self.closing = asyncio.Event()
        self.history = SystemHistory(SYSTEM_S)
        self._counted: tuple[float, Counter[str], dict[str, tuple[int, float]]] = time.monotonic(), Counter(), {}

    def close(self) -> None:
        """Ends all streams, because the process is about to end. The page reconnects to the next process."""
        self.closing.set()

    async def sections(self, owner: str | None) -> dict[str, Section]:
        """Returns all sections, keyed by their names. The section `models` contains one entry for each model id."""
        now = time.monotonic()
        at, made = self._made.get(owner, (-math.inf, {}))
        if now - at < _SECTION_S:
            return made
        rows, saved, labels = await self._read_rows(owner)
        queue = self._queue(owner)
        made = {
            "models": {row["id"]: await self._model(row, queue["of_model"].get(row["id"], 0)) for row in rows},
            "labels": {"labels": labels},
            "queue": {name: value for name, value in queue.items() if name != "of_model"},
            "services": self._services(is_admin=owner is None),
            "alerts": self.state.alerts.shown(owner),
            **({"system": self.history.newest} if owner is None else {}),
            "errors": {"errors": [{"owner": name, **vars(error)} for name, error in self.state.errors(owner)]},
            "samples": {"version": self.state.gallery.version, "sources": self._sources(owner)},
            "checkpoints": {"version": saved},
        }
        self._made = {name: kept for name, kept in self._made.items() if now - kept[0] < _SECTION_S}
        self._made[owner] = now, made
        return made

    async def curves(
        self, owner: str | None, model_id: str, most: int, names: Collection[str], steps: tuple[int, int | None]
    ) -> Section:
        """Returns the curves of a model. Raises NotFound if there is none or if it belongs to another owner.

        Args:
            most: The maximum number of points of a curve.
            names: The metrics wanted; empty for all.
            steps: The first and the last step wanted; None for the last one taken.
        """
        await self._check_model(owner, model_id)
        curves = await self.state.curves(model_id)
        wanted = [name for name in curves.names if not names or name in names]
        shown = {name: curves.points(name, most, *steps) for name in wanted}
        found: Section = {"model_id": model_id, "last_step": curves.last_step, "stride": curves.stride, "curves": shown}
        if (rewards := self.state.rewards.get(model_id)) is not None:
            found["rewards"] = rewards.points()
        if (answers := self.state.answers.get(model_id)) is not None:
            found["answers"] = {"step": answers[0], **answers[1].model_dump()}
        return found

    async def put_label(self, model: Model, values: Section, only_if_none: bool) -> Section:
        """Stores a model's name, notes and tags, unless it has some and `only_if_none`. Returns the stored ones."""
        label = {"owner": model.owner} | values
        return await self._database.write(partial(write_label, model.model_id, label, only_if_none))

    async def _check_model(self, owner: str | None, model_id: str) -> Model:
        model = await self._database.read(lambda connection: get_model(connection, model_id))
        if model is None or owner not in (None, model.owner):
            raise NotFound(f"there is no model {model_id!r}", field="model_id")
        return model

    def samples(self, owner: str, source: str, step: int | None) -> Section:
        """Returns the groups of a step, with token texts if a tokenizer is available. Blocks: it may read a file."""
        return self.shown(owner, source, self.state.gallery.groups(owner, source, step))

    def shown(self, owner: str, source: str, groups: Sequence[Group]) -> Section:
        """Returns groups of a source with token texts. Blocks."""
        return {"owner": owner, "source": source, "groups": [self._group(group) for group in groups]}

    def tokenizer_of(self, base_model: str) -> str:
        """Returns the tokenizer of a base model; empty if it is no longer served."""
        base = self._base_models.find(base_model)
        return base.tokenizer_id if base else ""

    def _group(self, group: Group) -> Section:
        tokenizer = self.tokenizer_of(group.base_model)

        def piece(one: Any) -> Section:
            if isinstance(one, Picture):
                return {"picture": one.digest, "is_kept": bool(one.data)}
            ids = one.tolist()
            return {"ids": ids, "texts": token_texts(tokenizer, ids)}

        def drawn(one: Drawn) -> Section:
            ids, logprobs = one.tokens.tolist(), one.logprobs.tolist()
            return {
                "sequence_id": one.sequence_id,
                "ids": ids,
                "texts": token_texts(tokenizer, ids),
                "logprobs": [round(value, 4) if math.isfinite(value) else None for value in logprobs],
                "trained": [round(value, 4) if math.isfinite(value) else None for value in one.trained.tolist()],
                "stop": one.stop,
                "is_cut": one.is_cut,
                "reward": one.reward,
                "held_out": one.is_held_out,
                "at": one.at,
            }

        return {
            "prompt": group.prompt,
            "step": group.step,
            "at": group.at,
            "truth": group.truth,
            "loss": group.loss,
            "pieces": [piece(one) for one in group.pieces],
            "drawn": [drawn(one) for one in group.drawn],
        }

    def _sources(self, owner: str | None) -> list[Section]:
        return [
            {"owner": of, "source": source, "steps": steps, "at": at}
            for of, source, steps, at in self.state.gallery.sources(owner)
        ]

    async def _read_rows(self, owner: str | None) -> tuple[list[Section], str, Section]:
        now = time.monotonic()
        known = self._rows.get(owner)
        if known is None or now - known[0] >= _ROWS_S:
            found = await self._database.read(lambda connection: read_rows(connection, owner))
            self._rows = {name: kept for name, kept in self._rows.items() if now - kept[0] < _ROWS_S}
            known = self._rows[owner] = (now, *found)
        return known[1:]

    async def _model(self, row: Section, unfinished: int) -> Section:
        curves = await self.state.curves(row["id"])
        known = self._drawn.get(row["id"])
        if known is None or known[0] is not curves or known[1] != curves.version:
            spark = next((name for name in _SPARKS if name in curves.last), "")
            values = curves.means(spark, _SPARK_POINTS, digits=4)
            drawn = {
                "step": curves.last_step,
                "last": {name: _finite(value) for name, value in curves.last.items()},
                "spark": {"name": spark, "values": values},
                "resumed": curves.resumed and {"path": curves.resumed[0], "step": curves.resumed[1]},
            }
            known = self._drawn[row["id"]] = curves, curves.version, drawn
        base = self._base_models.find(row["base_model"])
        links = base.trainers.links if base is not None else []
        held = [number for number, link in enumerate(links, 1) if link.instance_id == row["trainer_instance"]]
        shown = {name: value for name, value in row.items() if name not in ("trainer_instance", "session_id")}
        if shown["state"] == "ready" and not self._sessions.is_wanted(row["session_id"]):
            shown["state"] = "client gone"
        trainer = held[0] if held and len(links) > 1 else None
        datums = self.state.datums.newest_step(row["owner"], row["id"])
        return shown | known[2] | {"unfinished": unfinished, "trainer": trainer, "datums": datums}

    def _queue(self, owner: str | None) -> Section:
        """Returns the unfinished requests. Each row joins those of one model and kind; `reason` is the oldest one's."""
        kinds: Counter[str] = Counter()
        of_model: Counter[str] = Counter()
        rows: dict[tuple[object, ...], Section] = {}
        for pending in self._futures.unfinished():
            submission, progress = pending.submission, pending.progress
            if owner not in (None, submission.owner):
                continue
            is_running = progress.begun_at is not None
            kinds[f"{submission.kind.value} {'running' if is_running else 'waiting'}"] += 1
            of_model[pending.model] += 1
            model = pending.model or submission.scope
            alike = submission.owner, model, submission.kind, is_running, progress.queue_state
            if alike not in rows and len(rows) < _WAITING:
                rows[alike] = {
                    "id": submission.future_id,
                    "owner": submission.owner,
                    "key_id": submission.key_id,
                    "kind": submission.kind.value,
                    "model": model,
                    "is_running": is_running,
                    "queue_state": progress.queue_state.value,
                    "reason": progress.waiting_for,
                    "since": submission.created_at,
                    "count": 0,
                    "tokens": 0,
                }
            if alike in rows:
                rows[alike]["count"] += 1
                rows[alike]["tokens"] += submission.token_count
        return {"total": kinds.total(), "kinds": dict(kinds), "rows": list(rows.values()), "of_model": of_model}

    async def record(self) -> None:
        """Adds the present figures of the services to the history. A name is `figure|label`."""
        now, (then, tokens, pushes) = time.monotonic(), self._counted
        states = Counter("waiting" if it.progress.begun_at is None else "running" for it in self._futures.unfinished())
        values = {f"queue|{state}": float(states[state]) for state in ("waiting", "running")}
        values["lag|durable points"] = max(self.state.alerts.durable_lags().values(), default=0.0)
        counts = self.state.token_counts
        values |= {f"tokens|{kind}": (counts[kind] - tokens[kind]) / max(now - then, 1e-3) for kind in _TOKENS}
        times = {base.name: base.snapshots.push_times for base in self._base_models}
        for base in self._base_models:
            values |= self._figures(base)
            count, total_s = pushes.get(base.name, (0, 0.0))
            if (new := times[base.name].count - count) > 0:
                values[f"push|{base.name}"] = (times[base.name].total_s - total_s) / new
        self._counted = now, counts.copy(), {name: (each.count, each.total_s) for name, each in times.items()}
        self.history.add(time.time(), values)

    def _figures(self, base: BaseModel) -> dict[str, float]:
        """Returns memory use in bytes, busy share and GPU utilisation of the services of a base model."""
        samplers, links, found = base.samplers.members, base.trainers.links, dict[str, float]()
        infos: dict[str, Info | None] = {
            f"sampler {number} of {base.name}": each.info for number, each in enumerate(samplers, 1) if each.up
        }
        for number, link in enumerate(links, 1):
            if link.up:
                infos[f"trainer {number} of {base.name}" if len(links) > 1 else f"trainer of {base.name}"] = link.info
        if ranks := sum(link.info.world_size for link in base.trainers.up if link.info):
            found[f"busy|trainer of {base.name}"] = self.state.busy(base.name, True, ranks)
        if samplers:
            devices = sum(sampler.device_count for sampler in samplers)
            found[f"busy|samplers of {base.name}"] = self.state.busy(base.name, False, devices)
        known = {name: info for name, info in infos.items() if info is not None and info.memory_total_bytes}
        busy = {name: info.gpu_utilization for name, info in known.items() if info.HasField("gpu_utilization")}
        found |= {f"gpu_utilization|{name}": share for name, share in busy.items()}
        return found | {f"{one.memory_kind}_memory|{name}": float(one.memory_used_bytes) for name, one in known.items()}

    def _services(self, is_admin: bool) -> Section:
        shown = [self._base_model(base, is_admin) for base in self._base_models]
        return {"base_models": shown, "pushes": _pushes([base.snapshots.push_times for base in self._base_models])}

    def _base_model(self, base: BaseModel, is_admin: bool) -> Section:
        def address(peer: Any) -> Section:
            state = {"up": peer.up, "starting": peer.is_starting}
            return state | {"address": peer.address, "reason": peer.reason} if is_admin else state

        trainers = base.trainers.links
        ranks = sum(trainer.info.world_size for trainer in trainers if trainer.info)
        shown: Section = {"name": base.name}
        shown["trainer_busy"] = round(self.state.busy(base.name, True, ranks), 3)
        shown["trainers"] = [address(trainer) | _trainer(trainer) for trainer in trainers]
        samplers = base.samplers.members
        devices = sum(sampler.device_count for sampler in samplers)
        shown["sampler_busy"] = round(self.state.busy(base.name, False, devices), 3)
        shown["samplers"] = [address(sampler) | _sampler(sampler) for sampler in samplers]
        shown["renderers"] = [
            address(renderer) | {"inside": renderer.queued - renderer.waiting, "waiting": renderer.waiting}
            for renderer in base.renderers.members
        ]
        return shown


def _pushes(times: Sequence[PushTimes]) -> Section:
    """Summarizes the durations of the weight pushes of all base models."""
    count, total_s = sum(each.count for each in times), sum(each.total_s for each in times)
    last_s = max(times, key=lambda each: each.last_at).last_s
    return {
        "count": count,
        "mean_s": round(total_s / count, 3) if count else None,
        "last_s": None if last_s is None else round(last_s, 3),
    }


def _trainer(trainer: TrainerLink) -> Section:
    info = trainer.info
    return {
        "draining": trainer.is_draining,
        "ranks": info.world_size if info else 0,
        "models": len(info.model_ids) if info else 0,
        "dtype": info.dtype if info else "",
        "version": info.version if info else "",
        "keeps_recovery": bool(info and info.keeps_recovery),
        "memory": _memory(info),
    }


def _sampler(sampler: Sampler) -> Section:
    info = sampler.info
    return {
        "inside": sampler.queued - sampler.waiting,
        "waiting": sampler.waiting,
        "waiting_for_slot": info.waiting_for_slot if info else 0,
        "most_sequences": info.max_sequences if info else 0,
        "devices": sampler.device_count,
        "adapters": len(sampler.adapters),
        "memory": _memory(info),
        "dtype": info.dtype if info else "",
        "version": info.version if info else "",
    }


def _memory(info: Info | None) -> Section | None:
    """Returns the memory, rounded to 100 MB, so that small changes cause no new event."""
    if info is None or not info.memory_total_bytes:
        return None
    used = round(info.memory_used_bytes, -8) or info.memory_used_bytes
    return {"used": used, "total": info.memory_total_bytes, "what": info.memory_kind}


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def read_rows(connection: sa.Connection, owner: str | None) -> tuple[list[Section], str, Section]:
    """Returns the most recently used models of one owner or of all, a text that changes when checkpoints change, and
    the labels of these models, keyed by their ids.
    """
    joined = models.join(sessions, models.c.session_id == sessions.c.session_id)
    query = sa.select(models, sessions.c.display_name, sessions.c.parked_at).select_from(joined)
    counting = sa.select(sa.func.count(), sa.func.max(checkpoints.c.created_at)).select_from(checkpoints)
    if owner is not None:
        query, counting = query.where(models.c.owner == owner), counting.where(checkpoints.c.owner == owner)
    newest = query.order_by(models.c.last_request_at.desc()).limit(_MODELS)
    rows = [_row(row) for row in connection.execute(newest).mappings()]
    labelled = sa.select(run_labels).where(run_labels.c.model_id.in_([row["id"] for row in rows]))
    labels = {
        row["model_id"]: {"name": row["name"], "notes": row["notes"], "tags": row["tags"]}
        for row in connection.execute(labelled).mappings()
    }
    return rows, "-".join(map(str, connection.execute(counting).one())), labels


def write_label(model_id: str, values: Section, only_if_none: bool, connection: sa.Connection) -> Section:
    """Writes a model's label, in place of an earlier one unless `only_if_none`. Returns the stored one."""
    mine = run_labels.c.model_id == model_id
    if not insert_new(connection, run_labels, {"model_id": model_id} | values) and not only_if_none:
        connection.execute(sa.update(run_labels).where(mine).values(values))
    kept = sa.select(run_labels.c.name, run_labels.c.notes, run_labels.c.tags).where(mine)
    return dict(connection.execute(kept).mappings().one())


def _row(row: Any) -> Section:
    return {
        "id": row["model_id"],
        "session_id": row["session_id"],
        "owner": row["owner"],
        "base_model": row["base_model"],
        "name": str(row["display_name"] or ""),
        "metadata": {name: str(value) for name, value in (row["user_metadata"] or {}).items()},
        "state": "parked" if row["parked_at"] is not None and row["state"] == "ready" else row["state"],
        "state_reason": row["state_reason"],
        "trainer_instance": row["trainer_instance"] or None,
        "rank": weights_pb2.LoraConfig.FromString(row["lora"]).rank,
        "created": iso_time(row["created_at"]),
        "used_at": round(row["last_request_at"], 1),
    }
