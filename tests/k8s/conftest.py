"""One cluster for the whole session; its logs are shown with every test that failed on it."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deploy.cluster.cluster import Cluster, running_cluster
from deploy.cluster.machine import NoMachine
from deploy.cluster.node import Node, running_node
from deploy.cluster.tools import missing
from tests.k8s.cluster import fresh_namespace

_FOLDER = Path(__file__).parent
_CLUSTER = pytest.StashKey[Cluster]()
_NODE = pytest.StashKey[Node]()
_LOADED_MACHINE_S = 1200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Helm waits by itself, with its own limits: pytest's come last."""
    for item in items:
        if _FOLDER in item.path.parents:
            item.add_marker(pytest.mark.timeout(_LOADED_MACHINE_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the control plane's logs to what is printed of a failure."""
    report = yield
    if report.failed and _CLUSTER in item.session.stash:
        report.sections.append(("control plane", item.session.stash[_CLUSTER].logs()))
    if report.failed and _NODE in item.session.stash:
        report.sections.append(("real node", item.session.stash[_NODE].logs()))
    return report


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane with four simulated nodes."""
    if missing():
        pytest.skip("no Kubernetes tools: python -m deploy.cluster build makes them, with Go")
    with running_cluster(tmp_path_factory.mktemp("k8s")) as cluster:
        request.session.stash[_CLUSTER] = cluster
        yield cluster


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A cluster of its own with one real node; skipped where this host cannot carry one."""
    if missing():
        pytest.skip("no Kubernetes tools: python -m deploy.cluster build makes them, with Go")
    with ExitStack() as stack:
        try:
            node = stack.enter_context(running_node(tmp_path_factory.mktemp("node")))
        except NoMachine as reason:
            pytest.skip(str(reason))
        request.session.stash[_NODE] = node
        yield node


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own."""
    with fresh_namespace(cluster) as name:
        yield name
