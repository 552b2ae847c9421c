"""One rank of the trainer: joins the others, loads its share of the model, and executes commands until shutdown."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fovea.runtime.credentials import service_secret
from fovea.runtime.machine_memory import show_gpu_memory
from fovea.wire.errors import FoveaError
from fovea_trainer import trainer_metrics
from fovea_trainer.command_queue import (
    Command,
    CommandQueue,
    DeleteModel,
    ForwardBackward,
    Job,
    OptimStep,
    SharedPass,
    SharedSteps,
    Shutdown,
    resolve,
)
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.ranks.peer_monitor import JOIN_S, Peer, PeerMonitor
from fovea_trainer.ranks.rank_launcher import RankEnvironment
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.training_engine import TrainingEngine
from fovea_trainer.weights.transfer_groups import TransferGroups

logger = logging.getLogger(__name__)

PROFILED_COMMANDS = 4
"""Number of training commands that are profiled, including everything between them."""
_ROWS = 40
_GAPS = 20


@dataclass(frozen=True)
class HostTime:
    """The times at which a command was queued, started and finished, in microseconds of one clock."""

    name: str
    queued: float
    started: float
    done: float


class CommandProfiler:
    """Writes `profile.txt` and `trace.json.gz` into a directory, once.

    Args:
        directory: Created if missing; None disables profiling.
        first: Index of the first forward_backward or optim_step to profile, from 1.
    """

    def __init__(self, directory: Path | None, first: int) -> None:
        self._directory = directory
        self._first = first
        self._count = 0
        self._host: list[HostTime] = []
        on_gpu = torch.cuda.is_available()
        self._profile: Any = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])

    @contextmanager
    def around(self, job: Job) -> Iterator[None]:
        """Profiles a command, if it is one of the profiled ones.

        Enter it around each command in the thread that runs it.
        """
        is_counted = isinstance(job.command, ForwardBackward | OptimStep)
        self._count += is_counted
        if self._directory is None or not self._first <= self._count < self._first + PROFILED_COMMANDS:
            yield
            return
        if is_counted and self._count == self._first:
            self._profile.start()
        started_at = time.time()
        try:
            yield
        finally:
            times = (at * 1e6 for at in (job.queued_at, started_at, time.time()))
            self._host.append(HostTime(type(job.command).__name__, *times))
            if is_counted and self._count == self._first + PROFILED_COMMANDS - 1:
                self._profile.stop()
                self._write(self._directory)

    def _write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = self._profile.key_averages().table(sort_by=key, row_limit=_ROWS, max_name_column_width=100)
        began_at = self._profile.profiler.kineto_results.trace_start_ns() / 1e3  # in the clock of `time.time`
        kernels = [
            (began_at + start, began_at + end, name) for start, end, name in kernel_times(self._profile.events())
        ]
        busy = "\n".join(busy_lines(kernels) + host_lines(kernels, self._host))
        (directory / "profile.txt").write_text(f"{busy}\n\n{table}\n")
        self._profile.export_chrome_trace(str(directory / "trace.json.gz"))
        logger.info("wrote a profile of the device during %d commands to %s", PROFILED_COMMANDS, directory)


def host_lines(kernels: list[tuple[float, float, str]], host: list[HostTime]) -> list[str]:
    """Returns one line per command with its times, in the clock of `busy_lines`.

    The times are: queued after the checks, started by the rank, first kernel on the device, and finished on the host.
    Before the first kernel the host fetches tensors and packs datums.
    """
    if not kernels:
        return []
    first, lines = kernels[0][0], []
    for one in host:
        answered = next((start for start, _, _ in kernels if start >= one.started), one.done)
        at = [(moment - first) / 1e3 for moment in (one.queued, one.started, answered, one.done)]
        words = "queued at {:.1f} ms, started at {:.1f}, first on the device at {:.1f}, done at {:.1f}".format(*at)
        lines.append(f"{one.name} {words}")
    return lines


def kernel_times(events: Any) -> list[tuple[float, float, str]]:
    """Returns start and end, in microseconds, and name of each event on a GPU, in order of start."""
    found = (event for event in events if event.device_type.name == "CUDA")
    return sorted((event.time_range.start, event.time_range.end, event.name) for event in found)


def busy_lines(kernels: list[tuple[float, float, str]]) -> list[str]:
    """Returns lines with the share of time in which kernels ran and with the longest gaps. Sort kernels by start."""
    if not kernels:
        return ["nothing ran on a GPU"]
    started, until, before = kernels[0]
    busy, gaps = until - started, []
    for start, end, name in kernels[1:]:
        if start > until:
            gaps.append((start - until, until - started, before, name))
        busy += max(0.0, end - max(start, until))
        if end > until:
            until, before = end, name
    lines = [
        f"busy {busy / 1e3:.1f} of {(until - started) / 1e3:.1f} ms, {busy / (until - started):.1%}; longest gaps:"
    ]
    for gap, at, last, following in sorted(gaps, reverse=True)[:_GAPS]:
        lines.append(f"{gap / 1e3:8.2f} ms at {at / 1e3:9.1f} ms, between {last[:60]} and {following[:60]}")
    return lines


class RankWorker:
    """This process's part of the trainer. Only the thread that calls `start` communicates with other ranks.

    Args:
        settings: Settings of the trainer.
        rank_env: This rank.
        on_peer_lost: Called from another thread with a rank that died.
        on_peer_stop: Called on rank 0, from another thread, with a rank on a node that was asked to stop.
        groups: Transfer groups, on rank 0 only. Other senders create theirs in `start`.
        on_base_lost: Called from another thread if this rank uses the base of a sampler, and that sampler ends.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        rank_env: RankEnvironment,
        on_peer_lost: Callable[[Peer], None],
        on_peer_stop: Callable[[Peer], None],
        groups: TransferGroups | None,
        on_base_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._on_base_lost = on_base_lost
        self._rank_env = rank_env
        self._on_peer_lost = on_peer_lost
        self._on_peer_stop = on_peer_stop
        self._groups = groups
        self._profiler = CommandProfiler(settings.profile, settings.profile_first)
        self._peers: PeerMonitor | None = None
        self.engine: TrainingEngine

    def start(self) -> None:
        """Joins the other ranks, loads the model and warms up."""
        settings = self._settings
        torch.set_num_threads(settings.threads)
        rank_env = self._rank_env
        device = _device(settings, rank_env)
        store = rank_env.open_store(timedelta(seconds=JOIN_S))
        store.set_timeout(timedelta(seconds=JOIN_S))  # FileStore has no timeout argument
        self._peers = PeerMonitor(store, rank_env, service_secret().encode(), self._on_peer_lost, self._on_peer_stop)
        timeout = timedelta(seconds=settings.collective_timeout_s)
        store.set_timeout(timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank_env.rank,
            world_size=rank_env.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        self._control = ControlGroup()
        model_dir = self._control.agree(lambda: resolve_model(settings.model))
        store_at = self._control.broadcast((self._groups.address, self._groups.port) if self._groups else None)
        if (sender := settings.sender_of(rank_env.rank)) and store_at is not None:
            self._groups = TransferGroups.beside(*store_at, sender)
        if rank_env.is_first_of_node and device.type == "cuda":
            show_gpu_memory()
        if rank_env.rank == 0:
            trainer_metrics.RANKS.set(rank_env.world_size)
        started = time.perf_counter()
        self.engine = TrainingEngine(settings, model_dir, self._control, device, self._groups)
        if self.engine.base is not None:
            self.engine.base.watch(self._on_base_lost)
        self.engine.warm_up()
        if self.engine.base is not None:
            self.engine.base.report_use()
        logger.info("rank %d ready after %.1f s", self._control.rank, time.perf_counter() - started)

    def lead(self, queue: CommandQueue) -> None:
        """Distributes and executes commands on rank 0, until `Shutdown`."""
        while True:
            jobs = queue.next(self.engine.fit_together)
            command = _together([job.command for job in jobs])
            self._control.broadcast(command)
            if isinstance(command, Shutdown):
                return self._exit()
            self.engine.expect(queue.ahead())
            self._run(jobs, command)

    def follow(self) -> None:
        """Executes the commands of rank 0 on any other rank, until `Shutdown`."""
        while True:
            command: Command = self._control.broadcast(None)
            if isinstance(command, Shutdown):
                return self._exit()
            try:
                self.engine.execute(command)
            except FoveaError as error:
                logger.debug("%s refused: %s", type(command).__name__, error)
            _show_peak()

    def report_stop(self) -> bool:
        """Reports to rank 0 that this node was asked to stop.

        Returns False if the ranks have not met. Callable from any thread.
        """
        if self._peers is None:
            return False
        self._peers.report_stop()
        return True

    def _run(self, jobs: list[Job], command: Command) -> None:
        started = time.perf_counter()
        try:
            with jobs[0].traced(), self._profiler.around(jobs[0]):
                found = self.engine.execute(command)
                results = found if isinstance(command, SharedPass | SharedSteps) else [found]
        except FoveaError as error:
            results = [error] * len(jobs)
        except Exception:
            trainer_metrics.COMMANDS.labels(type(command).__name__, "TRAINER_LOST").inc()
            raise  # `fail_all` sets the result later, once the failed rank is known
        seconds = (time.perf_counter() - started) / len(jobs)
        for job, result in zip(jobs, results, strict=True):
            self._report(job, result, seconds)
        _show_peak()

    def _report(self, job: Job, result: Any, seconds: float) -> None:
        name = type(job.command).__name__
        job.seconds.append(seconds)
        if isinstance(result, FoveaError):
            trainer_metrics.COMMANDS.labels(name, result.reason).inc()
            return resolve(job.result, error=result)
        trainer_metrics.COMMANDS.labels(name, "OK").inc()
        trainer_metrics.COMMAND_SECONDS.labels(name).observe(seconds)
        trainer_metrics.MODELS.set(len(self.engine.models))
        if isinstance(job.command, DeleteModel):
            trainer_metrics.forget_model(job.command.model_id)
        resolve(job.result, result)

    def _exit(self) -> None:
        if self._peers:
            self._peers.close()
        self.engine.close()
        try:
            self._control.barrier()
        except RuntimeError as error:  # gloo: the disk was too slow. Lost commands run again
            logger.warning("another rank exited while durable points were being written: %s", error)
            return
        dist.destroy_process_group()


def _together(commands: list[Command]) -> Command:
    """Returns one command that does the work of commands which the queue returned together."""
    if len(commands) == 1:
        return commands[0]
    if isinstance(commands[0], OptimStep):
        return SharedSteps([command for command in commands if isinstance(command, OptimStep)])
    return SharedPass([command for command in commands if isinstance(command, ForwardBackward)])


def resolve_model(model: str) -> Path:
    """Returns the folder of a checkpoint, given its path or hub name. Downloads it if necessary."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model))


def _show_peak() -> None:
    if torch.cuda.is_available():
        trainer_metrics.GPU_PEAK.set(torch.cuda.max_memory_allocated())


def _device(settings: TrainerSettings, rank_env: RankEnvironment) -> torch.device:
    wants_gpu = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    if not wants_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", rank_env.local_rank)
    torch.cuda.set_device(device)
    return device
