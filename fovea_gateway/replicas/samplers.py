"""Samplers: which are up, how busy they are, what they hold."""

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from cachetools import LRUCache

from fovea.api.v1 import model_input_pb2, sampler_pb2
from fovea.client import SamplerClient
from fovea.wire.errors import FoveaError, Unavailable
from fovea_gateway.discovery.discovery import Discovery
from fovea_gateway.replicas.replicas import CheckFiles, Replica, ReplicaLeft, Replicas, WeightOf
from fovea_gateway.replicas.weights_lock import WeightsLock

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 32 * 4
_CAPACITY = 2**16

_FILL = 1.25
"""Sequences in a sampler over those of its batch: some wait there for places that become free, and the rest here, where
owners share them."""
_BESIDE = 0.25
"""What of a batch is used beside an owner who sends a little: each sequence makes the steps of all others longer, on an
H200 from 4.6 to 13 ms for 64 of them and the 4B shape (docs/lab/robustness.md)."""
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
        weights_lock: Guards the full weights in place.
    """

    def __init__(
        self,
        address: str,
        concurrency: int,
        on_change: Callable[[], None],
        weights: Weights,
        peers: Callable[[], list["Sampler"]],
        check_files: CheckFiles,
        weight_of: WeightOf,
        beside: int,
    ) -> None:
        super().__init__("sampler", address, concurrency, on_change, weight_of)
        self._client = SamplerClient(address)
        self._weights, self._peers, self._check_files = weights, peers, check_files
        self._behind_since: float | None = None
        self._concurrency, self._beside = concurrency, beside
        self.info: sampler_pb2.GetSamplerInfoResponse | None = None
        self.adapters: set[str] = set()
        self.weights_lock = WeightsLock(lambda wanted: weights.put_resident(self, wanted))

    @property
    def client(self) -> SamplerClient:
        return self._client

    @property
    def instance_id(self) -> str:
        """Of its engine, another one after a restart; empty before it first answered."""
        return self.info.instance_id if self.info is not None else ""

    @property
    def device_count(self) -> int:
        """Devices over which its model is split."""
        return max(self.info.transfer_worker_count, 1) if self.info is not None else 1

    async def ask(self) -> None:
        """Asks what it holds; a new engine has to be prepared anew.

        Raises FailedPrecondition if it has another model than the other services.
        """
        info = await self.client.info(timeout_s=5.0)
        self._check_files(f"the sampler at {self.address}", info.model_files)
        if info.max_sequences:
            beside = self._beside or math.ceil(_BESIDE * info.max_sequences)
            self._places.resize(min(self._concurrency, math.ceil(_FILL * info.max_sequences)), beside)
        is_new = info.instance_id != self.instance_id
        self.info = info
        if is_new:
            logger.info("sampler %s answers, instance %s", self.address, info.instance_id)
            self.up = False
            self.adapters = set()
            self.weights_lock.reset(info.resident_snapshot_id)
        # An earlier gateway may have had one pushed that has only come now.
        self.adapters.update(info.adapter_snapshot_ids)

    def note_not_loaded(self, snapshot_id: str) -> None:
        """Notes that it says that it does not hold a snapshot."""
        self.adapters.discard(snapshot_id)
        if self.weights_lock.resident == snapshot_id or not snapshot_id:
            self.weights_lock.reset(None)

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
        self.weights_lock.dismiss(ReplicaLeft(self.address))


class Affinity:
    """Which samplers have computed the beginning of a prompt, so that a conversation returns to its prefix cache.

    Only prompts count, by blocks, as vLLM caches them. What was sampled after the last one is not known here: a turn
    later it is part of a prompt, and computing it anew takes one step. What was not seen for longest is forgotten
    first.

    Args:
        capacity: Blocks of 32 tokens that are remembered.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._instances: LRUCache[bytes, set[str]] = LRUCache(capacity)

    def longest(self, keys: Sequence[bytes]) -> set[str]:
        """The sampler instances that were sent the most blocks of a prompt; empty if nobody was sent even the first."""
        found: set[str] = set()
        for key in keys:
            deeper = self._instances.get(key, set())
            if found:
                deeper = deeper & found
            if not deeper:
                break
            found = deeper
        return set(found)

    def note(self, keys: Sequence[bytes], instance: str) -> None:
        """An instance is sent a prompt."""
        # The first block goes last: without it the others are of no use.
        for key in reversed(keys):
            self._instances.setdefault(key, set()).add(instance)


def prefix_keys(owner: str, snapshot_id: str, prompt: model_input_pb2.RenderedInput) -> list[bytes]:
    """A key for each whole block of a prompt, which depends on all that the engine's cache does.

    Args:
        owner: Whose request it is: what is cached for one is not used for another.
        snapshot_id: The weights.
        prompt: Its placeholders are alike for all pictures; what tells them apart is the features' digests.
    """
    key = hashlib.blake2b(f"{owner}\0{snapshot_id}".encode(), digest_size=16).digest()
    spans = [(4 * span.offset, span.feature.digest.encode()) for span in prompt.spans]
    keys = []
    for start in range(0, len(prompt.tokens) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        end = start + _BLOCK_BYTES
        begun = [digest for offset, digest in spans if start <= offset < end]
        block = b"".join([key, prompt.tokens[start:end], *begun])
        key = hashlib.blake2b(block, digest_size=16).digest()
        keys.append(key)
    return keys


class Samplers(Replicas[Sampler]):
    """All samplers of a base model. Call `start` before use.

    Args:
        discovery: Where they are.
        concurrency: Sequences inside one sampler at once.
        weights: Brings weights to them.
        check_files: Whether they have the model that the other services have.
        weight_of: An owner's share of the places in each.
        beside: Sequences inside one while an owner is there who sends a little; 0 goes by what it runs on.
    """

    def __init__(
        self,
        discovery: Discovery,
        concurrency: int,
        weights: Weights,
        check_files: CheckFiles,
        weight_of: WeightOf,
        beside: int = 0,
    ) -> None:
        super().__init__(
            "sampler",
            discovery,
            lambda address, on_change: Sampler(
                address, concurrency, on_change, weights, lambda: self.up, check_files, weight_of, beside
            ),
        )
        self._weights = weights
        self._affinity = Affinity()

    @property
    def info(self) -> sampler_pb2.GetSamplerInfoResponse | None:
        """What a sampler serves: they are all alike. None before one was ever seen."""
        return next((sampler.info for sampler in self.members if sampler.info is not None), None)

    def least_busy(self) -> Sampler:
        """For what any sampler does. Raises Unavailable if none is up."""
        if not self.up:
            raise Unavailable("no sampler answers")
        return min(self.up, key=_queued)

    def pick(self, owner: str, snapshot_id: str, prompt: model_input_pb2.RenderedInput) -> Sampler:
        """A sampler that holds the snapshot if possible: the one that has seen most of the owner's prompt, or the
        least busy.

        Raises Unavailable if none is up.
        """
        least = self.least_busy()
        holders = [s for s in self.up if snapshot_id in s.adapters or snapshot_id == s.weights_lock.resident]
        if holders and self._weights.is_lost(snapshot_id):
            least = min(holders, key=_queued)
        best = min(holders, key=_queued, default=least)
        # A holder is preferred until it has twice the queue of the least busy one, and 8 more, so that short queues do
        # not count: then loading the snapshot elsewhere, once, takes less time than waiting does for each request.
        if best.queued > 2 * least.queued + 8:
            best = least
        keys = prefix_keys(owner, snapshot_id, prompt)
        seen = self._affinity.longest(keys)
        affine = min((s for s in holders if s.instance_id in seen), key=_queued, default=best)
        # A cached prefix saves less than a loaded snapshot, since it is soon computed again: a quarter more in the
        # queue, and 4, is what it is worth.
        if affine.queued <= 1.25 * least.queued + 4:
            best = affine
        self._affinity.note(keys, best.instance_id)
        return best


def _queued(sampler: Sampler) -> int:
    return sampler.queued
