"""Kubernetes' own autoscaler scales samplers by the gateway's metric, which an adapter serves as in a real cluster."""

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from deploy.cluster.cluster import Cluster
from tests.k8s.cluster import Release, wait_for

_GROUP, _VERSION, _METRIC = "external.metrics.k8s.io", "v1beta1", "fovea_gateway_replica_tokens"
_VALUES = (
    "--set=sampler.autoscaling.enabled=true,sampler.autoscaling.tokens=1000,sampler.autoscaling.scaleDownSeconds=0",
    "--set=trainer.gpus=1,renderer.autoscaling.enabled=false",
)


class Adapter:
    """An external metrics API with one metric.

    Attributes:
        tokens: Value of the metric.
        asked: Selectors that the autoscaler requested, with the namespace.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.asked: set[tuple[str, str]] = set()

    def answer(self, url: str) -> dict[str, Any] | None:
        """Answers a request of the API server; None for an unknown URL."""
        head = {"apiVersion": f"{_GROUP}/{_VERSION}"}
        below = urlsplit(url).path.removeprefix(f"/apis/{_GROUP}/{_VERSION}").strip("/")
        if not below:
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": head["apiVersion"], "resources": []}
        if not below.startswith("namespaces/"):
            return None
        _, namespace, metric = below.split("/")
        self.asked.add((namespace, parse_qs(urlsplit(url).query)["labelSelector"][0]))
        value = {
            "metricName": metric, "metricLabels": {}, "timestamp": "2026-11-29T00:00:00Z", "value": str(self.tokens),
        }  # fmt: skip
        return {
            **head,
            "kind": "ExternalMetricValueList",
            "metadata": {},
            "items": [value] if metric == _METRIC else [],
        }


@contextmanager
def _served(adapter: Adapter, folder: Path) -> Iterator[int]:
    """Serves an adapter over HTTPS; returns its port."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = adapter.answer(self.path)
            body = json.dumps(answer).encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def adapter(cluster: Cluster, tmp_path: Path, namespace: str) -> Iterator[Adapter]:
    """An adapter to which the API server forwards requests."""
    adapter = Adapter()
    with _served(adapter, tmp_path) as port:
        place = {"name": "adapter", "namespace": namespace}
        service = {"type": "ExternalName", "externalName": "localhost"}
        spec = {"group": _GROUP, "version": _VERSION, "service": {**place, "port": port}, "insecureSkipTLSVerify": True}
        spec |= {"groupPriorityMinimum": 100, "versionPriority": 100}
        name = f"{_VERSION}.{_GROUP}"
        cluster.apply(
            {"apiVersion": "v1", "kind": "Service", "metadata": place, "spec": service},
            {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": name}, "spec": spec},
        )
        try:
            cluster.kubectl("wait", f"apiservice/{name}", "--for=condition=Available", "--timeout=60s")
            yield adapter
        finally:
            cluster.kubectl("delete", "apiservice", name)


def test_samplers_follow_the_tokens(cluster: Cluster, namespace: str, adapter: Adapter) -> None:
    """1 sampler, 4 with more than three samplers' tokens, still 4 after an upgrade, and 1 again."""
    release = Release(cluster, namespace, "vision", _VALUES)
    release.install()

    def count() -> int:
        return len(release.pods("sampler"))

    assert count() == 1
    adapter.tokens = 3500
    wait_for("four samplers", lambda: count() == 4)
    first = release.pods("sampler")
    release.upgrade("--set", "gateway.settings.max_pending=1234")
    assert release.pods("sampler") == first, "an upgrade must not undo the scaling"
    adapter.tokens = 100
    wait_for("one sampler again", lambda: count() == 1)
    assert release.pods("sampler") < first
    wanted = {"service=sampler", "app_kubernetes_io_instance=vision"}
    assert {(place, frozenset(selector.split(","))) for place, selector in adapter.asked} == {
        (namespace, frozenset(wanted))
    }
    release.uninstall()
