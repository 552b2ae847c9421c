"""Gauges that are read off the gateway every other second: queues, lag of samplers, who answers, room on the disk."""

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import Gauge

from gateway import instruments as metrics
from gateway.futures.futures import FutureBoard
from gateway.replicas.renderers import Renderers
from gateway.replicas.samplers import Samplers
from gateway.replicas.snapshot_versions import Versions
from gateway.replicas.trainer_link import TrainerLink

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0


class Vitals:
    """Sets the gauges.

    Args:
        state_dir: A folder on the volume whose room is told.
    """

    def __init__(
        self,
        board: FutureBoard,
        renderers: Renderers,
        samplers: Samplers,
        trainer: TrainerLink,
        versions: Versions,
        state_dir: Path,
    ) -> None:
        self._board, self._renderers, self._samplers = board, renderers, samplers
        self._trainer, self._versions, self._state_dir = trainer, versions, state_dir
        self._depth = Labelled(metrics.QUEUE_DEPTH)
        self._lag = Labelled(metrics.VERSION_LAG)
        self._waiting = Labelled(metrics.WAITING)
        self._trainer_instance = ""

    async def watch(self) -> None:
        """Sets them every other second, until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:
                logger.exception("the gauges could not be set; the next time tries again")
            await asyncio.sleep(_PERIOD_S)

    async def look(self) -> None:
        """Sets them once. Raises OSError if the state folder cannot be looked at."""
        self._depth.set(Counter((each.model, each.owner, _state(each.begun_at)) for each in self._board.unfinished()))
        lags: dict[tuple[str, ...], float] = {}
        for sampler in self._samplers.up:
            lags[sampler.address,] = self._versions.lag((sampler.residency.resident or "", *sampler.adapters))
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


class Labelled:
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


def _state(begun_at: float | None) -> str:
    return "waiting" if begun_at is None else "running"
