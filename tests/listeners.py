"""The listening addresses of processes, from the kernel."""

from collections.abc import Iterable

import psutil

from fovea.runtime.hosts import is_loopback


def listeners(processes: Iterable[psutil.Process]) -> dict[str, str]:
    """Returns host:port of every listening TCP socket of `processes`, with a command line that owns it.

    IPv4 addresses of IPv6 sockets, such as gRPC's, are returned as IPv4 addresses.
    """
    return {
        f"{connection.laddr.ip.removeprefix('::ffff:')}:{connection.laddr.port}": " ".join(process.cmdline())
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def unasked(processes: Iterable[psutil.Process], asked: Iterable[str]) -> dict[str, str]:
    """Returns the `listeners` that are not expected.

    Ranks of a trainer and workers of a sampler exchange tensors over gloo and may listen at loopback only.
    """
    return {
        address: command
        for address, command in listeners(processes).items()
        if address not in asked and not (is_loopback(address.rpartition(":")[0]) and _exchanges_tensors(command))
    }


def _exchanges_tensors(command: str) -> bool:
    return any(
        name in command
        for name in ("fovea_trainer", "fovea_sampler", "sampler.copies", "multiprocessing.forkserver", "VLLM")
    )
