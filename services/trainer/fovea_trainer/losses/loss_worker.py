"""`python -m fovea_trainer.losses.loss_worker`: evaluates a rank's traced losses within limits (custom.py).

This process loads torch once and runs no graph. It forks a worker that runs graphs, and a new one after that worker has
ended. Each process ends with its parent, holds no file except its sockets, and has an environment without secrets.
"""

import mmap
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import NoReturn

from fovea.runtime.processes import die_with_parent, importing

with importing():
    import numpy as np
    import torch

    from fovea.api.v1 import trainer_pb2
    from fovea.wire import custom_loss
    from fovea.wire.errors import InvalidInput
    from fovea_trainer.losses import graph_evaluation
    from fovea_trainer.losses.costs import Meter
    from fovea_trainer.losses.frames import (
        HELLO,
        PROGRESS,
        Answer,
        Failure,
        Request,
        read_request,
        reader,
        write_answer,
    )

_MIB = 2**20
_MAX_FILES = 32


def main(control_fd: int, parent: int, memory_mib: int, timeout_s: float) -> None:
    """Forks a worker, one at a time, for each pair of a socket and a progress page that arrives over `control_fd`.

    Args:
        control_fd: Descriptor of the socket to the rank.
        parent: Process id of the rank.
        memory_mib: Memory limit of a worker, beyond its memory at start, in MiB.
        timeout_s: CPU time limit of a request, in seconds.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank finishes its commands and then ends this process
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    with importing():
        _load_lazy_parts()
    control = socket.socket(fileno=control_fd)
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 2)
        if len(fds) < 2:
            return
        zygote = os.getpid()
        if not (pid := os.fork()):
            control.close()
            die_with_parent(zygote)
            _limit(memory_mib)
            progress = mmap.mmap(fds[1], PROGRESS.size)  # mmap duplicates the descriptor
            os.close(fds[1])
            worker = _Worker(socket.socket(fileno=fds[0]), progress, memory_mib, timeout_s)
            worker.serve()
        for fd in fds:
            os.close(fd)
        os.waitpid(pid, 0)


class _Worker:
    """Evaluates requests until it is killed or fails."""

    def __init__(self, link: socket.socket, progress: mmap.mmap, memory_mib: int, timeout_s: float) -> None:
        self._link, self._progress = link, progress
        self._memory_mib, self._timeout_s = memory_mib, timeout_s

    def serve(self) -> NoReturn:
        try:
            self._link.sendall(HELLO.pack(os.getpid()))
            while True:
                request = read_request(reader(self._link))
                self._limit_time()
                for part in write_answer(self._answer(request)):
                    self._link.sendall(part)
        except BaseException:
            os._exit(1)  # the rank sees the closed socket

    def _answer(self, request: Request) -> Answer | Failure:
        position = 0

        def at_node(index: int) -> None:
            PROGRESS.pack_into(self._progress, 0, position, index)

        losses = np.empty(len(request.datums), np.float32)
        metrics = np.empty((len(request.datums), request.metric_count), np.float64)
        gradients = np.empty(request.logprob_count if request.backward else 0, np.float32)
        start = 0
        try:
            graph = _graph(request.graph)
            for position, tensors in enumerate(request.datums):
                found = graph_evaluation.evaluate(graph, list(tensors), request.backward, at_node, self._memory_mib)
                losses[position] = found.loss.to(torch.float32).item()
                metrics[position] = [metric.item() for metric in found.metrics]
                if found.gradient is not None:
                    gradients[start : start + found.gradient.numel()] = found.gradient.flatten().numpy()
                    start += found.gradient.numel()
        except InvalidInput as error:
            return Failure(position, error.message)
        return Answer(losses, metrics, gradients)

    def _limit_time(self) -> None:
        """Limits the CPU time of a request, in case the rank has died. A live rank kills this worker earlier."""
        spent = resource.getrusage(resource.RUSAGE_SELF)
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        allowed = int(spent.ru_utime + spent.ru_stime + self._timeout_s) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (allowed, most))


@lru_cache(maxsize=8)
def _graph(message: bytes) -> custom_loss.Graph:
    return custom_loss.parse(trainer_pb2.CustomLoss.FromString(message))


def _limit(memory_mib: int) -> None:
    """Limits the memory beyond what is in use now, and closes access to files and to the log: no graph needs them."""
    with open("/proc/self/statm") as statm:
        loaded = int(statm.read().split()[0]) * resource.getpagesize()
    most = loaded + memory_mib * _MIB
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for kind, limit in {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NOFILE: _MAX_FILES}.items():
        resource.setrlimit(kind, (limit, limit))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
    os.close(nowhere)


def _load_lazy_parts() -> None:
    """Runs some operations once, so that torch imports their modules in this process and not in each worker."""
    small = torch.ones(2, 2)
    calls: dict[str, tuple[object, ...]] = {
        "torch.arange": (3,), "torch.linspace": (0, 1, 3), "torch.quantile": (small, 0.5), "torch.stack": ([small],),
        "torch.matmul": (small, small), "torch.nn.functional.pad": (small, (1, 1)), "operator.getitem": (small, [0]),
    }  # fmt: skip
    for target, args in calls.items():
        function: Callable[..., object] = graph_evaluation.FUNCTIONS[target]
        graph_evaluation.call(function, target, args, {}, Meter())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
