"""Starts the ranks of this node, each a process of its own, and ends with them. Needs no torch: it starts fast."""

import asyncio
import os
import signal
import sys
import tempfile
from typing import Any, NoReturn

from fovea.runtime.hosts import interface_of, is_loopback
from services.trainer.ranks.place import Place
from services.trainer.ranks.rendezvous import Meeting, NodesMissing, meet
from services.trainer.settings import TrainerSettings

LEAVE_S = 8.0
"""How long the ranks get to leave together after the last call has ended."""

MARGIN_S = 5.0
"""What a node that was told to stop waits longer than rank 0, which may be on another one."""


def launch(settings: TrainerSettings) -> int:
    """Runs this command line again as `settings.ranks` ranks on this node; returns the exit status.

    SIGTERM and SIGINT go to the ranks: rank 0, on whatever node, ends what runs, then all leave. The status is 0 on
    nodes that had the signal and whose ranks then left, and 1 if the ranks ended without one or did not meet: whoever
    supervises starts the trainer anew.
    """
    # Until there are ranks. Without a handler, the first process of a container is deaf.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    name = f"trainer: node {settings.node_rank}"
    if settings.nodes == 1:
        with tempfile.TemporaryDirectory(prefix="fovea-trainer-") as folder:  # which others may not enter
            return asyncio.run(_Node(settings, name, folder, Meeting([settings.ranks], "127.0.0.1", 0)).run())
    try:
        print(f"{name}: meets {settings.nodes - 1} more at {settings.master_addr}", file=sys.stderr, flush=True)
        meeting = meet(settings)
    except NodesMissing as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    store = f"{settings.master_addr}:{meeting.store_port}"
    return asyncio.run(_Node(settings, name, store, meeting).run())


class _Node:
    """The ranks of this node."""

    def __init__(self, settings: TrainerSettings, name: str, store: str, meeting: Meeting) -> None:
        self._settings = settings
        self._name = name
        self._store = store
        self._meeting = meeting
        self._first = sum(meeting.ranks[: settings.node_rank])
        self._told = asyncio.Event()
        self._running: dict[asyncio.Task[int], tuple[int, asyncio.subprocess.Process]] = {}

    async def run(self) -> int:
        """Returns the exit status, once no rank is left."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._told.set)
        for local_rank in range(self._settings.ranks):
            process = await self._start(local_rank)
            self._running[asyncio.create_task(process.wait())] = (self._first + local_rank, process)
        if self._meeting.store_listener:
            self._meeting.store_listener.close()  # rank 0 has it
        told = asyncio.create_task(self._told.wait())
        while self._running and not told.done():
            ended = await self._ended({told})
            if any(ended.values()):
                await self._stop()
                return self._complain(ended, "")
        return self._complain(await self._stop(), " after it was told to stop") if told.done() else 0

    async def _start(self, local_rank: int) -> asyncio.subprocess.Process:
        rank, fd = self._first + local_rank, None
        if rank == 0 and self._meeting.store_listener:
            fd = self._meeting.store_listener.fileno()
        place = Place(
            rank,
            sum(self._meeting.ranks),
            local_rank,
            self._settings.node_rank,
            self._store,
            os.getpid(),
            fd,
        )
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.trainer", *sys.argv[1:]),
            env=_defaults(self._settings, self._meeting.address) | os.environ | _fixed(self._settings, place),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=() if fd is None else (fd,),
            start_new_session=True,  # Ctrl-C reaches this process alone, which tells the ranks
        )

    async def _ended(self, others: set[asyncio.Task[Any]], timeout_s: float | None = None) -> dict[int, int]:
        """Exit statuses by rank of those that end first; none if one of `others` does, or after `timeout_s`."""
        done, _ = await asyncio.wait({*self._running, *others}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return {self._running.pop(task)[0]: task.result() for task in list(self._running) if task in done}

    async def _stop(self) -> dict[int, int]:
        """Has all ranks leave, and kills those that do not; returns their statuses, but of those the signal ended."""
        for _, process in self._running.values():
            process.terminate()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.drain_s + LEAVE_S + MARGIN_S
        ended: dict[int, int] = {}
        while self._running:
            if loop.time() >= deadline:
                for _, process in self._running.values():
                    process.kill()
            ended |= await self._ended(set(), max(0.1, deadline - loop.time()))
        return {rank: status for rank, status in ended.items() if status != -signal.SIGTERM}

    def _complain(self, ended: dict[int, int], when: str) -> int:
        """Names the rank that ended badly; returns the exit status. One that a signal ended died before the others."""
        failures = sorted((status > 0, rank, status) for rank, status in ended.items() if status)
        if not failures:
            return 0
        _, rank, status = failures[0]
        how = f"with status {status}" if status > 0 else f"by {signal.Signals(-status).name}"
        print(f"{self._name}: rank {rank} ended {how}{when}; what it logged says why", file=sys.stderr)
        return 1


def _defaults(settings: TrainerSettings, address: str) -> dict[str, str]:
    """Environment of the ranks, where the user has not set other values."""
    found = {
        # Micro-batches differ in size: without it, blocks of other sizes lie around unused, 4 GiB of them at the limit.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    # Else they listen on whatever network this machine's name leads to.
    if interface := interface_of(address):
        found["GLOO_SOCKET_IFNAME"] = interface
        # NCCL knows one setting for all groups, those of pushes too: samplers may be elsewhere.
        if settings.nodes > 1 or is_loopback(settings.transfer_address or settings.host):
            found["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return found


def _fixed(settings: TrainerSettings, place: Place) -> dict[str, str]:
    local = {"LOCAL_WORLD_SIZE": str(settings.ranks), "OMP_NUM_THREADS": str(settings.threads)}
    return place.environment() | local


def _leave(*_: Any) -> NoReturn:
    sys.exit(0)
