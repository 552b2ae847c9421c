"""The two kinds of rank process: rank 0, which also runs the gRPC server, and all other ranks."""

import asyncio
import logging
import signal
import socket
import threading
import time
from concurrent.futures import Future
from typing import NoReturn

from transformers.utils import logging as transformers_logging

from fovea.api.v1 import trainer_pb2_grpc
from fovea.runtime.hosts import WILDCARDS
from fovea.runtime.processes import configure_logging, leave
from fovea.runtime.server import ServiceServer
from fovea.wire.conventions import TRAINER_SERVICE
from fovea.wire.errors import Unavailable
from fovea_trainer import trainer_metrics
from fovea_trainer.command_queue import CommandQueue
from fovea_trainer.rank_worker import RankWorker
from fovea_trainer.ranks.peer_monitor import Peer
from fovea_trainer.ranks.rank_launcher import EXIT_S, RankEnvironment
from fovea_trainer.recovery.recovery_keeper import RecoveryKeeper
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.trainer_servicer import TrainerServicer
from fovea_trainer.weights.pusher import Pusher
from fovea_trainer.weights.transfer_groups import TransferGroups

logger = logging.getLogger(__name__)

LINGER_S = 1.0
"""Seconds for which a broken trainer reports the reason to callers before it ends."""

BLAME_S = 2.0
"""Seconds that a failed rank waits for the report of another rank's death, which makes all other ranks fail earlier."""


def rank_process(settings: TrainerSettings, rank_env: RankEnvironment) -> NoReturn:
    """Runs a rank until it ends, or until rank 0 shuts it down or dies. Each rank has a thread beside the main one."""
    configure_logging("trainer" if rank_env.rank == 0 else f"trainer{rank_env.rank}", settings.log_level)
    logging.getLogger("torch").setLevel("WARNING")
    transformers_logging.disable_progress_bar()
    if rank_env.rank == 0:
        leave(asyncio.run(_Leader(settings, rank_env).run()))
    asyncio.run(_Follower(settings, rank_env).run())
    raise AssertionError("the rank's thread ends the process")


class _Follower:
    """A rank other than 0. The first rank of a node also answers health checks and serves metrics for its pod."""

    def __init__(self, settings: TrainerSettings, rank_env: RankEnvironment) -> None:
        self._settings = settings
        self._rank_env = rank_env
        self._stop_requested = False
        self._rank = RankWorker(settings, rank_env, self._peer_lost, lambda peer: None, None)
        self._server: ServiceServer | None = None

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._rank_env.is_first_of_node:
            # This server has no method that could begin or continue a trace.
            self._server = ServiceServer(self._settings.model_copy(update={"trace_endpoint": ""}), [])
            await self._server.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._asked_to_stop)
        threading.Thread(target=self._rank_thread, name="rank", daemon=True).start()
        await asyncio.Event().wait()

    def _rank_thread(self) -> None:
        try:
            self._rank.start()
            if self._server:
                asyncio.run_coroutine_threadsafe(self._server.set_serving(True), self._loop)
            self._rank.follow()
        except Exception:
            time.sleep(BLAME_S)  # meanwhile `_peer_lost` may report a better reason and end this process
            logger.exception("this rank failed; the trainer ends")
            leave(1)
        if self._stop_requested or self._rank_env.node == 0:
            leave(0)
        logger.warning("the trainer was asked to stop on another node; this node ends with it")
        leave(1)

    def _asked_to_stop(self) -> None:
        """Reports the request to rank 0, which may be on another node.

        Rank 0 then finishes running commands and stops all ranks.
        """
        self._stop_requested = True
        if not self._rank_env.is_first_of_node:
            return
        try:
            if not self._rank.report_stop():
                leave(0)
        except OSError as error:
            logger.debug("rank 0 has already exited: %s", error)

    def _peer_lost(self, peer: Peer) -> None:
        if self._stop_requested and peer == Peer(0, self._rank_env.node):
            leave(0)  # rank 0 was asked to stop too, and exited before the model was loaded
        logger.error("rank %d on node %d died; this rank exits", *peer)
        leave(1)


class _Leader:
    def __init__(self, settings: TrainerSettings, rank_env: RankEnvironment) -> None:
        self._settings = settings
        self._status = 0
        self._queue = CommandQueue(settings.heartbeat_s)
        self._groups = _transfer_groups(settings)
        self._stop_requested = False
        self._rank = RankWorker(settings, rank_env, self._peer_lost, self._peer_stops, self._groups, self._base_lost)
        self._loaded: Future[None] = Future()
        self._exited = threading.Event()

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._server = ServiceServer(self._settings, [TRAINER_SERVICE])
        pusher = Pusher(self._settings, self._queue, self._groups, lambda: self._rank.engine.adapters)
        keeper = None
        if self._settings.recovery:
            keeper = RecoveryKeeper(self._settings, self._queue, lambda: self._rank.engine.recovery)
        servicer = TrainerServicer(self._settings, self._queue, self._rank, pusher, keeper)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, self._server.grpc)
        await self._server.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._asked_to_stop)
        threading.Thread(target=self._rank_thread, name="rank-0", daemon=True).start()
        serving = asyncio.create_task(self._serve_when_loaded(keeper))
        await self._server.run_until_stopped()
        serving.cancel()
        await pusher.close()
        await self._exit()
        return self._status or int(not self._stop_requested)

    async def _serve_when_loaded(self, keeper: RecoveryKeeper | None) -> None:
        await asyncio.wrap_future(self._loaded)
        self._queue.open()
        await self._server.set_serving(True)
        if keeper is not None:
            await keeper.run()

    async def _exit(self) -> None:
        if not self._loaded.done() or self._status:
            return
        self._queue.shut_down()
        exited = await asyncio.to_thread(self._exited.wait, EXIT_S)
        if not exited:
            logger.warning("a command is still running; exiting without it")

    def _rank_thread(self) -> None:
        try:
            self._rank.start()
            self._loaded.set_result(None)
            self._rank.lead(self._queue)
        except Exception:
            time.sleep(BLAME_S)
            if not self._status:  # otherwise `_peer_lost` has already reported the reason
                logger.exception("rank 0 failed; the trainer ends")
                self._fail("rank 0 of the trainer failed; it restarts")
        self._exited.set()

    def _peer_lost(self, peer: Peer) -> None:
        logger.error("rank %d on node %d died; the trainer ends", *peer)
        self._fail(f"rank {peer.rank} of the trainer died; it restarts")

    def _base_lost(self) -> None:
        if not self._stop_requested:
            logger.error("the sampler of the shared base has ended; the trainer ends")
            self._fail("the sampler of the shared base has ended; the trainer restarts")

    def _peer_stops(self, peer: Peer) -> None:
        if self._status:  # after a rank's death the launcher also stops the others
            return
        logger.warning("node %d was asked to stop; the trainer finishes running commands and then ends", peer.node)
        self._loop.call_soon_threadsafe(self._server.request_stop)

    def _fail(self, message: str) -> None:
        self._status = 1
        trainer_metrics.RANKS.set(0)
        self._queue.fail_all(Unavailable(message))
        asyncio.run_coroutine_threadsafe(self._server.set_serving(False), self._loop)
        self._loop.call_soon_threadsafe(self._loop.call_later, LINGER_S, self._server.request_stop)

    def _asked_to_stop(self) -> None:
        self._stop_requested = True
        # The launcher also sends this signal after a rank's death. In that case `_fail` has already scheduled the stop.
        if not self._status:
            self._server.request_stop()


def _transfer_groups(settings: TrainerSettings) -> TransferGroups:
    if settings.transfer_address:  # it may be on another network than gRPC
        return TransferGroups.hosting(settings.transfer_address, settings.transfer_address)
    return TransferGroups.hosting(socket.gethostname() if settings.host in WILDCARDS else settings.host, settings.host)
