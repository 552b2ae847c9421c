"""Listening addresses of transfer groups and their store. tests/e2e/trainer/test_push.py tests groups of several."""

import socket

import psutil
import pytest

from fovea_trainer.weights.transfer_groups import TransferGroups
from tests.listeners import listeners


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("0.0.0.0", True), ("::", True)])
def test_it_listens_where_the_trainer_does(host: str, is_open: bool) -> None:
    """127.0.0.2 stands for another network card of this machine."""
    if host == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    groups = TransferGroups.hosting("trainer", host)
    with socket.create_connection(("127.0.0.1", groups.port), timeout=5):
        pass
    if is_open:
        with socket.create_connection(("127.0.0.2", groups.port), timeout=5):
            pass
    else:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", groups.port), timeout=5)


def test_weights_are_sent_from_the_same_address() -> None:
    before = listeners([psutil.Process()]).keys()
    groups = TransferGroups.hosting("trainer", "127.0.0.2")
    group = groups.open("g", 1, 0, "gloo", 20.0, 20.0)
    made = listeners([psutil.Process()]).keys() - before
    assert f"127.0.0.2:{groups.port}" in made
    assert len(made) > 1, "gloo's own"
    assert {address.rpartition(":")[0] for address in made} == {"127.0.0.2"}
    group.close()
