"""The two kinds of rank process: rank 0 with the gRPC server beside its rank thread, and the others."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from typing import NoReturn

from transformers.utils import logging as transformers_logging

from fovea.api.v1 import trainer_pb2_grpc
from fovea.runtime import tracing
from fovea.runtime.server import ServiceServer
from fovea.wire.errors import Unavailable
from services.trainer import telemetry
from services.trainer.command_queue import CommandQueue
from services.trainer.push import Pusher
from services.trainer.rank import Rank
from services.trainer.servicer import SERVICE, TrainerServicer
from services.trainer.settings import TrainerSettings
from services.trainer.transfer import TransferGroups

logger = logging.getLogger(__name__)

LINGER_S = 1.0
"""How long a broken trainer tells callers what has happened before it ends."""

LEAVE_S = 8.0
"""How long the ranks get to leave together after the last call has ended; torchrun kills after 30 s."""


def follower_process(settings: TrainerSettings) -> NoReturn:
    """Runs a rank other than 0 until rank 0 says so, or is gone."""
    # The signal comes to rank 0 too, which finishes what runs and then tells everybody.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformers_logging.disable_progress_bar()

    def lost(rank: int) -> None:
        logger.error("rank %d is gone: leaving", rank)
        os._exit(1)

    rank = Rank(settings, lost, None)
    try:
        rank.start()
        rank.follow()
    except Exception:
        logger.exception("this rank failed: the trainer ends")
        _exit(1)
    _exit(0)


def leader_process(settings: TrainerSettings) -> NoReturn:
    """Runs rank 0: the gRPC server on the main thread, the rank on its own."""
    transformers_logging.disable_progress_bar()
    _exit(asyncio.run(_Leader(settings).run()))


def _exit(status: int) -> NoReturn:
    """Leaves without waiting for threads: one may be stuck in a collective with a rank that is gone."""
    tracing.shutdown()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Leader:
    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._status = 0
        self._queue = CommandQueue(settings.heartbeat_s)
        self._groups = TransferGroups(_transfer_address(settings))
        self._rank = Rank(settings, self._peer_lost, self._groups)
        self._loaded: Future[None] = Future()
        self._left = threading.Event()

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._server = ServiceServer(self._settings, [SERVICE])
        pusher = Pusher(self._settings, self._queue, self._groups, lambda: self._rank.engine.adapters)
        servicer = TrainerServicer(self._settings, self._queue, self._rank, pusher)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, self._server.grpc)
        await self._server.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._asked_to_stop)
        threading.Thread(target=self._rank_thread, name="rank-0", daemon=True).start()
        serving = asyncio.create_task(self._serve_when_loaded())
        await self._server.run_until_stopped()
        serving.cancel()
        await pusher.close()
        return await self._leave()

    async def _serve_when_loaded(self) -> None:
        await asyncio.wrap_future(self._loaded)
        self._queue.open()
        await self._server.set_serving(True)

    async def _leave(self) -> int:
        if not self._loaded.done() or self._status:
            return self._status
        self._queue.shut_down()
        left = await asyncio.to_thread(self._left.wait, LEAVE_S)
        if not left:
            logger.warning("a command still runs: leaving without it")
        return self._status

    def _rank_thread(self) -> None:
        try:
            self._rank.start()
            self._loaded.set_result(None)
            self._rank.lead(self._queue)
        except Exception:
            logger.exception("rank 0 failed: the trainer ends")
            self._break_down("rank 0 of the trainer failed; it restarts without its models")
        self._left.set()

    def _peer_lost(self, rank: int) -> None:
        logger.error("rank %d is gone: the trainer ends", rank)
        self._break_down(f"rank {rank} of the trainer died; it restarts without its models")

    def _break_down(self, message: str) -> None:
        self._status = 1
        telemetry.RANKS.set(0)
        self._queue.break_down(Unavailable(message))
        asyncio.run_coroutine_threadsafe(self._server.set_serving(False), self._loop)
        self._loop.call_soon_threadsafe(self._loop.call_later, LINGER_S, self._server.request_stop)

    def _asked_to_stop(self) -> None:
        # torchrun sends the signal too when a rank has died: callers are being told, and the stop is near.
        if not self._status:
            self._server.request_stop()


def _transfer_address(settings: TrainerSettings) -> str:
    if settings.transfer_address:
        return settings.transfer_address
    return socket.gethostname() if settings.host in ("0.0.0.0", "::") else settings.host
