"""One rank of the trainer: joins the others, loads its share of the model, executes commands until told to leave."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fovea.runtime.gpu_memory import show_gpu_memory
from fovea.runtime.secret import service_secret
from fovea.wire.errors import FoveaError
from services.trainer import trainer_metrics
from services.trainer.command_queue import CommandQueue, Job, settle
from services.trainer.commands import Command, DeleteModel, Shutdown
from services.trainer.profiling import CommandProfiler
from services.trainer.ranks.control_group import ControlGroup
from services.trainer.ranks.peers import MEET_S, Peer, PeerWatch
from services.trainer.ranks.place import Place
from services.trainer.settings import TrainerSettings
from services.trainer.snapshots.transfer_groups import TransferGroups
from services.trainer.training_engine import Engine

logger = logging.getLogger(__name__)


class Rank:
    """This process's part of the trainer. Everything that communicates happens in the thread that calls `start`.

    Args:
        settings: As given at start.
        place: Which rank this is.
        on_peer_lost: Called with a rank that died, from another thread.
        on_peer_stop: On rank 0, called from another thread with a rank whose node was told to stop.
        groups: Transfer groups; on rank 0 only.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        place: Place,
        on_peer_lost: Callable[[Peer], None],
        on_peer_stop: Callable[[Peer], None],
        groups: TransferGroups | None,
    ) -> None:
        self._settings = settings
        self._place = place
        self._on_peer_lost = on_peer_lost
        self._on_peer_stop = on_peer_stop
        self._groups = groups
        self._profiler = CommandProfiler(settings.profile, settings.profile_first)
        self._peers: PeerWatch | None = None
        self.engine: Engine

    def start(self) -> None:
        """Meets the other ranks, loads the model and warms up."""
        settings = self._settings
        torch.set_num_threads(settings.threads)
        place = self._place
        device = _device(settings, place)
        store = place.open_store(timedelta(seconds=MEET_S))
        store.set_timeout(timedelta(seconds=MEET_S))  # which a store of files is not told when it is made
        self._peers = PeerWatch(store, place, service_secret().encode(), self._on_peer_lost, self._on_peer_stop)
        timeout = timedelta(seconds=settings.collective_timeout_s)
        store.set_timeout(timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        self._control = ControlGroup()
        model_dir = self._control.agree(lambda: resolve_model(settings.model))
        if place.is_first_of_node and device.type == "cuda":
            show_gpu_memory()
        if place.rank == 0:
            trainer_metrics.RANKS.set(place.world_size)
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
            _show_peak()

    def tell_stop(self) -> bool:
        """Tells rank 0 that this node was told to stop; False if they have not met yet. From any thread."""
        if self._peers is None:
            return False
        self._peers.tell_stop()
        return True

    def _run(self, job: Job) -> None:
        name = type(job.command).__name__
        started = time.perf_counter()
        try:
            with job.traced(), self._profiler.around(job.command):
                result = self.engine.execute(job.command)
        except FoveaError as error:
            trainer_metrics.COMMANDS.labels(name, error.reason).inc()
            settle(job.result, error=error)
        except Exception:
            trainer_metrics.COMMANDS.labels(name, "TRAINER_LOST").inc()
            raise  # the queue breaks down, and this command with it, once it is known who failed
        else:
            trainer_metrics.COMMANDS.labels(name, "OK").inc()
            trainer_metrics.COMMAND_SECONDS.labels(name).observe(time.perf_counter() - started)
            trainer_metrics.MODELS.set(len(self.engine.models))
            if isinstance(job.command, DeleteModel):
                trainer_metrics.forget_model(job.command.model_id)
            _show_peak()
            settle(job.result, result)

    def _leave(self) -> None:
        if self._peers:
            self._peers.close()
        self._control.barrier()
        dist.destroy_process_group()


def resolve_model(model: str) -> Path:
    """The checkpoint folder of a path or hub name."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model))


def _show_peak() -> None:
    if torch.cuda.is_available():
        trainer_metrics.GPU_PEAK.set(torch.cuda.max_memory_allocated())


def _device(settings: TrainerSettings, place: Place) -> torch.device:
    wants_gpu = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    if not wants_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device
