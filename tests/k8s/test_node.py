"""A real node: containers, probes, logs, names, service addresses, signals. Its image is Debian's busybox alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from deploy.cluster.image import IMAGE
from deploy.cluster.node import Node
from tests.k8s.cluster import Object, fresh_namespace, get, ready_addresses, wait_for

_PORT = 8080
_SERVE = """
trap 'echo asked to end; exit 0' TERM
mkdir /tmp/www
echo hello > /tmp/www/index.html
httpd -f -p 8080 -h /tmp/www &
echo serving
wait
"""


@pytest.fixture(scope="module")
def namespace(node: Node) -> Iterator[str]:
    """A namespace with a web server behind a service with its own address, and behind a headless one."""
    with fresh_namespace(node.cluster) as name:
        items = [_pod(), _service("web"), _service("web-each") | {"spec": _ports() | {"clusterIP": "None"}}]
        node.cluster.apply(*({**item, "metadata": {**item["metadata"], "namespace": name}} for item in items))
        node.cluster.kubectl("wait", "pod/web", "-n", name, "--for=condition=Ready", "--timeout=120s")
        yield name


def test_a_container_runs(node: Node, namespace: str) -> None:
    """Its probe succeeds, its log is available, and a command in it sees its user and memory limit."""
    assert "serving" in node.cluster.kubectl("logs", "web", "-n", namespace)
    assert (
        _in_pod(node, namespace, "cat /proc/self/status | while read -r n v r; do [ $n != Uid: ] || echo $v; done")
        == "1000"
    )
    assert _in_pod(node, namespace, "cat /sys/fs/cgroup/memory/memory.limit_in_bytes") == str(64 * 1024**2)


def test_names_and_addresses(node: Node, namespace: str) -> None:
    """A headless service's name resolves to the pod's address; a normal service's address leads to the pod or the API
    server.
    """
    (pod,) = get(node.cluster, namespace, "pods")
    address = pod["status"]["podIP"]
    assert address in _in_pod(node, namespace, f"nslookup -type=a web-each.{namespace}.svc.cluster.local")
    assert _in_pod(node, namespace, f"wget -qO- http://web.{namespace}:{_PORT}/") == "hello"
    # The static wget has no TLS that the API server accepts; plain text gets an answer, too.
    said = _in_pod(node, namespace, "printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc kubernetes.default 443")
    assert "HTTP request to an HTTPS server" in said


def test_a_killed_container_is_started_again(node: Node, namespace: str) -> None:
    """The kubelet restarts it as after a crash; then it is an endpoint again."""
    (status,) = _status(node, namespace)["containerStatuses"]
    node.kill(status["containerID"])
    wait_for("the container runs again", lambda: _restarts(node, namespace) == status["restartCount"] + 1)
    wait_for("it is an endpoint", lambda: len(ready_addresses(node.cluster, namespace, "web")) == 1)


def test_a_deleted_pod_is_asked_to_end(node: Node, namespace: str) -> None:
    """It gets SIGTERM and time to exit."""
    with ThreadPoolExecutor() as pool:
        log = pool.submit(node.cluster.kubectl, "logs", "web", "--follow", "-n", namespace)
        node.cluster.kubectl("delete", "pod", "web", "-n", namespace)
        assert log.result().splitlines()[-1] == "asked to end"
    wait_for("no endpoint is left", lambda: not ready_addresses(node.cluster, namespace, "web"))


def _in_pod(node: Node, namespace: str, command: str) -> str:
    return node.cluster.kubectl("exec", "web", "-n", namespace, "--", "sh", "-c", command).strip()


def _status(node: Node, namespace: str) -> Object:
    (pod,) = get(node.cluster, namespace, "pods")
    return dict(pod["status"])


def _restarts(node: Node, namespace: str) -> int:
    (container,) = _status(node, namespace)["containerStatuses"]
    return int(container["restartCount"]) if container["ready"] else -1


def _pod() -> Object:
    container = {
        "name": "web",
        "image": IMAGE,
        "command": ["sh", "-c", _SERVE],
        "securityContext": {"runAsUser": 1000, "allowPrivilegeEscalation": False},
        "readinessProbe": {"httpGet": {"path": "/", "port": _PORT}, "periodSeconds": 1},
        "resources": {"limits": {"memory": "64Mi", "cpu": "100m"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web", "labels": {"app": "web"}},
        "spec": {"containers": [container]},
    }


def _service(name: str) -> Object:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": _ports()}


def _ports() -> Object:
    return {"selector": {"app": "web"}, "ports": [{"port": _PORT}]}
