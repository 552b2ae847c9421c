"""Which addresses processes listen on, as the kernel tells it."""

from collections.abc import Iterable

import psutil

from fovea.runtime.hosts import is_loopback


def listeners(processes: Iterable[psutil.Process]) -> dict[str, str]:
    """host:port of every listening TCP socket of `processes`, and the command line of a process that has it.

    IPv4 addresses of sockets that speak IPv6 too, as gRPC's, are given as IPv4 addresses.
    """
    return {
        f"{connection.laddr.ip.removeprefix('::ffff:')}:{connection.laddr.port}": " ".join(process.cmdline())
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def unasked(processes: Iterable[psutil.Process], asked: Iterable[str]) -> dict[str, str]:
    """Those of `listeners` that nobody asked for.

    Ranks of a trainer and workers of a sampler exchange tensors over gloo: at loopback they may listen, nowhere else.
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
