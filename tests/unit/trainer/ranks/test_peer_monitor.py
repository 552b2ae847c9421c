"""The connections between rank 0 and the others over real sockets; other tests kill real ranks."""

import queue
import socket
import struct
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from fovea_trainer.ranks import peer_monitor
from fovea_trainer.ranks.peer_monitor import Peer, PeerMonitor
from fovea_trainer.ranks.rank_launcher import RankEnvironment
from fovea_trainer.ranks.rendezvous import connect


def connected(path: str) -> socket.socket:
    """Connects to rank 0 as soon as it listens: its socket file exists before."""
    ends_at = time.monotonic() + 30
    while True:
        try:
            return connect(path, b"secret", 30.0)
        except (FileNotFoundError, ConnectionRefusedError):
            assert time.monotonic() < ends_at, "rank 0 does not listen"
            time.sleep(0.01)


class Ranks:
    """Ranks as threads of this process, two per node."""

    def __init__(self, world_size: int, meeting: str) -> None:
        self._meeting = meeting
        self.lost: queue.Queue[tuple[int, Peer]] = queue.Queue()
        self.stops: queue.Queue[tuple[int, Peer]] = queue.Queue()
        self._threads = ThreadPoolExecutor(world_size)
        self._world_size = world_size
        self._store = HashStore()

    def start(self, rank: int) -> Future[PeerMonitor]:
        return self._threads.submit(
            PeerMonitor,
            self._store,
            RankEnvironment(rank, self._world_size, rank % 2, rank // 2, self._meeting),
            b"secret",
            lambda peer: self.lost.put((rank, peer)),
            lambda peer: self.stops.put((rank, peer)),
        )


@pytest.fixture(params=["one node", "several"])
def meeting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A private folder, or the address of rank 0."""
    return str(tmp_path_factory.mktemp("p")) if request.param == "one node" else "127.0.0.1:1"


def test_a_stop_reaches_rank_0_and_says_whose(meeting: str) -> None:
    ranks = Ranks(4, meeting)
    watches = [future.result() for future in [ranks.start(rank) for rank in range(4)]]
    watches[2].report_stop()
    watches[3].report_stop()
    assert {ranks.stops.get(timeout=30), ranks.stops.get(timeout=30)} == {(0, Peer(2, 1)), (0, Peer(3, 1))}
    assert ranks.lost.empty()


def test_ranks_that_do_not_come_are_named(meeting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_monitor, "JOIN_S", 3.0)
    ranks = Ranks(4, meeting)
    first, second = ranks.start(0), ranks.start(2)
    with pytest.raises(RuntimeError, match=r"ranks \[1, 3\] of 4 did not connect within 3 s"):
        first.result()
    assert second.result()


def test_a_connection_that_names_no_missing_rank_is_closed(tmp_path: Path) -> None:
    ranks = Ranks(2, str(tmp_path))
    first = ranks.start(0)
    for rank in (7, 0, -1):
        with connected(str(tmp_path / "peers")) as stranger:
            stranger.sendall(struct.pack("<ii", rank, 0))
            assert stranger.recv(1) == b""
    second = ranks.start(1)
    second.result().report_stop()
    assert first.result()
    assert ranks.stops.get(timeout=30) == (0, Peer(1, 0))
