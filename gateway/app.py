"""The composition root: builds the gateway out of its parts, starts them in order, stops them in reverse."""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn

from fovea.api.v1 import gateway_pb2_grpc
from fovea.runtime.server import ServiceServer, open_files
from fovea.wire.errors import FoveaError, SessionEnded
from fovea.wire.names import GATEWAY_SERVICE
from gateway.access.keyring import KeyRing
from gateway.access.quotas import Shares
from gateway.api import build_api
from gateway.checkpoints.checkpoint_registry import Checkpoints
from gateway.checkpoints.checkpoint_storage import Storage
from gateway.checkpoints.copies import Copies
from gateway.checkpoints.exports import Exports
from gateway.database.database import Database
from gateway.discovery.choice import choose
from gateway.futures.future import Kind, Outcome, Pending
from gateway.futures.futures import FutureBoard
from gateway.garbage_collector import Leftovers
from gateway.grpc_front.auth_interceptor import Door
from gateway.grpc_front.call_limits import channel_limits
from gateway.grpc_front.field_names import named
from gateway.grpc_front.gateway_servicer import GatewayServicer
from gateway.grpc_front.uploaded_images import ImageShelf
from gateway.http.connections import Connection, Connections
from gateway.replicas.capabilities import Capabilities
from gateway.replicas.renderers import Renderers
from gateway.replicas.samplers import Samplers
from gateway.replicas.snapshot_pushes import Snapshots
from gateway.replicas.snapshot_versions import Versions
from gateway.replicas.trainer_link import TrainerLink
from gateway.sampling.sample_runner import SampleRunner
from gateway.sampling.sampling_sessions import Sampling
from gateway.sessions.session_rows import Session
from gateway.sessions.sessions import Sessions
from gateway.settings import GatewaySettings
from gateway.status_gauges import Vitals
from gateway.training.batches import Batches
from gateway.training.command_context import Context
from gateway.training.command_runner import CommandRunner
from gateway.training.custom_losses import CustomLosses
from gateway.training.models import Models
from gateway.training.training import Training

logger = logging.getLogger(__name__)

_SWEEP_S = 30.0
_TIDY_S = 60.0
_FOLDER_ROUNDS = 10
"""Folders are looked at every ten minutes: listing a bucket takes calls for each model."""


class Gateway:
    """One gateway. `run` is all of its life; `start` and `stop` are parts of it."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        kind, namespace = settings.discovery, settings.kubernetes_namespace
        renderers = choose(kind, "renderer", settings.renderer, namespace)
        samplers = choose(kind, "sampler", settings.sampler, namespace)
        self.database = Database(settings.store_url, on_superseded=_die)
        self.trainer = TrainerLink(settings.trainer, settings.trainer_wait_s)
        self.renderers = Renderers(renderers, settings.renderer_concurrency, settings.retry_deadline_s)
        self.snapshots = Snapshots(self.database, self.trainer, settings.push_timeout_s)
        self.samplers = Samplers(samplers, settings.sampler_concurrency, self.snapshots)
        shares = Shares("max_pending", settings.max_pending, "unfinished requests")
        self.board = FutureBoard(self.database, settings.result_ttl_s, shares)
        self.sessions = Sessions(
            self.database, settings.session_ttl_s, Shares("max_sessions", settings.max_sessions, "open sessions")
        )
        self.models = Models(self.database, settings.max_models_per_owner)
        self.storage = Storage(settings.checkpoint_root)
        self.checkpoints = Checkpoints(self.database, self.storage)
        self.copies = Copies(self.database, self.sessions, self.checkpoints)
        self.exports = Exports(self.database, self.checkpoints)
        self.leftovers = Leftovers(self.database, self.trainer, self.samplers, self.snapshots, self.checkpoints)
        versions = Versions()
        sample_runner = SampleRunner(
            self.renderers, self.samplers, self.snapshots, versions, settings.retry_deadline_s,
            settings.sample_timeout_s,
        )  # fmt: skip
        self.vitals = Vitals(self.board, self.renderers, self.samplers, self.trainer, versions, settings.state_dir)
        self.sampling = Sampling(
            self.database, self.board, self.sessions, self.checkpoints, self.samplers, self.snapshots, sample_runner,
            settings.model_name, shares,
        )  # fmt: skip
        self.custom_losses = CustomLosses(self.database, self.board, self.sessions)
        batches = Batches(self.board, self.renderers, self.custom_losses)
        context = Context(
            self.models,
            self.checkpoints,
            batches,
            self.trainer,
            self.sampling,
            self._freed,
            settings.command_timeout_s,
            settings.retry_deadline_s,
        )
        runner = CommandRunner(self.board, context)
        self.training = Training(
            self.board, self.sessions, self.models, batches, runner, self.trainer, settings.gap_timeout_s
        )
        self.keys = KeyRing(self.database, settings.given_keys, settings.host)
        self.capabilities = Capabilities(settings.model_name, self.renderers, self.samplers, self.trainer)
        self.board.start = self._start_future
        self.board.on_failure_told = self.training.note_failure_told
        self.sessions.on_end = self._end_session
        self._background: set[asyncio.Task[Any]] = set()
        self._freeing: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()
        self.rest_port = 0
        self.grpc = ServiceServer(
            settings.model_copy(update={"port": settings.grpc_port}), [GATEWAY_SERVICE], begins_traces=True,
            as_told=named, options=channel_limits(settings),
        )  # fmt: skip
        self._door = Door(GATEWAY_SERVICE, self.keys)
        self._memory = Shares(
            "max_request_memory_bytes", settings.max_request_memory_bytes, "bytes of requests in progress"
        )
        self.grpc.grpc.add_generic_rpc_handlers((self._door,))
        servicer = GatewayServicer(
            self.keys, self.sessions, self.models, self.training, self.sampling, self.board, self.capabilities,
            self.custom_losses, ImageShelf(), settings, self._memory,
        )  # fmt: skip
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, self.grpc.grpc)
        self._rest = _RestServer(self._rest_config())
        self._rest_task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Starts, serves until SIGTERM or SIGINT, and stops. Raises what `start` raises."""
        await self._listen()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        beginning = asyncio.create_task(self._begin(), name="begin")
        ending = asyncio.create_task(self._stopping.wait(), name="end")
        try:
            await asyncio.wait((beginning, ending), return_when=asyncio.FIRST_COMPLETED)
            if beginning.done():
                await beginning
                await ending
        finally:
            for task in (beginning, ending):
                task.cancel()
            await asyncio.gather(beginning, ending, return_exceptions=True)
            await self.stop()

    async def start(self) -> None:
        """Listens, waits until the state is this gateway's, takes up what an earlier one left, and lets clients in."""
        await self._listen()
        await self._begin()

    async def _listen(self) -> None:
        listener = _listen(self.settings.host, self.settings.port)
        self.rest_port = listener.getsockname()[1]
        await self.grpc.start()
        self._rest_task = asyncio.create_task(self._rest.serve([listener]), name="rest")
        logger.info("REST on http://%s:%d%s", self.settings.host, self.rest_port, self.settings.base_path)

    async def _begin(self) -> None:
        for folder in self.settings.private_folders:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self.database.open()
        await self.keys.load()
        await self.exports.open()
        await self.trainer.start()
        await asyncio.gather(self.renderers.start(), self.samplers.start())
        await self._restore()
        self._door.is_open = True
        self._spawn(self.keys.watch(), "keys")
        self._spawn(self._sweep_forever(), "sweep")
        self._spawn(self._watch_services(), "services")
        self._spawn(self.vitals.watch(), "vitals")
        self._spawn(self._check_storage(), "storage")
        self._spawn(self._tidy_forever(), "tidy")

    async def stop(self) -> None:
        """Lets what runs end, leaves what waits to the next process, and closes everything.

        Until nothing runs any more, clients are served: what they submit is kept for the next process.
        """
        self._stopping.set()
        await self.grpc.set_serving(False)
        drain_s = self.settings.drain_s
        await asyncio.gather(self.training.drain(drain_s), self.sampling.drain(drain_s))
        self.board.release_waiters()
        self._rest.should_exit = True
        self.grpc.request_stop()
        await self.grpc.run_until_stopped()
        if self._rest_task is not None:
            await self._rest_task
        await self.sampling.stop()
        await self.custom_losses.stop()
        await self.training.stop()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.snapshots.close()
        await self.copies.stop()
        self.storage.close()
        await self.samplers.close()
        await self.renderers.close()
        await self.trainer.close()
        await self.database.close()
        logger.info("stopped")

    async def _restore(self) -> None:
        await self.sessions.restore()
        await self.models.restore()
        pendings = await self.board.restore()
        if pendings:
            logger.info("taking up %d unfinished requests", len(pendings))
        for pending in pendings:
            try:
                session = await self.sessions.load(pending.session_id)
                if session.ended_at is not None:
                    raise SessionEnded(f"session {pending.session_id} is over ({session.end_reason})")
                if pending.kind not in (Kind.SAMPLE, Kind.CREATE_CUSTOM_LOSS):
                    self.models.use(await self.models.load(pending.scope))
            except FoveaError as error:
                await self.board.finish(pending, Outcome(pending.kind, b"", error))
            else:
                self._start_future(pending)
        for session_id in await self.models.orphans():
            await self._end_session(await self.sessions.load(session_id))

    def _start_future(self, pending: Pending) -> None:
        if pending.kind is Kind.SAMPLE:
            self.sampling.start(pending)
        elif pending.kind is Kind.CREATE_CUSTOM_LOSS:
            self.custom_losses.start(pending)
        else:
            self.training.start(pending)

    async def _end_session(self, session: Session) -> None:
        self._freeing.add(task := self._spawn(self._free_session(session), f"end {session.session_id}"))
        task.add_done_callback(self._freeing.discard)

    async def _freed(self) -> None:
        # Only what has begun: an ending session waits for its running command, which may wait here for earlier ones.
        if self._freeing:
            await asyncio.wait(set(self._freeing))

    async def _free_session(self, session: Session) -> None:
        error = SessionEnded(f"session {session.session_id} is over ({session.end_reason})")
        await self.board.cancel_session(session.session_id, error)
        await self.training.end_session(session, error)
        self.sampling.forget(session.session_id)
        await self.custom_losses.forget(session.session_id)
        self.board.forget(session.session_id)
        self.sessions.forget(session.session_id)
        await self.snapshots.forget(await self.models.of_session(session.session_id), self.samplers.up)

    async def _check_storage(self) -> None:
        if problem := await self.storage.problem():
            logger.error("nothing can be saved at %s until this is mended: %s", self.storage.root, problem)

    async def _watch_services(self) -> None:
        """Health is SERVING while every service answers once; it is not taken back when one of them restarts."""
        said: list[str] = []
        while not self._stopping.is_set():
            absent = await self._absent()
            if not absent:
                await self.grpc.set_serving(True)
                return
            if absent != said:
                logger.info("not ready yet: waiting for %s", ", ".join(absent))
                said = absent
            await asyncio.sleep(0.5)

    async def _absent(self) -> list[str]:
        up = {"the trainer": self.trainer.up, "a sampler": bool(self.samplers.up)}
        absent = [name for name, is_up in up.items() if not is_up]
        try:
            await self.renderers.info()
        except FoveaError:
            absent.append("a renderer")
        return absent

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self.settings.session_ttl_s / 4))
            try:
                await self.sessions.sweep()
                await self.database.look_for_room()
                await self.board.sweep()
                await self.checkpoints.sweep()
                await self.sampling.sweep()
            except Exception:
                logger.exception("a sweep failed; the next one tries again")

    async def _tidy_forever(self) -> None:
        for number in itertools.count():
            try:
                await self.leftovers.sweep(with_folders=number % _FOLDER_ROUNDS == 0)
            except Exception:
                logger.exception("leftovers could not be looked for; the next round tries again")
            await asyncio.sleep(_TIDY_S)

    def _spawn(self, work: Any, name: str) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _rest_config(self) -> uvicorn.Config:
        api = build_api(
            self.settings, self.keys, self.sessions, self.capabilities, self.models, self.training, self.sampling,
            self.board, self.checkpoints, self.copies, self.exports, self.custom_losses, self._memory,
        )  # fmt: skip
        # The other half is for gRPC, services, database and storage.
        most = min(self.settings.max_connections, open_files() // 2)
        connections = Connections(most, self.settings.request_timeout_s)
        return uvicorn.Config(
            self._door.guard(api),
            http=partial(Connection, connections=connections),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(self.settings.drain_s) + 1,
            backlog=4096,
        )


class _RestServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: the process has one place that stops it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _die() -> None:
    """What this process has in memory is no longer true: whatever it still did might be done twice."""
    logging.shutdown()
    os._exit(1)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off for sockets that say TCP only: else every answer waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener
