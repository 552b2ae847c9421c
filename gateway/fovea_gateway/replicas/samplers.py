"""Samplers: their health, their load, the weights that they hold and the lock that guards these."""

import asyncio
import hashlib
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from cachetools import LRUCache

from fovea.api.v1 import model_input_pb2, sampler_pb2
from fovea.client import SamplerClient
from fovea.wire.errors import FoveaError, Unavailable
from fovea_gateway.replicas.discovery import Discovery
from fovea_gateway.replicas.replicas import CheckFiles, Replica, ReplicaLeft, Replicas, WeightOf

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 32 * 4
_CAPACITY = 2**16

_FILL = 1.25
"""The number of sequences in a sampler, relative to its batch size. A few wait in the sampler for free slots; the rest
wait in the gateway, where owners share the slots fairly."""
_BESIDE = 0.25
"""The share of the batch that one owner may use while another owner sends a few requests. Each sequence makes the steps
of all others longer: on an H200 from 4.6 to 13 ms with 64 of them, for the 4B shape (docs/lab/robustness.md)."""
_PATIENCE_S = 60.0
"""Seconds for which a sampler that cannot receive the current weights is kept out while others serve."""


Peers = Callable[[], list["Sampler"]]
PutResident = Callable[["Sampler", str], Awaitable[None]]
"""Puts full weights, by snapshot id, in place in a sampler. Raises FoveaError."""
CatchUp = Callable[["Sampler", Peers], Awaitable[None]]
"""Transfers to a sampler the weights from which its peers are sampled. Raises FoveaError."""


class Sampler(Replica):
    """The gateway's connection to one sampler.

    Attributes:
        adapters: The ids of the snapshots that it holds as adapters.
        weights_lock: Guards the full weights that it holds.
    """

    def __init__(
        self,
        address: str,
        concurrency: int,
        on_change: Callable[[], None],
        put_resident: PutResident,
        catch_up: CatchUp,
        peers: Peers,
        check_files: CheckFiles,
        weight_of: WeightOf,
        beside: int,
        part: Callable[[], float],
    ) -> None:
        super().__init__("sampler", address, concurrency, on_change, weight_of)
        self._part = part
        self.client: SamplerClient = SamplerClient(address)
        self._catch_up, self._peers, self._check_files = catch_up, peers, check_files
        self._behind_since: float | None = None
        self._concurrency, self._beside = concurrency, beside
        self.info: sampler_pb2.GetSamplerInfoResponse | None = None
        self.adapters: set[str] = set()
        self.weights_lock = WeightsLock(lambda wanted: put_resident(self, wanted))

    @property
    def device_count(self) -> int:
        """The number of devices over which its model is split."""
        return max(self.info.transfer_worker_count, 1) if self.info is not None else 1

    async def ask(self) -> None:
        """Asks which weights it holds. A new engine must be prepared again.

        Raises FailedPrecondition if its model files differ from those of the other services.
        """
        info = await self.client.info(timeout_s=5.0)
        self._check_files(f"the sampler at {self.address}", info.model_files)
        if info.max_sequences:
            beside = self._beside or math.ceil(_BESIDE * info.max_sequences)
            places, part = min(self._concurrency, math.ceil(_FILL * info.max_sequences)), self._part()
            self._slots.resize(math.ceil(part * places), math.ceil(part * beside))
        is_new = info.instance_id != self.instance_id
        self.info, self.instance_id = info, info.instance_id
        if is_new:
            logger.info("sampler %s answers, instance %s", self.address, info.instance_id)
            self.up = False
            self.adapters = set()
            self.weights_lock.reset(info.resident_snapshot_id)
        # A push that an earlier gateway began may have ended only now.
        self.adapters.update(info.adapter_snapshot_ids)

    def note_not_loaded(self, snapshot_id: str) -> None:
        """Records that the sampler reports a snapshot as not loaded."""
        self.adapters.discard(snapshot_id)
        if self.weights_lock.resident == snapshot_id or not snapshot_id:
            self.weights_lock.reset(None)

    async def prepare(self) -> bool:
        """Transfers the weights that the other samplers serve now. Returns False if the next check should try again."""
        try:
            await self._catch_up(self, self._peers)
        except FoveaError as error:
            now = asyncio.get_running_loop().time()
            if self._behind_since is None:
                self._behind_since = now
                logger.warning("sampler %s is waiting for the current weights: %s", self.address, error)
            if self._peers() and now - self._behind_since < _PATIENCE_S:
                return False
            logger.warning("sampler %s accepts requests without the current weights: %s", self.address, error)
        self._behind_since = None
        return True

    def leave(self) -> None:
        """Records that discovery no longer lists the sampler, and sends waiting requests to other samplers."""
        super().leave()
        self.weights_lock.dismiss(ReplicaLeft(self.address))


class Affinity:
    """A record of the samplers that have computed the beginning of a prompt, so that a conversation reaches its prefix
    cache.

    Only whole blocks of prompts count, as in vLLM's cache. The tokens sampled after the last prompt are unknown here.
    One request later they are part of a prompt, and computing them again takes one step. The block that was unused for
    the longest time is forgotten first.

    Args:
        capacity: The number of blocks of 32 tokens to remember.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._instances: LRUCache[bytes, set[str]] = LRUCache(capacity)

    def longest(self, keys: Sequence[bytes]) -> set[str]:
        """Returns the instances that received most leading blocks of a prompt; empty if none has the first block."""
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
        """Records that an instance receives a prompt."""
        # Touch the first block last, so that it is forgotten last: the other blocks are useless without it.
        for key in reversed(keys):
            self._instances.setdefault(key, set()).add(instance)


def prefix_keys(owner: str, snapshot_id: str, prompt: model_input_pb2.RenderedInput) -> list[bytes]:
    """Returns a key for each whole block of a prompt. It covers everything that the engine's cache distinguishes.

    Args:
        owner: The owner of the request. Cache entries of one owner are not used for another.
        snapshot_id: The id of the weights.
        prompt: The rendered prompt. Placeholder tokens are the same for all images, so the digests of the features
            distinguish them.
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
        discovery: Supplies their addresses.
        concurrency: The maximum number of sequences in one sampler at a time.
        put_resident: Loads full weights into one of them.
        catch_up: Transfers the weights of the others to one that joins.
        is_lost: Returns whether a snapshot can no longer be pushed to samplers that lack it.
        check_files: Checks that they have the same model as the other services.
        weight_of: Returns an owner's weight for the division of the slots.
        beside: The number of sequences in one sampler while an owner with few requests is present; 0 derives it from
            the sampler's batch size.
        part: Returns this gateway's part of the slots, above 0 and at most 1.
    """

    def __init__(
        self,
        discovery: Discovery,
        concurrency: int,
        put_resident: PutResident,
        catch_up: CatchUp,
        is_lost: Callable[[str], bool],
        check_files: CheckFiles,
        weight_of: WeightOf,
        beside: int = 0,
        part: Callable[[], float] = lambda: 1.0,
    ) -> None:
        super().__init__(
            "sampler",
            discovery,
            lambda address, on_change: Sampler(
                address,
                concurrency,
                on_change,
                put_resident,
                catch_up,
                lambda: self.up,
                check_files,
                weight_of,
                beside,
                part,
            ),
        )
        self._is_lost = is_lost
        self._affinity = Affinity()

    @property
    def info(self) -> sampler_pb2.GetSamplerInfoResponse | None:
        """The info of a sampler; all are alike. None until one has answered."""
        return next((sampler.info for sampler in self.members if sampler.info is not None), None)

    def least_busy(self) -> Sampler:
        """Returns the least busy sampler. Raises Unavailable if none is up."""
        if not self.up:
            raise Unavailable("no sampler answers")
        return min(self.up, key=_queued)

    def pick(self, owner: str, snapshot_id: str, prompt: model_input_pb2.RenderedInput) -> Sampler:
        """Returns the best sampler for a prompt: a holder of the snapshot that has seen most of the prompt, or the
        least busy.

        Raises Unavailable if none is up.
        """
        least = self.least_busy()
        holders = [s for s in self.up if snapshot_id in s.adapters or snapshot_id == s.weights_lock.resident]
        if holders and self._is_lost(snapshot_id):
            least = min(holders, key=_queued)
        best = min(holders, key=_queued, default=least)
        # Prefer a holder until its queue is twice the least busy one's plus 8, so that short queues do not count.
        # Beyond that, loading the snapshot elsewhere once takes less time than the waits of the requests.
        if best.queued > 2 * least.queued + 8:
            best = least
        keys = prefix_keys(owner, snapshot_id, prompt)
        seen = self._affinity.longest(keys)
        affine = min((s for s in holders if s.instance_id in seen), key=_queued, default=best)
        # A cached prefix saves less than a loaded snapshot, since it is soon computed again. It justifies a queue that
        # is a quarter longer, plus 4.
        if affine.queued <= 1.25 * least.queued + 4:
            best = affine
        self._affinity.note(keys, best.instance_id)
        return best


def _queued(sampler: Sampler) -> int:
    return sampler.queued


BASE = ""


def version_of(snapshot: str) -> tuple[str, int] | None:
    """Returns the model and the number of a snapshot that can be sampled; None for the base model and for exports."""
    model, _, number = snapshot.partition("@")
    return (model, int(number)) if number.isdecimal() else None


def _replaces(new: str, old: str) -> bool:
    """Returns whether a snapshot is the same as another or a newer one of the same model."""
    ours, theirs = version_of(new), version_of(old)
    return ours is not None and theirs is not None and ours[0] == theirs[0] and ours[1] >= theirs[1]


class WeightsLock:
    """A lock on the full weights in one sampler, so that requests for different weights do not overlap.

    A sampler holds one set of full parameters, or the base model, to which adapters are added. Requests for the
    current set run side by side. A request for another set waits until they have ended; then the set is replaced, and
    all requests that wait for the new set are admitted together. Later requests for the old set queue behind them, so
    neither side can starve the other.

    Requests that follow a model are not waited for if a request that follows it too brings newer weights: they continue
    in the sampler with the new set.

    Args:
        change: Loads a set of weights. It is called while no request uses the current set, or only followers do.
    """

    def __init__(self, change: Callable[[str], Awaitable[None]]) -> None:
        self._change = change
        self._resident: str | None = BASE
        self._used = BASE  # the last known set: those inside use it, even if a change has failed
        self._inside = self._following = 0
        self._waiting: deque[tuple[str, bool, asyncio.Future[None]]] = deque()
        self._changing: asyncio.Task[None] | None = None

    @property
    def resident(self) -> str | None:
        """The current set; None if it is unknown, in which case the next request puts its own set in place."""
        return self._resident

    @property
    def inside(self) -> int:
        """The number of requests that use the current set."""
        return self._inside

    def reset(self, resident: str | None) -> None:
        """Records the current set after a restart or an unexpected change."""
        self._resident = resident
        self._used = self._used if resident is None else resident
        self._advance()

    def is_followed_by(self, wanted: str) -> bool:
        """Returns whether requests use the current set that would continue with `wanted`."""
        return self._following > 0 and self._resident != wanted and _replaces(wanted, self._used)

    def dismiss(self, error: Exception) -> None:
        """Makes all waiting `hold` calls raise the error. Requests inside are not affected."""
        for *_, turn in self._waiting:
            if not turn.done():
                turn.set_exception(error)
        self._waiting.clear()

    @asynccontextmanager
    async def hold(self, wanted: str, follows: bool = False) -> AsyncIterator[None]:
        """Waits until `wanted` is in place and holds it there. Raises the errors of `change`.

        Args:
            wanted: The set of weights.
            follows: Whether the caller continues with newer weights of the same model, so that they can be put in place
                before the block ends.
        """
        if self._waiting or self._changing or self._resident != wanted:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((wanted, follows, turn))
            self._advance()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._leave(follows)  # Admitted and cancelled at the same moment.
                raise
        else:
            self._enter(follows)
        try:
            yield
        finally:
            self._leave(follows)

    def _enter(self, follows: bool) -> None:
        self._inside, self._following = self._inside + 1, self._following + follows

    def _leave(self, follows: bool) -> None:
        self._inside, self._following = self._inside - 1, self._following - follows
        self._advance()

    def _advance(self) -> None:
        if self._changing:
            return
        while self._waiting and self._waiting[0][-1].done():
            self._waiting.popleft()
        if not self._waiting:
            return
        wanted, follows, _ = self._waiting[0]
        continue_all = follows and self._inside == self._following and _replaces(wanted, self._used)
        if wanted == self._resident:
            self._admit(wanted)
            self._advance()
        elif self._inside == 0 or continue_all:
            self._changing = asyncio.create_task(self._put(wanted), name=f"put {wanted or 'base'}")

    def _admit(self, wanted: str) -> None:
        for _, follows, turn in self._waiting_for(wanted):
            self._enter(follows)
            turn.set_result(None)
        self._waiting = deque(entry for entry in self._waiting if not entry[-1].done())

    def _waiting_for(self, wanted: str) -> list[tuple[str, bool, asyncio.Future[None]]]:
        return [entry for entry in self._waiting if entry[0] == wanted and not entry[-1].done()]

    async def _put(self, wanted: str) -> None:
        try:
            await self._change(wanted)
            self._resident = self._used = wanted
        except Exception as error:
            self._resident = None
            for *_, turn in self._waiting_for(wanted):
                turn.set_exception(error)
        finally:
            self._changing = None
        self._advance()
