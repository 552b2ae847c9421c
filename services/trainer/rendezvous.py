"""Where the nodes of a trainer meet before any of them starts its ranks, so that who is missing has a name."""

import socket
import time
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from services.trainer.settings import TrainerSettings

POLL_S = 0.2


class NodesMissing(Exception):
    """Not all nodes came in time. The message names those that did not."""


def meet(settings: TrainerSettings) -> TCPStore:
    """Waits until the launchers of all nodes are here.

    Returns the store at `master_addr`, which torchrun's own one shares a port with: on node 0 it must be kept.
    Raises NodesMissing after `rendezvous_timeout_s`, and if this node cannot be node 0.
    """
    deadline = time.monotonic() + settings.rendezvous_timeout_s
    if settings.node_rank == 0:
        return _gather(settings, deadline)
    problem = "cannot be reached"
    while time.monotonic() < deadline:
        try:
            if store := _join(settings, deadline):
                return store
            problem = f"has another node {settings.node_rank} already: an earlier run that does not end, or a mistake"
        except OSError as error:
            problem = f"cannot be reached: {error}"
        except DistError:
            problem = "has gone again"
        time.sleep(POLL_S)
    place = f"{settings.master_addr}:{settings.master_port}"
    raise NodesMissing(f"node 0 at {place} {problem} ({settings.rendezvous_timeout_s:.0f} s)")


def _gather(settings: TrainerSettings, deadline: float) -> TCPStore:
    try:
        store = _store(settings)
    except DistError as error:
        reason = str(error).splitlines()[0]
        raise NodesMissing(f"--master-port {settings.master_port} cannot be listened on: {reason}") from None
    missing = list(range(1, settings.nodes))
    while missing := [node for node in missing if not store.check([f"node/{node}"])]:
        if time.monotonic() > deadline:
            waited = f"within {settings.rendezvous_timeout_s:.0f} s"
            raise NodesMissing(f"of {settings.nodes} nodes these did not come {waited}: {missing}")
        time.sleep(POLL_S)
    store.set("complete", "")
    return store


def _join(settings: TrainerSettings, deadline: float) -> TCPStore | None:
    """None if another node has this one's number. Raises OSError or DistError if node 0 is not there, or goes."""
    # torch would say the same in pages.
    socket.create_connection((settings.master_addr, settings.master_port), timeout=5).close()
    store = _store(settings)
    if store.add(f"node/{settings.node_rank}", 1) > 1:
        return None
    while not store.check(["complete"]):
        if time.monotonic() > deadline:
            raise NodesMissing(f"node 0 still waits for others after {settings.rendezvous_timeout_s:.0f} s")
        time.sleep(POLL_S)
    return store


def _store(settings: TrainerSettings) -> TCPStore:
    return TCPStore(
        settings.master_addr,
        settings.master_port,
        is_master=settings.node_rank == 0,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        multi_tenant=True,
    )
