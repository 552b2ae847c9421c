"""The gRPC server of a service: health, reflection, metrics, error mapping and graceful shutdown."""

import asyncio
import logging
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from fovea.runtime import tls, tracing
from fovea.runtime.interceptors import ErrorInterceptor
from fovea.runtime.secret import SecretInterceptor, service_secret
from fovea.runtime.settings import ServiceSettings
from fovea.wire.conventions import MESSAGE_BYTES
from fovea.wire.errors import FoveaError

logger = logging.getLogger(__name__)


def open_files() -> int:
    """Returns how many files, including connections, this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Limit per connection. A gRPC client holds further calls back until earlier ones have ended.
    ("grpc.max_concurrent_streams", 4096),
    ("grpc.max_allowed_incoming_connections", open_files() // 4),
    ("grpc.server_handshake_timeout_ms", 30_000),
]


class ServiceServer:
    """A gRPC server that runs servicers until SIGTERM or SIGINT.

    Add servicers to `grpc` before `start`. Health is NOT_SERVING until `set_serving(True)`.

    Args:
        settings: Address, ports and drain time.
        service_names: Full names, such as `fovea.api.v1.SamplerService`; health and reflection answer for each.
        begins_traces: Whether calls without a trace begin one. True only at the entry of the platform.
        translate: Returns the error that a caller receives for a given error.
        options: gRPC core options that override `SERVER_OPTIONS`.
        bounds: Interceptors between the error interceptor and the servicers. FoveaErrors from them become statuses.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        service_names: Sequence[str],
        begins_traces: bool = False,
        translate: Callable[[FoveaError], FoveaError] = lambda error: error,
        options: Mapping[str, int] = MappingProxyType({}),
        bounds: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._settings = settings
        self._names = ["", *service_names]
        self._stop = asyncio.Event()
        self._serving = False
        self._metrics_port: int | None = None
        interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor(begins_traces, translate), *bounds]
        if settings.internal and (secret := service_secret()):
            interceptors.insert(0, SecretInterceptor(secret))
        self.grpc = grpc.aio.server(
            interceptors=interceptors, options=list({**dict(SERVER_OPTIONS), **options}.items())
        )
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        if settings.reflection:
            names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self.grpc)
        self._probes: grpc.aio.Server | None = None
        self.port = self.health_port = 0

    @property
    def address(self) -> str:
        """host:port that clients connect to; known after `start`."""
        return f"{self._settings.host}:{self.port}"

    async def start(self) -> None:
        """Binds the port and starts to listen. Raises RuntimeError if the port is in use."""
        address = f"{self._settings.host}:{self._settings.port}"
        certificates = tls.certificates() if self._settings.internal else None
        if certificates:
            self.port = self.grpc.add_secure_port(address, certificates.for_server())
        else:
            self.port = self.grpc.add_insecure_port(address)
        await self._publish(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.grpc.start()
        await self._answer_probes()
        # Start tracing only now: vLLM forks earlier, and the exporter has threads.
        tracing.configure(_trace_name(self._names), self._settings.trace_endpoint, self.address)
        if self._settings.metrics_port is not None:
            try:
                shown, _ = start_http_server(self._settings.metrics_port, self._settings.host)
            except OSError as error:
                raise OSError(error.errno, f"metrics port {self._settings.metrics_port}: {error.strerror}") from error
            self._metrics_port = shown.server_port
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        metrics = f", metrics on {self._settings.host}:{self._metrics_port}" if self._metrics_port else ""
        logger.info("listening on %s%s%s", self.address, " with mutual TLS" if certificates else "", metrics)

    async def _answer_probes(self) -> None:
        """Serves health checks in plain text on a port of their own, because a kubelet has no certificate."""
        if self._settings.health_port is not None:
            self._probes = grpc.aio.server(options=SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
            self.health_port = self._probes.add_insecure_port(f"{self._settings.host}:{self._settings.health_port}")
            await self._probes.start()

    async def set_serving(self, serving: bool) -> None:
        """Sets the result of health checks: whether this service accepts requests."""
        if serving != self._serving:
            logger.info("serving" if serving else "not serving")
        self._serving = serving
        status = health_pb2.HealthCheckResponse
        await self._publish(status.SERVING if serving else status.NOT_SERVING)

    def request_stop(self) -> None:
        """Makes `run_until_stopped` drain and return, as SIGTERM does."""
        self._stop.set()

    async def run_until_stopped(self) -> None:
        """Waits for a stop, then rejects new calls and gives calls in flight `drain_s` seconds to finish."""
        await self._stop.wait()
        logger.info("stopping; calls in flight have up to %.0f s to finish", self._settings.drain_s)
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(self._settings.drain_s)
        if self._probes is not None:
            await self._probes.stop(None)
        logger.info("stopped")

    async def _publish(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        for name in self._names:
            await self._health.set(name, status)


def _trace_name(service_names: Sequence[str]) -> str:
    """Returns `fovea-sampler` for `fovea.api.v1.SamplerService`."""
    return f"fovea-{service_names[-1].rpartition('.')[2].removesuffix('Service').lower()}"
