"""The life cycle of the process: starts the components in order, accepts clients, sweeps, and stops all in reverse."""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import time
from functools import partial

import uvicorn

from fovea.api.v1 import admin_pb2_grpc, gateway_pb2_grpc
from fovea.runtime.server import ServiceServer, open_files
from fovea.runtime.tasks import BackgroundTasks, repeat
from fovea.wire.conventions import ADMIN_SERVICE, GATEWAY_SERVICE
from fovea.wire.errors import FoveaError, SessionEnded
from fovea_gateway.access.owners import LOOK_S
from fovea_gateway.database.ownership import ShardOwner, read_owners, write_owner
from fovea_gateway.fronts.administration import AdminServicer
from fovea_gateway.fronts.components import Components
from fovea_gateway.fronts.gateway_servicer import GatewayServicer, named
from fovea_gateway.fronts.grpc_interceptors import (
    MOST_CONNECTIONS,
    AuditedCalls,
    AuthInterceptor,
    BoundedMessages,
    ConnectionShares,
    channel_limits,
)
from fovea_gateway.fronts.rest_app import build_api
from fovea_gateway.http.connections import Connection, Connections, RestServer, listen
from fovea_gateway.http.endpoint import Readiness
from fovea_gateway.live.alerts import LOOK_S as ALERTS_S
from fovea_gateway.live.live_state import TICK_S
from fovea_gateway.live.live_view import SYSTEM_S
from fovea_gateway.replicas.discovery import join_address
from fovea_gateway.sessions.sessions import Session
from fovea_gateway.settings import GatewaySettings
from fovea_gateway.training.trainer_pool import read_drained

logger = logging.getLogger(__name__)

_SWEEP_S = 30.0
_COLLECT_S = 60.0
_FOLDER_ROUNDS = 10
"""Folders are checked every ten minutes, because listing a bucket takes several calls per model."""
_GAUGES_S = 2.0
_RETURN_S = 0.5
_JOURNAL_S = 2.0
_AUDIT_S = 2.0
REPORT_S, _SHARES_S = 1.0, 2.0
"""A check of 16,000 connections takes a tenth of a second."""


class Upkeep:
    """The background work of a gateway. It restores the state of an earlier process, frees what ended sessions owned,
    sweeps, and shuts down in order.

    Args:
        ready: Gets the gateway's shard once clients may connect.
    """

    def __init__(self, settings: GatewaySettings, components: Components, ready: Readiness) -> None:
        self._settings, self._components, self._ready = settings, components, ready
        self._background = BackgroundTasks()

    async def begin(self) -> None:
        """Waits until this gateway holds the database, restores its state, and accepts clients."""
        components, background = self._components, self._background
        for folder in self._settings.private_folders:
            with contextlib.suppress(OSError):  # the database and `_check_storage` report the problem
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        await components.database.open()
        await components.keys.load()
        await components.owners.read()
        await components.link_signer.open()
        await components.sign_ins.open()
        await self._read_drained()
        await components.base_models.start()
        await self._restore()
        await components.kept_rows.sweep()
        self._ready.shard = components.database.shards.number
        rounds = itertools.count()
        background.start(self._free_ended(), "free what ended sessions owned")
        background.start(components.keys.watch(), "keys")
        background.start(repeat(components.owners.read, LOOK_S, "reading the owners"), "owners")
        if any(pool.is_plural for pool in components.pools.values()):
            background.start(repeat(self._read_drained, LOOK_S, "reading the drained trainers"), "drained trainers")
        background.start(self._sweep_forever(), "sweep")
        for pool in components.pools.values():
            sweep = pool.sweep if pool.is_plural else pool.sides[0].residency.sweep
            background.start(repeat(sweep, _RETURN_S, "bringing models back"), "residency")
        background.start(repeat(components.audit.flush, _AUDIT_S, "writing audit entries"), "audit log")
        background.start(repeat(self._tend_journal, _JOURNAL_S, "tending the journal"), "journal")
        background.start(repeat(components.health.set_gauges, _GAUGES_S, "setting the gauges"), "gauges")
        background.start(repeat(components.live_state.tick, TICK_S, "watching for the page"), "page")
        background.start(repeat(components.alerts.tick, ALERTS_S, "looking for alerts"), "alerts")
        background.start(components.alerts.webhook.run(), "webhook")
        background.start(repeat(components.live_view.record, SYSTEM_S, "recording the services' figures"), "system")
        background.start(self._check_storage(), "storage")
        background.start(
            repeat(
                lambda: components.orphans.sweep(with_folders=next(rounds) % _FOLDER_ROUNDS == 0),
                _COLLECT_S,
                "collecting orphans",
            ),
            "orphans",
        )

    async def report(self, rest: str, grpc: str, *, serves: bool) -> None:
        """Tells routers and other gateways the addresses and the load of this one, and reads what the others told.

        Args:
            rest: host:port of the REST API.
            grpc: host:port of the gRPC API.
            serves: Whether all services have answered.
        """
        components = self._components
        report = components.health.report(components.models.held_by_owner()) | {"serves": serves}
        mine = ShardOwner(components.database.shards.number, rest, grpc, report, time.time())
        await components.database.write(lambda connection: write_owner(connection, mine))
        components.shares.note_reports(await components.database.read(read_owners))

    async def drain(self) -> None:
        """Starts no new work and waits for running work to end; clients are still served."""
        components, drain_s = self._components, self._settings.drain_s
        await asyncio.gather(components.training.drain(drain_s), components.sampling.drain(drain_s))
        components.futures.release_waiters()
        components.live_view.close()

    async def end(self) -> None:
        """Leaves queued work to the next process and closes everything. Call this once no client is connected."""
        components = self._components
        await components.sampling.stop()
        await components.custom_losses.stop()
        await components.training.stop()
        await self._background.cancel()
        for pool in components.pools.values():
            await pool.stop()
        for base in components.base_models:
            await base.snapshots.close()
        await components.copies.stop()
        await components.live_state.close()
        components.health.clear_gauges()
        components.storage.close()
        await components.base_models.close()
        await components.audit.flush()
        await components.database.close()

    async def _restore(self) -> None:
        """Restores the state that an earlier process left. Each component resumes its own kinds of work."""
        components = self._components
        await components.sessions.restore()
        await components.models.restore()
        pendings = await components.futures.restore()
        if pendings:
            logger.info("resuming %d unfinished requests", len(pendings))
        await components.custom_losses.resume(pendings)
        await components.training.resume(pendings)
        await components.sampling.resume(pendings)
        for session_id in await components.models.unfreed_sessions():
            components.sessions.free(await components.sessions.load(session_id))

    async def _free_ended(self) -> None:
        while True:
            session = await self._components.sessions.next_ended()
            self._background.start(self._free_session(session), f"end {session.session_id}")

    async def _free_session(self, session: Session) -> None:
        components, session_id = self._components, session.session_id
        error = SessionEnded.of(session_id, session.end_reason)
        try:
            await components.futures.cancel_session(session_id, error)
            await components.training.end_session(session, error)
            components.sampling.forget(session_id)
            await components.custom_losses.forget(session_id)
            await components.recordings.forget(session_id)
            components.futures.forget(session_id)
            for base in components.base_models:
                model_ids = await components.models.of_session(session_id, base.name)
                await base.snapshots.forget(model_ids, base.samplers.up)
        finally:
            components.sessions.forget(session_id)

    async def _check_storage(self) -> None:
        if problem := await self._components.storage.problem():
            logger.error(
                "nothing can be saved at %s until this problem is fixed: %s", self._components.storage.root, problem
            )
        if misplaced := await self._components.orphans.misplaced():
            logger.error(
                "checkpoints that cannot be loaded because they were saved outside %s: %d, such as %s. Move the state "
                "folder back to its path at that time, or restore the backup there",
                self._components.storage.root,
                len(misplaced),
                min(misplaced),
            )

    async def _sweep_forever(self) -> None:
        period_s = min(_SWEEP_S, self._settings.session_ttl_s / 4)
        await asyncio.sleep(period_s)
        await repeat(self._sweep, period_s, "a sweep")

    async def _read_drained(self) -> None:
        drained = await self._components.database.read(read_drained)
        for pool in self._components.pools.values():
            pool.drain(drained)

    async def _tend_journal(self) -> None:
        for trainer in self._components.base_models.trainers:
            await self._components.journal.trim(trainer)
        await self._components.journal.bound()

    async def _sweep(self) -> None:
        await self._components.suspension.sweep()
        await self._components.database.look_for_room()
        await self._components.futures.sweep()
        await self._components.checkpoints.sweep()
        await self._components.sampling.sweep()
        await self._components.unnamed_limit.sweep()
        await self._components.recordings.sweep()
        await self._components.kept_rows.sweep()
        await self._components.audit.sweep()


class Gateway:
    """One gateway. `run` starts it, serves until a signal and stops it; `start` and `stop` do these steps alone."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.components = Components(settings, on_superseded=_die)
        self.rest_port = 0
        self._ready = Readiness()
        self._stopping = asyncio.Event()
        self._upkeep = Upkeep(settings, self.components, self._ready)
        self._background = BackgroundTasks()
        auth = AuthInterceptor(self.components.keys, self.components.owners, self._ready)
        self.grpc = ServiceServer(
            settings.model_copy(update={"port": settings.grpc_port}), [ADMIN_SERVICE, GATEWAY_SERVICE],
            begins_traces=True, translate=self._translate, options=channel_limits(settings),
            bounds=[auth, BoundedMessages(), AuditedCalls(self.components.keys, self.components.audit)],
        )  # fmt: skip
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(
            GatewayServicer(self.components, settings), self.grpc.grpc
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self.components), self.grpc.grpc)
        self._rest = RestServer(self._rest_config())
        self._rest_task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Starts, serves until SIGTERM or SIGINT, and stops. Raises the errors that `start` raises."""
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
        """Listens, waits until this gateway holds the database, restores its state, and accepts clients."""
        await self._listen()
        await self._begin()

    async def _begin(self) -> None:
        await self._upkeep.begin()
        if self.settings.shards > 1:
            self._background.start(repeat(self._report, REPORT_S, "reporting to routers"), "report")
        self._background.start(self._watch_services(), "services")

    async def _report(self) -> None:
        host = self.settings.host
        is_any = host in ("0.0.0.0", "::")
        host = self.settings.shard_host or (socket.gethostbyname(socket.gethostname()) if is_any else host)
        rest, grpc = (join_address(host, port) for port in (self.rest_port, self.grpc.port))
        await self._upkeep.report(rest, grpc, serves=self.grpc.is_serving)

    async def _listen(self) -> None:
        listener = listen(self.settings.host, self.settings.port)
        self.rest_port = listener.getsockname()[1]
        await self.grpc.start()
        shares = ConnectionShares(self.grpc.port, channel_limits(self.settings)[MOST_CONNECTIONS])
        self._background.start(repeat(shares.sweep, _SHARES_S, "sharing gRPC connections"), "gRPC connections")
        self._rest_task = asyncio.create_task(self._rest.serve([listener]), name="rest")
        logger.info("REST on http://%s:%d%s", self.settings.host, self.rest_port, self.settings.base_path)

    async def stop(self) -> None:
        """Waits for running work to end, leaves queued work to the next process, and closes everything.

        Clients are served until nothing runs any more; requests that they submit meanwhile are stored for the next
        process.
        """
        self._stopping.set()
        await self.grpc.set_serving(False)
        await self._upkeep.drain()
        self._rest.stop_soon()
        self.grpc.request_stop()
        await self.grpc.run_until_stopped()
        if self._rest_task is not None:
            await self._rest_task
        await self._background.cancel()
        await self._upkeep.end()
        logger.info("stopped")

    async def _watch_services(self) -> None:
        """Sets the gRPC health to SERVING once every service has answered. A later restart of a service does not reset
        it.
        """
        said: list[str] = []
        while not self._stopping.is_set():
            missing = self.components.health.missing()
            if not missing:
                await self.grpc.set_serving(True)
                return
            if missing != said:
                logger.info("not ready yet: waiting for %s", ", ".join(missing))
                said = missing
            await asyncio.sleep(0.5)

    def _translate(self, error: FoveaError) -> FoveaError:
        return named(self.components.paths.hide(error))

    def _rest_config(self) -> uvicorn.Config:
        # The other half of the open files is for gRPC, services, database and storage.
        most = min(self.settings.max_connections, open_files() // 2)
        self.connections = Connections(most, self.settings.request_timeout_s)
        return uvicorn.Config(
            build_api(self.components, self.settings, self._ready),
            http=partial(Connection, connections=self.connections),  # type: ignore[arg-type]
            # uvicorn hands an upgraded transport to another protocol, so `connections` would never see it close.
            ws="none",
            # Otherwise a request would start with the caller of an earlier request on the same connection.
            reset_contextvars=True,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(self.settings.drain_s) + 1,
            backlog=4096,
        )


def _die() -> None:
    """Ends the process at once: another gateway has taken over, so the state in memory is stale and any work might run
    twice.
    """
    logging.shutdown()
    os._exit(1)
