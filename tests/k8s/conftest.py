"""One cluster for the whole session; failed tests print its logs."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deploy.cluster.cluster import Cluster, running_cluster
from deploy.cluster.controllers import running_controllers
from deploy.cluster.machine import NoMachine
from deploy.cluster.node import Node, running_node
from deploy.cluster.tools import missing
from tests.k8s.cluster import fresh_namespace
from tests.other_logs import logs_with_failures

_FOLDER = Path(__file__).parent
_LOADED_MACHINE_S = 1200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raises pytest's time limit, because Helm has its own."""
    for item in items:
        if _FOLDER in item.path.parents:
            item.add_marker(pytest.mark.timeout(_LOADED_MACHINE_S))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane with four simulated nodes and the controllers of LeaderWorkerSets and Kueue."""
    if missing():
        pytest.skip("no Kubernetes tools: python -m deploy.cluster build makes them, with Go")
    with (
        running_cluster(tmp_path_factory.mktemp("k8s")) as cluster,
        running_controllers(cluster),
        logs_with_failures(request.session, "control plane", cluster.logs),
    ):
        yield cluster


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A separate cluster with one real node; the test is skipped if this host cannot run it."""
    if missing(node=True):
        pytest.skip("no Kubernetes tools: python -m deploy.cluster build makes them, with Go")
    with ExitStack() as stack:
        try:
            node = stack.enter_context(running_node(tmp_path_factory.mktemp("node")))
        except NoMachine as reason:
            pytest.skip(str(reason))
        stack.enter_context(logs_with_failures(request.session, "real node", node.logs))
        yield node


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace for the test."""
    with fresh_namespace(cluster) as name:
        yield name
