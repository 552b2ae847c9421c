"""One rank of the trainer: joins the others, loads its share of the model, executes commands until told to leave."""

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fovea.runtime.gpu_memory import show_gpu_memory
from fovea.wire.errors import FoveaError, Unavailable
from services.trainer import telemetry
from services.trainer.command_queue import CommandQueue, Job, settle
from services.trainer.commands import Command, DeleteModel, Shutdown
from services.trainer.control import ControlGroup
from services.trainer.engine import Engine
from services.trainer.peers import PeerWatch
from services.trainer.profiling import CommandProfiler
from services.trainer.settings import TrainerSettings
from services.trainer.transfer import TransferGroups

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class Rank:
    """This process's part of the trainer. Everything that communicates happens in the thread that calls `start`.

    Args:
        settings: As given at start.
        on_peer_lost: Called with the number of a rank that died, from another thread.
        groups: Transfer groups; on rank 0 only.
    """

    def __init__(
        self, settings: TrainerSettings, on_peer_lost: Callable[[int], None], groups: TransferGroups | None
    ) -> None:
        self._settings = settings
        self._on_peer_lost = on_peer_lost
        self._groups = groups
        self._profiler = CommandProfiler(settings.profile, settings.profile_first)
        self.engine: Engine

    def start(self) -> None:
        """Meets the other ranks, loads the model and warms up."""
        settings = self._settings
        torch.set_num_threads(settings.threads)
        device = _device(settings)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=settings.collective_timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        self._control = ControlGroup()
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._peers = PeerWatch(self._control, host, self._on_peer_lost)
        model_dir = self._control.agree(lambda: resolve_model(settings.model))
        if self._control.rank == 0 and device.type == "cuda":
            show_gpu_memory()
        telemetry.RANKS.set(self._control.world_size)
        started = time.perf_counter()
        self.engine = Engine(settings, model_dir, self._control, device, self._groups)
        self.engine.warm_up()
        logger.info("rank %d ready after %.1f s", self._control.rank, time.perf_counter() - started)

    def lead(self, queue: CommandQueue) -> None:
        """Rank 0: hands out commands and executes them, until `Shutdown`."""
        while True:
            job = queue.next()
            self._control.broadcast(job.command)
            if isinstance(job.command, Shutdown):
                return self._leave()
            self._run(job)

    def follow(self) -> None:
        """Any other rank: executes what rank 0 hands out, until `Shutdown`."""
        while True:
            command: Command = self._control.broadcast(None)
            if isinstance(command, Shutdown):
                return self._leave()
            try:
                self.engine.execute(command)
            except FoveaError as error:
                logger.debug("%s refused: %s", type(command).__name__, error)

    def _run(self, job: Job) -> None:
        name = type(job.command).__name__
        started = time.perf_counter()
        try:
            with job.traced(), self._profiler.around(job.command):
                result = self.engine.execute(job.command)
        except FoveaError as error:
            telemetry.COMMANDS.labels(name, error.reason).inc()
            settle(job.result, error=error)
        except Exception:
            telemetry.COMMANDS.labels(name, "TRAINER_LOST").inc()
            settle(job.result, error=Unavailable("the trainer failed in the middle of a command and restarts"))
            raise
        else:
            telemetry.COMMANDS.labels(name, "OK").inc()
            telemetry.COMMAND_SECONDS.labels(name).observe(time.perf_counter() - started)
            telemetry.MODELS.set(len(self.engine.models))
            if isinstance(job.command, DeleteModel):
                telemetry.forget_model(job.command.model_id)
            if torch.cuda.is_available():
                telemetry.GPU_PEAK.set(torch.cuda.max_memory_allocated())
            settle(job.result, result)

    def _leave(self) -> None:
        self._peers.close()
        self._control.barrier()
        dist.destroy_process_group()


def resolve_model(model: str) -> Path:
    """The checkpoint folder of a path or hub name."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model))


def die_with_parent() -> None:
    """Has the kernel kill this process when torchrun's agent dies, whatever kills the agent."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _device(settings: TrainerSettings) -> torch.device:
    wants_gpu = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    if not wants_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
