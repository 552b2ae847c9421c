"""Starts the ranks of this node as forks of this process, and ends with them.

On a machine without GPUs, the launcher first imports all that a rank needs: further ranks cost no imports, of six
seconds of a core each. With GPUs each rank imports for itself, because libraries may initialise CUDA, which forks could
not use. A lock that another thread of the launcher holds during a fork would stay locked in the rank for ever. The only
other threads are those of a rendezvous, which hold no locks while they wait for connections.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fovea.runtime.hosts import interface_of, is_loopback
from fovea.runtime.processes import die_with_parent, name_process
from fovea_trainer.ranks.rendezvous import Rendezvous, RendezvousFailed, rendezvous
from fovea_trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

Rank = Callable[[TrainerSettings, "RankEnvironment"], NoReturn]
"""A function that runs a rank until it ends, in the process of the rank."""

_TRANSFORMERS = (("5", "19"), ("5", "20"))
"""The versions that `requirements/` installs."""
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_STOPPING = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class RankEnvironment:
    """The identity of a rank and the meeting point of all ranks.

    Attributes:
        rank: Index among all ranks.
        world_size: Number of ranks.
        local_rank: Index among the ranks of this node, each of which has its own device.
        node: Index of this rank's node.
        rendezvous: A private folder if all ranks are on one node, else host:port of node 0.
        store_fd: On rank 0 of several nodes, the bound socket that listens at `rendezvous`.
    """

    rank: int
    world_size: int
    local_rank: int
    node: int
    rendezvous: str
    store_fd: int | None = None

    def to_environ(self) -> dict[str, str]:
        """Returns the environment variables in which torch looks for the rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "GROUP_RANK": str(self.node),
        }

    @property
    def is_first_of_node(self) -> bool:
        """True for the rank that serves health and metrics of its node."""
        return self.local_rank == 0

    @property
    def folder(self) -> Path | None:
        """The private folder in which the ranks of one node meet; None with several nodes."""
        return Path(self.rendezvous) if self.rendezvous.startswith("/") else None

    @property
    def host(self) -> str:
        """Address of rank 0, with several nodes."""
        return self.rendezvous.rpartition(":")[0]

    def open_store(self, timeout: timedelta) -> "Store":
        """Opens the store in which the ranks find each other: a file in the private folder, or a server on rank 0."""
        from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

        if self.folder:
            return FileStore(str(self.folder / "store"), self.world_size)
        port = int(self.rendezvous.rpartition(":")[2])
        return TCPStore(
            self.host, port, None, self.store_fd is not None, timeout, False, master_listen_fd=self.store_fd
        )


EXIT_S = 8.0
"""Seconds that the ranks get to exit together after the last call has ended."""

MARGIN_S = 5.0
"""Additional seconds that a stopping node waits, because rank 0 may be on another node."""


def launch(settings: TrainerSettings, import_rank: Callable[[], Rank]) -> int:
    """Runs `settings.ranks` ranks on this node. Returns the exit status.

    SIGTERM and SIGINT are forwarded to the ranks. Rank 0, which may be on another node, finishes the running commands,
    and then all ranks exit. The status is 0 on a node that received the signal, if its ranks then ended without an
    error. It is 1 if a rank failed, if the ranks ended without a signal, if the nodes did not meet, or if their ranks
    do not fit `--replicas`. A supervisor then restarts the trainer.

    Args:
        settings: The trainer's settings.
        import_rank: Imports all that a rank needs, and returns the function that runs a rank. A second call is fast.
    """
    # These handlers apply until the ranks start. Without a handler, the first process of a container ignores signals.
    for number in _STOPPING:
        signal.signal(number, _exit)
    name = f"trainer: node {settings.node_rank}"
    try:
        found = _meet(settings, name)
        settings.check_replicas(sum(found.ranks))
    except (RendezvousFailed, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    # torch reads some of these when it is imported.
    os.environ |= _defaults(settings, found.address) | os.environ | _fixed(settings)
    if settings.device == "cpu" or not any(map(os.path.exists, _GPU_DRIVERS)):
        import_rank()
    # A signal waits until the event loop handles it; a rank must not handle it as the launcher does.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    if settings.nodes == 1:
        with tempfile.TemporaryDirectory(prefix="fovea-trainer-") as folder:  # accessible to this user only
            return _Node(settings, name, folder, found).run(import_rank)
    return _Node(settings, name, f"{settings.master_addr}:{found.store_port}", found).run(import_rank)


def _meet(settings: TrainerSettings, name: str) -> Rendezvous:
    if settings.nodes == 1:
        return Rendezvous([settings.ranks], "127.0.0.1", 0)
    print(
        f"{name}: waiting for {settings.nodes - 1} other nodes at {settings.master_addr}", file=sys.stderr, flush=True
    )
    return rendezvous(settings)


def check_transformers(version: str) -> None:
    """Raises ValueError for a version of transformers with modules that the trainer does not know.

    It might find no experts in 5.17, for example, and train adapters without them.
    """
    if tuple(version.split(".")[:2]) not in _TRANSFORMERS:
        known = " and ".join(map(".".join, _TRANSFORMERS))
        raise ValueError(f"transformers {version} is installed, but Fovea runs on {known}: install one of them")


def check_checkpoint(model: str) -> None:
    """Checks a checkpoint by its small files only.

    Raises:
        ValueError: The checkpoint cannot be trained.
        OSError: A file cannot be read.
    """
    from huggingface_hub import hf_hub_download

    from fovea.runtime.model_files import check_directory, check_supported, read_config

    check_supported(read_config(model, hf_hub_download))
    if Path(model).is_dir():
        check_directory(Path(model))


class _Node:
    """The ranks of this node."""

    def __init__(self, settings: TrainerSettings, name: str, store: str, found: Rendezvous) -> None:
        self._settings = settings
        self._name = name
        self._store = store
        self._rendezvous = found
        self._first = sum(found.ranks[: settings.node_rank])
        self._stop_requested = asyncio.Event()
        self._running: dict[asyncio.Task[int], tuple[int, ForkProcess]] = {}

    def run(self, import_rank: Callable[[], Rank]) -> int:
        """Forks the ranks, with signals blocked. Returns the exit status once all have ended."""
        ranks = [self._fork(local_rank, import_rank) for local_rank in range(self._settings.ranks)]
        if self._rendezvous.store_listener:
            self._rendezvous.store_listener.close()  # rank 0 has a copy
        return asyncio.run(self._wait(ranks))

    async def _wait(self, ranks: list[ForkProcess]) -> int:
        for number in _STOPPING:
            asyncio.get_running_loop().add_signal_handler(number, self._stop_requested.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        for local_rank, process in enumerate(ranks):
            self._running[asyncio.create_task(_exit_status(process))] = (self._first + local_rank, process)
        stop = asyncio.create_task(self._stop_requested.wait())
        while self._running and not stop.done():
            ended = await self._ended({stop})
            if any(ended.values()):
                await self._stop()
                return self._report(ended, "")
        return self._report(await self._stop(), " after it was asked to stop") if stop.done() else 0

    def _fork(self, local_rank: int, import_rank: Callable[[], Rank]) -> ForkProcess:
        process = multiprocessing.get_context("fork").Process(
            target=self._become, args=(local_rank, import_rank, os.getpid()), daemon=True
        )
        process.start()
        return process

    def _become(self, local_rank: int, import_rank: Callable[[], Rank], launcher: int) -> NoReturn:
        """Makes this fork of the launcher a rank."""
        for number in _STOPPING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        os.setsid()  # Ctrl-C reaches only the launcher, which forwards it
        die_with_parent(launcher)
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
        rank, listener = self._first + local_rank, self._rendezvous.store_listener
        fd = listener.detach() if listener and rank == 0 else None
        for inherited in (listener, self._rendezvous.door):
            if inherited:
                inherited.close()  # a detached socket stays open
        world_size = sum(self._rendezvous.ranks)
        rank_env = RankEnvironment(rank, world_size, local_rank, self._settings.node_rank, self._store, fd)
        os.environ |= rank_env.to_environ()
        name_process(f"trainer-rank{rank}")
        import_rank()(self._settings, rank_env)

    async def _ended(self, others: set[asyncio.Task[Any]], timeout_s: float | None = None) -> dict[int, int]:
        """Waits until a rank ends. Returns the exit statuses of the ranks that have ended, keyed by rank.

        The result is empty if one of `others` ends first, or after `timeout_s`.
        """
        done, _ = await asyncio.wait({*self._running, *others}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return {self._running.pop(task)[0]: task.result() for task in list(self._running) if task in done}

    async def _stop(self) -> dict[int, int]:
        """Terminates all ranks, and kills those that do not exit in time.

        Returns their statuses, except for ranks that SIGTERM ended.
        """
        for _, process in self._running.values():
            process.terminate()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.drain_s + EXIT_S + MARGIN_S
        ended: dict[int, int] = {}
        while self._running:
            if loop.time() >= deadline:
                for _, process in self._running.values():
                    process.kill()
            ended |= await self._ended(set(), max(0.1, deadline - loop.time()))
        return {rank: status for rank, status in ended.items() if status != -signal.SIGTERM}

    def _report(self, ended: dict[int, int], when: str) -> int:
        """Prints the rank that failed first. Returns the exit status.

        Ranks that a signal killed come before the others, which probably failed because of that death.
        """
        failures = sorted((status > 0, rank, status) for rank, status in ended.items() if status)
        if not failures:
            return 0
        _, rank, status = failures[0]
        how = f"with status {status}" if status > 0 else f"by {signal.Signals(-status).name}"
        print(f"{self._name}: rank {rank} ended {how}{when}; see its log for the reason", file=sys.stderr)
        return 1


def _defaults(settings: TrainerSettings, address: str) -> dict[str, str]:
    """Returns default environment variables for the ranks. Variables that the user has set override them."""
    pinning_threads = 1 << min(5, len(os.sched_getaffinity(0)).bit_length() - 1)  # torch accepts powers of two
    allocator = {
        # Micro-batches differ in size. Without this, unused blocks of other sizes accumulate: 4 GiB at the limit.
        "expandable_segments": True,
        # The first durable point of a whole model pins 64 GiB of host memory, while all commands wait. The driver's own
        # method took 100 s for that in a trainer, and 38 s in a process of its own. This method takes 8 s.
        "pinned_use_cuda_host_register": True,
        "pinned_num_register_threads": pinning_threads,
    }
    found = {
        "PYTORCH_CUDA_ALLOC_CONF": ",".join(f"{name}:{value}" for name, value in allocator.items()),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    # By default gloo and NCCL listen on the network of this machine's host name.
    if interface := interface_of(address):
        found["GLOO_SOCKET_IFNAME"] = interface
        # NCCL has one setting for all groups. It also applies to pushes, and samplers may be on another network.
        if settings.nodes > 1 or is_loopback(settings.transfer_address or settings.host):
            found["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return found


def _fixed(settings: TrainerSettings) -> dict[str, str]:
    return {"LOCAL_WORLD_SIZE": str(settings.ranks), "OMP_NUM_THREADS": str(settings.threads)}


async def _exit_status(rank: ForkProcess) -> int:
    """Waits for the end of a rank. Returns its exit status; a signal is a negative one."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(rank.sentinel, ended.set)
    await ended.wait()
    loop.remove_reader(rank.sentinel)
    rank.join()
    assert rank.exitcode is not None
    return rank.exitcode


def _exit(*_: Any) -> NoReturn:
    os._exit(0)  # not an exception, which imports may catch
