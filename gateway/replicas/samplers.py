"""Samplers: which are up, how busy they are, what they hold."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from fovea.api.v1 import model_input_pb2, sampler_pb2
from fovea.client import SamplerClient
from fovea.wire.errors import FoveaError, Unavailable
from gateway.discovery.discovery import Discovery
from gateway.replicas.prefix_affinity import Affinity, prefix_keys
from gateway.replicas.replica_set import Left, Replica, Replicas
from gateway.replicas.weights_lock import Residency

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0
"""How long a sampler that cannot be given the current weights is kept out while others serve."""


class Weights(Protocol):
    """Brings weights to samplers."""

    async def put_resident(self, sampler: "Sampler", snapshot_id: str) -> None:
        """Puts full weights in place. Raises FoveaError."""
        ...

    async def catch_up(self, sampler: "Sampler", peers: Callable[[], list["Sampler"]]) -> None:
        """Brings what the peers are sampled with. Raises FoveaError."""
        ...

    def is_lost(self, snapshot_id: str) -> bool:
        """Whether nobody who lacks a snapshot can be given it."""
        ...


class Sampler(Replica):
    """One sampler as the gateway knows it.

    Attributes:
        adapters: Snapshots that it holds as adapters.
        residency: Guards the full weights in place.
    """

    def __init__(self, address: str, concurrency: int, weights: Weights, peers: Callable[[], list["Sampler"]]) -> None:
        super().__init__("sampler", address, concurrency)
        self._client = SamplerClient(address)
        self._weights, self._peers = weights, peers
        self._behind_since: float | None = None
        self.info: sampler_pb2.GetSamplerInfoResponse | None = None
        self.adapters: set[str] = set()
        self.residency = Residency(lambda wanted: weights.put_resident(self, wanted))

    @property
    def client(self) -> SamplerClient:
        """Typed calls."""
        return self._client

    @property
    def instance_id(self) -> str:
        """Of its engine, another one after a restart; empty before it first answered."""
        return self.info.instance_id if self.info is not None else ""

    async def ask(self) -> None:
        """Asks what it holds; a new engine has to be prepared anew."""
        info = await self.client.info(timeout_s=5.0)
        is_new = info.instance_id != self.instance_id
        self.info = info
        if is_new:
            logger.info("sampler %s answers, instance %s", self.address, info.instance_id)
            self.up = False
            self.adapters = set(info.adapter_snapshot_ids)
            self.residency.reset(info.resident_snapshot_id)

    async def prepare(self) -> bool:
        """Gives it the weights that the others are sampled with now."""
        try:
            await self._weights.catch_up(self, self._peers)
        except FoveaError as error:
            now = asyncio.get_running_loop().time()
            if self._behind_since is None:
                self._behind_since = now
                logger.warning("sampler %s waits for the current weights: %s", self.address, error)
            if self._peers() and now - self._behind_since < _PATIENCE_S:
                return False
            logger.warning("sampler %s takes requests without the current weights: %s", self.address, error)
        self._behind_since = None
        return True

    def leave(self) -> None:
        """Sends those who wait for it elsewhere."""
        super().leave()
        self.residency.dismiss(Left(self.address))


class Samplers(Replicas[Sampler]):
    """All samplers. Call `start` before use.

    Args:
        discovery: Where they are.
        concurrency: Requests inside one sampler at once.
        weights: Brings weights to them.
    """

    def __init__(self, discovery: Discovery, concurrency: int, weights: Weights) -> None:
        super().__init__("sampler", discovery, lambda address: Sampler(address, concurrency, weights, lambda: self.up))
        self._weights = weights
        self._affinity = Affinity()

    @property
    def info(self) -> sampler_pb2.GetSamplerInfoResponse | None:
        """What a sampler serves: they are all alike. None before one was ever seen."""
        return next((sampler.info for sampler in self.members if sampler.info is not None), None)

    def pick(self, owner: str, snapshot_id: str, prompt: model_input_pb2.RenderedInput) -> Sampler:
        """A sampler that holds the snapshot if possible: the one that has seen most of the owner's prompt, or the
        least busy.

        Raises Unavailable if none is up.
        """
        if not self.up:
            raise Unavailable("no sampler answers")
        holders = [s for s in self.up if snapshot_id in s.adapters or snapshot_id == s.residency.resident]
        least = min(holders if holders and self._weights.is_lost(snapshot_id) else self.up, key=_queued)
        best = min(holders, key=_queued, default=least)
        # A holder is preferred until it is much busier: then loading the snapshot elsewhere pays.
        if best.queued > 2 * least.queued + 8:
            best = least
        keys = prefix_keys(owner, snapshot_id, prompt)
        seen = self._affinity.longest(keys)
        affine = min((s for s in holders if s.instance_id in seen), key=_queued, default=best)
        # A cached prefix is soon computed again: it is worth a short wait only.
        if affine.queued <= 1.25 * least.queued + 4:
            best = affine
        self._affinity.note(keys, best.instance_id)
        return best


def _queued(sampler: Sampler) -> int:
    return sampler.queued
