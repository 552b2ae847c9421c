"""How the gateway and its services are: what is served, what is missing; and gauges of queues, of how far samplers lag
behind, of who answers, of room on the disk.
"""

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import Gauge

from fovea.api.v1 import gateway_pb2
from fovea.api.v1.renderer_pb2 import GetRendererInfoResponse
from fovea.api.v1.sampler_pb2 import GetSamplerInfoResponse
from gateway import gateway_metrics as metrics
from gateway.futures.future import Pending
from gateway.futures.futures import Futures
from gateway.replicas.renderers import Renderers
from gateway.replicas.samplers import Samplers
from gateway.replicas.snapshot_pushes import Versions
from gateway.replicas.trainer_link import TrainerLink


class Health:
    """Looks at the services and at what waits for them.

    Args:
        model_name: What clients call the served model.
        state_dir: A folder on the volume whose room is told.
    """

    def __init__(
        self,
        model_name: str,
        futures: Futures,
        renderers: Renderers,
        samplers: Samplers,
        trainer: TrainerLink,
        versions: Versions,
        state_dir: Path,
    ) -> None:
        self._model_name, self._futures, self._renderers, self._samplers = model_name, futures, renderers, samplers
        self._trainer, self._versions, self._state_dir = trainer, versions, state_dir
        self._depth = LabelledGauge(metrics.QUEUE_DEPTH)
        self._lag = LabelledGauge(metrics.VERSION_LAG)
        self._waiting = LabelledGauge(metrics.WAITING)
        self._trainer_instance = ""

    async def served_model(self) -> gateway_pb2.ServedModel:
        """The served model and its limits, as the services state them. Raises Unavailable until a renderer was seen."""
        renderer = await self._renderers.info()
        limits = [renderer.max_context_length]
        limits += [info.max_context_length for info in (self._samplers.info, self._trainer.info) if info is not None]
        return gateway_pb2.ServedModel(
            name=self._model_name,
            max_context_length=min(limit for limit in limits if limit),
            supports_images=renderer.supports_images,
            max_lora_rank=self._trainer.info.max_lora_rank if self._trainer.info is not None else 0,
        )

    def missing(self) -> list[str]:
        """Which services do not answer, or have other files of the model than the trainer."""
        up = {
            "the trainer": self._trainer.up,
            "a sampler": any(self._is_of_trainer(sampler.info) for sampler in self._samplers.up),
            "a renderer": any(self._is_of_trainer(renderer.info) for renderer in self._renderers.up),
        }
        return [name for name, is_up in up.items() if not is_up]

    def _is_of_trainer(self, info: GetSamplerInfoResponse | GetRendererInfoResponse | None) -> bool:
        return info is not None and not self._trainer.find_unlike(info.model_files)

    async def set_gauges(self) -> None:
        """Sets the gauges. Raises OSError if the state folder cannot be looked at."""
        self._depth.set(Counter(map(_labels, self._futures.unfinished())))
        lags: dict[tuple[str, ...], float] = {}
        for sampler in self._samplers.up:
            lags[sampler.address,] = self._versions.lag((sampler.weights_lock.resident or "", *sampler.adapters))
        self._lag.set(lags)
        replicas = (*self._renderers.members, *self._samplers.members)
        self._waiting.set({(each.service, each.address): each.waiting for each in replicas})
        metrics.REPLICAS.labels("trainer", "known").set(1)
        metrics.REPLICAS.labels("trainer", "up").set(self._trainer.up)
        self._note_restart()
        usage = shutil.disk_usage(self._state_dir)
        metrics.STATE_BYTES.labels("size").set(usage.total)
        metrics.STATE_BYTES.labels("free").set(usage.free)

    def _note_restart(self) -> None:
        info = self._trainer.info
        if info is None or info.instance_id == self._trainer_instance:
            return
        if self._trainer_instance:
            metrics.TRAINER_RESTARTS.inc()
        self._trainer_instance = info.instance_id


class LabelledGauge:
    """A gauge whose series are those of the last `set`: what is gone leaves no series behind."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._shown: set[tuple[str, ...]] = set()

    def set(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Shows these values, by their labels in the gauge's order, and no other ones."""
        for gone in self._shown.difference(values):
            self._gauge.remove(*gone)
        for labels, value in values.items():
            self._gauge.labels(*labels).set(value)
        self._shown = set(values)


def _labels(pending: Pending) -> tuple[str, str, str]:
    state = "waiting" if pending.progress.begun_at is None else "running"
    return pending.model, pending.submission.owner, state
