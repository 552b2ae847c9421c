"""The meeting of nodes, and the errors for missing ones."""

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from fovea.runtime.credentials import SECRET_VARIABLE, service_secret
from fovea.runtime.hosts import free_ports
from fovea_trainer.ranks.rendezvous import (
    AuthenticationFailed,
    Rendezvous,
    RendezvousFailed,
    connect,
    rendezvous,
)
from fovea_trainer.settings import TrainerSettings

Node = Callable[..., TrainerSettings]
Meet = Callable[[TrainerSettings], Rendezvous]


@pytest.fixture
def node() -> Node:
    """Returns the settings of one node of a trainer of three."""
    (port,) = free_ports(1)

    def settings(node_rank: int, timeout_s: float = 60.0, **more: Any) -> TrainerSettings:
        place = {"nodes": 3, "master_addr": "127.0.0.1", "master_port": port}
        return TrainerSettings(model="m", node_rank=node_rank, rendezvous_timeout_s=timeout_s, **place | more)

    return settings


@pytest.fixture
def meet() -> Iterator[Meet]:
    """Calls `rendezvous` and finally closes the store's listener, which rank 0 would inherit."""
    with ExitStack() as stack:

        def meet(settings: TrainerSettings) -> Rendezvous:
            meeting = rendezvous(settings)
            if meeting.store_listener:
                stack.enter_context(meeting.store_listener)
            return meeting

        yield meet


def test_they_meet_in_any_order(node: Node, meet: Meet) -> None:
    with ThreadPoolExecutor() as threads:
        met = [threads.submit(meet, node(rank, ranks=rank + 1)) for rank in (2, 0, 1)]
        worker, host, _ = meetings = [future.result() for future in met]
        assert [meeting.ranks for meeting in meetings] == [[1, 2, 3]] * 3
        assert {meeting.address for meeting in meetings} == {"127.0.0.1"}
        assert host.store_listener
        assert host.store_listener.getsockname() == ("127.0.0.1", worker.store_port)


def test_it_listens_at_the_masters_address_alone(node: Node, meet: Meet) -> None:
    """127.0.0.2 stands for one network card of this machine, 127.0.0.1 for another."""
    place = {"nodes": 2, "master_addr": "127.0.0.2"}
    with ThreadPoolExecutor() as threads:
        host = threads.submit(meet, node(0, **place))
        worker = threads.submit(meet, node(1, **place))
        store = host.result().store_listener
        assert store is not None
        assert store.getsockname() == ("127.0.0.2", worker.result().store_port)
        # Node 0 keeps listening, to refuse late nodes.
        with socket.create_connection(("127.0.0.2", node(0).master_port), timeout=5):
            pass
        for port in (node(0).master_port, worker.result().store_port):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=5)


def test_strangers_change_nothing(node: Node, meet: Meet) -> None:
    """Strangers reach the port without the secret, or send nothing."""
    with ThreadPoolExecutor() as threads:
        host = threads.submit(meet, node(0))
        place = ("127.0.0.1", node(0).master_port)
        while True:
            with suppress(ConnectionRefusedError):
                silent = socket.create_connection(place)
                break
        with socket.create_connection(place) as loud:
            loud.sendall(b"\x80\x04cposix\nsystem\n." * 1000)
        with pytest.raises(AuthenticationFailed):
            connect(place, b"another secret", 30.0)
        others = [threads.submit(meet, node(rank)) for rank in (1, 2)]
        assert all(other.result().ranks == host.result().ranks for other in others)
        silent.close()


def test_those_that_do_not_come_are_named(node: Node, meet: Meet) -> None:
    with ThreadPoolExecutor() as threads:
        came = threads.submit(meet, node(1, 4.0))
        with pytest.raises(RendezvousFailed, match=r"of 3 nodes these did not arrive within 2 s: \[2\]"):
            meet(node(0, 2.0))
        with pytest.raises(RendezvousFailed, match="node 0"):
            came.result()


def test_node_0_that_does_not_come_is_named(node: Node, meet: Meet) -> None:
    with pytest.raises(RendezvousFailed, match=r"node 0 at 127\.0\.0\.1:\d+ cannot be reached: .*refused"):
        meet(node(1, 0.5))


def test_a_number_that_is_taken(node: Node, meet: Meet) -> None:
    with ThreadPoolExecutor() as threads:
        for met in [threads.submit(meet, node(rank)) for rank in range(3)]:
            assert met.result()
        with pytest.raises(RendezvousFailed, match="already has a node 1"):
            meet(node(1, 0.5))


def test_a_node_that_died_while_others_were_awaited_may_come_again(node: Node, meet: Meet) -> None:
    with ThreadPoolExecutor() as threads:
        host = threads.submit(meet, node(0))
        with pytest.raises(RendezvousFailed, match="node 0 still waits for other nodes"):
            meet(node(1, 1.0))
        others = [threads.submit(meet, node(rank)) for rank in (1, 2)]
        assert all(other.result().ranks == host.result().ranks for other in others)


def test_nodes_that_were_told_of_different_numbers(node: Node, meet: Meet) -> None:
    with ThreadPoolExecutor() as threads:
        host = threads.submit(meet, node(0, 3.0))
        with pytest.raises(RendezvousFailed, match="expects 3 nodes, but this is node 1 of 2"):
            meet(node(1, 1.5, nodes=2))
        with pytest.raises(RendezvousFailed):
            host.result()


def test_a_port_that_is_taken(node: Node, meet: Meet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = node(0).model_copy(update={"master_port": taken.getsockname()[1]})
        with pytest.raises(RendezvousFailed, match=r"cannot listen on --master-port \d+: .*in use"):
            meet(settings)


def test_an_address_of_another_machine(node: Node, meet: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of sixteen")
    with pytest.raises(RendezvousFailed, match=r"--master-addr 192\.0\.2\.77 is not an address of this machine"):
        meet(node(0, 0.5, master_addr="192.0.2.77"))


@pytest.mark.parametrize("ranks", [0, -1, "many", True, None])
def test_a_node_without_a_number_of_ranks_is_refused(node: Node, meet: Meet, ranks: Any) -> None:
    with ThreadPoolExecutor() as threads:
        host = threads.submit(meet, node(0, nodes=2, ranks=1))
        place, secret = ("127.0.0.1", node(0).master_port), service_secret().encode()
        with eventually_connected(place, secret) as odd:
            odd.sendall(json.dumps({"node": 1, "nodes": 2, "ranks": ranks}).encode() + b"\n")
            assert "expects at least 1 rank on each node" in json.loads(odd.makefile().readline())["problem"]
        assert threads.submit(meet, node(1, nodes=2, ranks=3)).result().ranks == [1, 3]
        assert host.result().ranks == [1, 3]


def eventually_connected(place: tuple[str, int], secret: bytes) -> socket.socket:
    """Connects once node 0 listens."""
    while True:
        with suppress(ConnectionRefusedError):
            return connect(place, secret, 30.0)
