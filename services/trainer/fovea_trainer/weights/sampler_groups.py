"""Transfer groups of this trainer and samplers, reused by later pushes to the same samplers. Runs on the event loop."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from fovea.api.v1 import sampler_pb2
from fovea.client import SamplerClient
from fovea.wire.errors import FoveaError
from fovea_trainer.command_queue import CommandQueue, OpenGroup
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.weights.transfer_groups import TransferGroups

logger = logging.getLogger(__name__)

INFO_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 2.0
IDLE_S = 600.0
"""Seconds after which an unused group is closed: its members may be gone for good."""


@dataclass(frozen=True)
class Member:
    """A sampler and the facts that it reported when probed."""

    address: str
    instance_id: str
    worker_count: int
    backend: str
    receives_parts: bool
    """True if its workers can receive parts of tensors."""
    adapter_ids: frozenset[str]
    """Adapter snapshots that the sampler has loaded."""


MemberKey = tuple[int, int, frozenset[tuple[str, str]]]
"""Identity of a group: the numbers of senders and of parts, and the address and instance id of each sampler."""


def part_count(members: Iterable[Member], is_full: bool) -> int:
    """Returns the number of workers of each sampler, if every worker receives only its parts of tensors; else 0.

    An adapter is broadcast to all workers: each of them stores it, so that vLLM can load it again. Samplers of earlier
    versions receive only whole tensors.
    """
    able = is_full and all(member.receives_parts for member in members)
    most = max(member.worker_count for member in members)
    return most if able and most > 1 else 0


@dataclass
class _OpenGroup:
    """A group that has been joined. `used_at` is a reading of `time.monotonic`."""

    group_id: str
    used_at: float


class SamplerGroups:
    """Joins samplers in transfer groups.

    Args:
        settings: Settings of the trainer.
        queue: Queue of the command that makes the other senders join.
        groups: This process's ends of the groups.
        threads: Executor for the blocking joins.
    """

    def __init__(
        self, settings: TrainerSettings, queue: CommandQueue, groups: TransferGroups, threads: Executor
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._groups = groups
        self._threads = threads
        self._clients: dict[str, SamplerClient] = {}
        self._open: dict[MemberKey, _OpenGroup] = {}
        self._locks: WeakValueDictionary[MemberKey, asyncio.Lock] = WeakValueDictionary()

    def client(self, address: str) -> SamplerClient:
        """Returns the client of the sampler at an address."""
        if address not in self._clients:
            self._clients[address] = SamplerClient(address)
        return self._clients[address]

    async def probe(self, addresses: list[str]) -> dict[str, Member | str]:
        """Returns the sampler at each address, or the reason why it does not answer.

        Closes the groups that contain an instance that no longer runs at its address.
        """
        found = dict(zip(addresses, await asyncio.gather(*map(self._probe_one, addresses)), strict=True))
        present = {(member.address, member.instance_id) for member in found.values() if isinstance(member, Member)}
        for key in [key for key in self._open if any(one[0] in found and one not in present for one in key[2])]:
            self._close(key)
        return found

    @asynccontextmanager
    async def joined(self, members: list[Member], is_full: bool, deadline: float) -> AsyncIterator[str]:
        """Yields the id of a group of all `members`, for exclusive use.

        An error in the block makes all members leave it.

        Args:
            members: The samplers.
            is_full: True for full parameters, which have several senders.
            deadline: A reading of `time.monotonic`.

        Raises:
            TimeoutError: The deadline passed.
            RuntimeError: The members did not join in time. A sampler's own error is raised as a FoveaError.
        """
        key = self._key(members, is_full)
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            await asyncio.wait_for(lock.acquire(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise TimeoutError("the push timed out while it waited for another push to the same samplers") from None
        try:
            yield await self._join(key, members, deadline)
        except (FoveaError, RuntimeError, TimeoutError):
            await self._leave(key)
            raise
        except asyncio.CancelledError:
            self._close(key)  # a broadcast may be incomplete, so no later push may use the group
            raise
        finally:
            lock.release()

    async def leave(self, members: list[Member], is_full: bool) -> None:
        """Leaves the group of `members`, if there is one, and asks the members to leave it."""
        await self._leave(self._key(members, is_full))

    async def leave_idle(self) -> None:
        """Leaves the groups that were not used for `IDLE_S` seconds."""
        before = time.monotonic() - IDLE_S
        for key in [key for key, group in self._open.items() if group.used_at < before]:
            await self._leave(key)

    def interrupt(self, group_id: str) -> None:
        """Aborts the transfer over a group."""
        self._groups.close(group_id)

    async def close(self) -> None:
        """Leaves all groups and closes all channels."""
        for group in self._open.values():
            self._groups.close(group.group_id)
        self._open.clear()
        for client in self._clients.values():
            await client.close()

    async def _probe_one(self, address: str) -> Member | str:
        try:
            info = await self.client(address).info(INFO_TIMEOUT_S)
        except FoveaError as error:
            return f"it does not answer: {error.message}"
        return Member(
            address,
            info.instance_id,
            max(1, info.transfer_worker_count),
            info.transfer_backend,
            info.receives_parts,
            frozenset(info.adapter_snapshot_ids),
        )

    async def _join(self, key: MemberKey, members: list[Member], deadline: float) -> str:
        if (group := self._open.get(key)) is not None:
            group.used_at = time.monotonic()
            return group.group_id
        group_id = f"push-{uuid.uuid4().hex[:12]}"
        left_s = max(1.0, deadline - time.monotonic())
        timeout_s = min(self._settings.join_timeout_s, left_s)
        sender_count, parts, _ = key
        seats = [1 if parts else member.worker_count for member in members]
        world_size = 1 + sum(seats)
        command = OpenGroup(
            group_id,
            world_size,
            members[0].backend,
            timeout_s,
            self._settings.transfer_timeout_s,
            parts,
            [group.group_id for group in self._open.values()],
        )
        opening = asyncio.ensure_future(self._open_senders(command, sender_count))
        joins = []
        offset = 1  # rank 0 is this trainer
        for member, count in zip(members, seats, strict=True):
            request = sampler_pb2.JoinTransferGroupRequest(
                group_id=group_id,
                master_address=self._groups.address,
                master_port=self._groups.port,
                rank_offset=offset,
                world_size=world_size,
                # The other senders join only after the commands that are already queued, so allow all the time left.
                timeout_s=timeout_s if sender_count == 1 else left_s,
                sender_count=sender_count,
                is_split=parts > 0,
            )
            joins.append(asyncio.ensure_future(self.client(member.address).join_transfer_group(request)))
            offset += count
        self._open[key] = _OpenGroup(group_id, time.monotonic())
        try:
            await asyncio.gather(opening, *joins)
        finally:
            for task in (opening, *joins):
                task.cancel()
        return group_id

    async def _open_senders(self, command: OpenGroup, sender_count: int) -> None:
        """Joins the group on this rank, and after that on the other senders.

        If samplers do not join, only this rank waits for them.
        """
        meeting = (command.group_id, command.world_size, command.part_count, command.backend)
        timeouts = (command.join_timeout_s, command.broadcast_timeout_s)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._groups.open, *meeting, *timeouts)
        if sender_count > 1:
            await self._queue.submit(command)

    async def _leave(self, key: MemberKey) -> None:
        if (group_id := self._close(key)) is None:
            return
        leaving = (self.client(address).leave_transfer_group(group_id, LEAVE_TIMEOUT_S) for address, _ in key[2])
        for outcome in await asyncio.gather(*leaving, return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.debug("leaving %s: %s", group_id, outcome)

    def _close(self, key: MemberKey) -> str | None:
        group = self._open.pop(key, None)
        if group is None:
            return None
        self._groups.close(group.group_id)
        return group.group_id

    def _key(self, members: list[Member], is_full: bool) -> MemberKey:
        senders = self._settings.sender_count if is_full else 1
        return (
            senders,
            part_count(members, is_full),
            frozenset((member.address, member.instance_id) for member in members),
        )
