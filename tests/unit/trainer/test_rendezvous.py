"""How nodes meet, and what is said of those that do not come."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.trainer.rendezvous import NodesMissing, meet
from services.trainer.settings import TrainerSettings

Node = Callable[..., TrainerSettings]


@pytest.fixture
def node() -> Node:
    """Settings of one node of a trainer of three."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def settings(node_rank: int, timeout_s: float = 60.0) -> TrainerSettings:
        place = {"master_addr": "127.0.0.1", "master_port": port}
        return TrainerSettings(model="m", nodes=3, node_rank=node_rank, rendezvous_timeout_s=timeout_s, **place)

    return settings


def test_they_meet_in_any_order(node: Node) -> None:
    with ThreadPoolExecutor() as threads:
        stores = [threads.submit(meet, node(rank)) for rank in (2, 0, 1)]
        assert all(store.result().check(["complete"]) for store in stores)


def test_those_that_do_not_come_are_named(node: Node) -> None:
    with ThreadPoolExecutor() as threads:
        came = threads.submit(meet, node(1, 4.0))
        with pytest.raises(NodesMissing, match=r"of 3 nodes these did not come within 2 s: \[2\]"):
            meet(node(0, 2.0))
        with pytest.raises(NodesMissing, match="node 0"):
            came.result()


def test_node_0_that_does_not_come_is_named(node: Node) -> None:
    with pytest.raises(NodesMissing, match=r"node 0 at 127\.0\.0\.1:\d+ cannot be reached: .*refused"):
        meet(node(1, 0.5))


def test_a_number_that_is_taken(node: Node) -> None:
    with ThreadPoolExecutor() as threads:
        stores = [threads.submit(meet, node(rank)) for rank in range(3)]
        kept = [store.result() for store in stores]
        with pytest.raises(NodesMissing, match="has another node 1 already"):
            meet(node(1, 0.5))
        assert len(kept) == 3


def test_a_port_that_is_taken(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = node(0).model_copy(update={"master_port": taken.getsockname()[1]})
        with pytest.raises(NodesMissing, match=r"--master-port \d+ cannot be listened on: .*EADDRINUSE"):
            meet(settings)
