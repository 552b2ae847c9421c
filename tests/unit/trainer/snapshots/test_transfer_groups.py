"""Where the store of transfer groups listens. Groups themselves: tests/e2e/trainer/test_push.py."""

import socket

import pytest

from services.trainer.snapshots.transfer_groups import TransferGroups


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
