"""The health of the gateway and its services, and the gauges of queues, sampler lag, replicas and disk space."""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import Gauge

from fovea.api.v1 import gateway_pb2
from fovea.api.v1.renderer_pb2 import GetRendererInfoResponse
from fovea.api.v1.sampler_pb2 import GetSamplerInfoResponse
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.database.ownership import ShardOwner, Shards
from fovea_gateway.replicas.base_models import BaseModel, BaseModels
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.sampling.sample_runner import Versions
from fovea_gateway.sessions.future import Pending
from fovea_gateway.sessions.futures import Futures
from fovea_gateway.sessions.sessions import Sessions

_LATELY_S = 10.0


class Shares:
    """The division of samplers and owners' limits among the gateways of all shards.

    An owner with work in several shards has an equal part of its weight and of its limits in each. A gateway's part of
    the sampler slots is the weight of its owners divided by the weight of all owners with work.

    Args:
        shards: The shards, and the one of this gateway.
        weight_of: Returns an owner's whole weight.
    """

    def __init__(self, shards: Shards, weight_of: Callable[[str], float]) -> None:
        self._shards, self._weight_of = shards, weight_of
        self._worked_at: dict[str, float] = {}
        self._others: list[ShardOwner] = []
        self._own: set[str] = set()

    def note_work(self, owners: Iterable[str]) -> list[str]:
        """Records the owners with unfinished work; returns those that had some lately."""
        now = time.monotonic()
        self._worked_at |= dict.fromkeys(owners, now)
        self._worked_at = {owner: at for owner, at in self._worked_at.items() if now - at < _LATELY_S}
        self._own = set(self._worked_at)
        return list(self._worked_at)

    def note_reports(self, reports: Iterable[ShardOwner]) -> None:
        """Records the reports of all gateways, and ignores outdated ones."""
        now = time.time()
        self._others = [
            one for one in reports if one.shard != self._shards.number and abs(now - one.updated_at) < _LATELY_S
        ]

    def spread(self, owner: str) -> int:
        """Returns the number of shards in which an owner has work, including this one."""
        return 1 + sum(1 for other in self._others if owner in other.report.get("owners", ()))

    def weight(self, owner: str) -> float:
        """Returns an owner's weight for its work in this shard."""
        return self._weight_of(owner) / self.spread(owner)

    def models_elsewhere(self, owner: str) -> int:
        """Returns how many models of an owner other gateways have in the trainers."""
        return sum(int(other.report.get("models", {}).get(owner, 0)) for other in self._others)

    def part(self) -> float:
        """Returns this gateway's part of the sampler slots, above 0 and at most 1."""
        if self._shards.count == 1:
            return 1.0
        working = [self._own, *(set(other.report.get("owners", ())) for other in self._others)]
        parts = Counter(owner for owners in working for owner in owners)
        weights = [sum(self._weight_of(owner) / parts[owner] for owner in owners) for owners in working]
        return weights[0] / sum(weights) if self._own else 1 / self._shards.count


class Health:
    """An observer of the services and the queues.

    Args:
        state_dir: A folder; the gauges report the free space of its volume.
    """

    def __init__(
        self,
        futures: Futures,
        sessions: Sessions,
        base_models: BaseModels,
        versions: Versions,
        state_dir: Path,
        shares: Shares,
    ) -> None:
        self._futures, self._sessions, self._base_models = futures, sessions, base_models
        self._shares = shares
        self._versions, self._state_dir = versions, state_dir
        self._depth = LabelledGauge(metrics.QUEUE_DEPTH)
        self._lag = LabelledGauge(metrics.VERSION_LAG)
        self._waiting, self._tokens = LabelledGauge(metrics.WAITING), LabelledGauge(metrics.REPLICA_TOKENS)
        self._replicas = LabelledGauge(metrics.REPLICAS)
        self._models = LabelledGauge(metrics.TRAINER_MODELS)
        self._trainer_instances: dict[str, str] = {}

    async def served_models(self) -> list[gateway_pb2.ServedModel]:
        """Returns the served models and their limits, as the services report them.

        A base model is left out until one of its renderers has answered. Raises Unavailable if that leaves none.
        """
        seen = [base for base in self._base_models if any(renderer.info for renderer in base.renderers.members)]
        return [await _served(base) for base in seen or self._base_models]

    def missing(self) -> list[str]:
        """Returns the names of the services that do not answer, or that have other model files than their trainer."""
        missing = []
        for base in self._base_models:
            of_model = "" if base is self._base_models.default else f" of {base.name}"
            up = {
                "the trainer": not base.trainers or bool(base.trainers.up),
                "a sampler": not base.is_sampled
                or any(_is_of_trainer(base, sampler.info) for sampler in base.samplers.up),
                "a renderer": any(_is_of_trainer(base, renderer.info) for renderer in base.renderers.up),
            }
            missing += [f"{name}{of_model}" for name, is_up in up.items() if not is_up]
        return missing

    def report(self, models: dict[str, int]) -> dict[str, Any]:
        """Returns this gateway's load, by which shards divide shared resources and routers place new sessions.

        Args:
            models: The number of models in trainers by owner.
        """
        owners = self._shares.note_work(pending.submission.owner for pending in self._futures.unfinished())
        return {"sessions": self._sessions.open_count, "owners": owners, "models": models}

    async def set_gauges(self) -> None:
        """Sets the gauges. Raises OSError if the disk usage of the state folder cannot be read."""
        self._depth.set(Counter(map(_labels, self._futures.unfinished())))
        metrics.SESSIONS.set(self._sessions.open_count)
        lags: dict[tuple[str, ...], float] = {}
        waiting: dict[tuple[str, ...], float] = {}
        tokens: dict[tuple[str, ...], float] = {}
        there: dict[tuple[str, ...], float] = {}
        held: dict[tuple[str, ...], float] = {}
        for base in self._base_models:
            for sampler in base.samplers.up:
                lags[sampler.address,] = self._versions.lag((sampler.weights_lock.resident or "", *sampler.adapters))
            replicas = (*base.renderers.members, *base.samplers.members)
            waiting |= {(each.service, each.address): each.waiting for each in replicas}
            tokens |= {(each.service, each.address): each.tokens for each in replicas}
            there |= _counted(base)
            for trainer in base.trainers.links:
                self._note_restart(trainer)
                if trainer.up and trainer.info is not None:
                    held[base.name, trainer.address] = len(trainer.info.model_ids)
        self._replicas.set(there)
        self._models.set(held)
        self._lag.set(lags)
        self._waiting.set(waiting)
        self._tokens.set(tokens)
        usage = shutil.disk_usage(self._state_dir)
        metrics.STATE_BYTES.labels("size").set(usage.total)
        metrics.STATE_BYTES.labels("free").set(usage.free)

    def clear_gauges(self) -> None:
        """Resets the gauges, which belong to the process and would otherwise outlive this gateway."""
        for gauge in (self._depth, self._lag, self._waiting, self._tokens, self._replicas, self._models):
            gauge.set({})
        metrics.SESSIONS.set(0)

    def _note_restart(self, trainer: TrainerLink) -> None:
        if trainer.info is None:
            return
        instance = trainer.info.instance_id
        if self._trainer_instances.setdefault(trainer.address, instance) != instance:
            metrics.TRAINER_RESTARTS.inc()
        self._trainer_instances[trainer.address] = instance


def _counted(base: BaseModel) -> dict[tuple[str, ...], float]:
    """Counts replicas by service, base model and state. A service that a base model does not use is left out."""
    counts = {"renderer": (len(base.renderers.members), len(base.renderers.up))}
    if base.is_sampled:
        counts["sampler"] = (len(base.samplers.members), len(base.samplers.up))
    if base.trainers:
        counts["trainer"] = (len(base.trainers.links), len(base.trainers.up))
    return {
        (service, base.name, state): count
        for service, (known, up) in counts.items()
        for state, count in (("known", known), ("up", up))
    }


async def _served(base: BaseModel) -> gateway_pb2.ServedModel:
    renderer = await base.renderers.info()
    trainer = base.trainers.info
    limits = [renderer.max_context_length]
    limits += [info.max_context_length for info in (base.samplers.info, trainer) if info is not None]
    return gateway_pb2.ServedModel(
        name=base.name,
        max_context_length=min(limit for limit in limits if limit),
        supports_images=renderer.supports_images,
        max_lora_rank=trainer.max_lora_rank if trainer is not None else 0,
        is_trained=bool(base.trainers),
        is_sampled=base.is_sampled,
    )


def _is_of_trainer(base: BaseModel, info: GetSamplerInfoResponse | GetRendererInfoResponse | None) -> bool:
    return info is not None and not base.trainers.find_unlike(info.model_files)


class LabelledGauge:
    """A gauge that shows only the series of the last `set`."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._shown: set[tuple[str, ...]] = set()

    def set(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Sets the series to these values, keyed by labels in the gauge's order, and removes all others."""
        for gone in self._shown.difference(values):
            self._gauge.remove(*gone)
        for labels, value in values.items():
            self._gauge.labels(*labels).set(value)
        self._shown = set(values)


def _labels(pending: Pending) -> tuple[str, str, str]:
    state = "waiting" if pending.progress.begun_at is None else "running"
    return pending.model, pending.submission.owner, state
