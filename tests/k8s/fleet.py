"""Real services on this machine's own address; the gateway discovers samplers through a Kubernetes API server."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import fovea_tinyvlm
from deploy.cluster.cluster import Cluster
from fovea.runtime.credentials import SECRET_VARIABLE
from fovea.runtime.hosts import free_ports
from tests.e2e.stack import API_KEY
from tests.service_process import ServiceProcess, service_process

MODEL_NAME = "tiny"


class Fleet:
    """A renderer, a trainer, a gateway that watches EndpointSlices, and samplers that join and leave them.

    Attributes:
        base_url: URL of the gateway's REST API.
        metrics: URL of the gateway's metrics.
        samplers: All started samplers, including those that are not endpoints.
    """

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self._cluster, self._namespace, self._folder = cluster, namespace, folder
        self._host = own_address()
        self._shared = {SECRET_VARIABLE: secrets.token_urlsafe(32)}
        self._metrics: dict[str, str] = {}
        self.samplers: list[ServiceProcess] = []
        self.base_url = self.metrics = ""

    @contextmanager
    def running(self, samplers: int) -> Iterator[Fleet]:
        """Starts all processes, yields once they serve, and stops them. Only the first sampler is an endpoint."""
        model = ("--model", str(fovea_tinyvlm.ensure()))
        with ExitStack() as stack:
            renderer = stack.enter_context(self._service("RendererService", *model))
            reach = (*model, "--renderer", renderer.address)
            kept = ("--checkpoints", str(self._folder / "checkpoints"), "--recovery", str(self._folder / "recovery"))
            trainer = stack.enter_context(self._service("TrainerService", *reach, "--ranks", "2", *kept))
            self.samplers = [stack.enter_context(self._service("SamplerService", *reach)) for _ in range(samplers)]
            self.join(renderer, self.samplers[0])
            for process in (renderer, trainer, *self.samplers):
                process.wait_serving()
            stack.enter_context(self._gateway("--trainer", trainer.address, *model)).wait_serving()
            yield self

    def join(self, *processes: ServiceProcess) -> None:
        """Adds samplers as endpoints of their service, each in its own slice because their ports differ."""
        self._cluster.apply(*(self._slice(process) for process in processes))

    def leave(self, *processes: ServiceProcess) -> None:
        """Removes samplers from their service; the processes keep running."""
        names = [_slice_name(process) for process in processes]
        self._cluster.kubectl("delete", "endpointslices", *names, "-n", self._namespace)

    def metrics_of(self, sampler: ServiceProcess) -> str:
        """Returns the URL of a sampler's metrics."""
        return self._metrics[sampler.address]

    @contextmanager
    def _service(self, service: str, *arguments: str) -> Iterator[ServiceProcess]:
        port, metrics = free_ports(2)
        address = f"{self._host}:{port}"
        self._metrics[address] = f"http://{self._host}:{metrics}/metrics"
        listen = ("--host", self._host, "--port", str(port), "--metrics-port", str(metrics))
        log = self._folder / f"{service}-{port}.log"
        with service_process(log, service, address, *listen, *arguments, environment=self._shared) as process:
            yield process

    @contextmanager
    def _gateway(self, *arguments: str) -> Iterator[ServiceProcess]:
        rest, grpc, metrics = free_ports(3)
        self.base_url, self.metrics = f"http://127.0.0.1:{rest}", f"http://127.0.0.1:{metrics}/metrics"
        with service_process(
            self._folder / "gateway.log", "GatewayService", f"127.0.0.1:{grpc}", "--port", str(rest),
            "--grpc-port", str(grpc), "--metrics-port", str(metrics), "--model-name", MODEL_NAME,
            "--discovery", "kubernetes", "--kubernetes-namespace", self._namespace, "--renderer", "renderer:grpc",
            "--sampler", "sampler:grpc", "--state-dir", str(self._folder), "--api-key", API_KEY, *arguments,
            environment={"KUBECONFIG": str(self._cluster.kubeconfig), **self._shared},
        ) as process:  # fmt: skip
            yield process

    def _slice(self, process: ServiceProcess) -> dict[str, object]:
        host, port = process.address.split(":")
        labels = {"kubernetes.io/service-name": _component(process)}
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": _slice_name(process), "namespace": self._namespace, "labels": labels},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [host], "conditions": {"ready": True}}],
            "ports": [{"name": "grpc", "port": int(port), "protocol": "TCP"}],
        }


def own_address() -> str:
    """Returns an IPv4 address of this machine that is not a loopback one (the API server refuses those in slices), or
    "".
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation; nothing is sent
        except OSError:
            return ""
        address = str(probe.getsockname()[0])
    return "" if address.startswith("127.") else address


def _component(process: ServiceProcess) -> str:
    return process.service.removesuffix("Service").lower()


def _slice_name(process: ServiceProcess) -> str:
    return f"{_component(process)}-{process.address.split(':')[1]}"
