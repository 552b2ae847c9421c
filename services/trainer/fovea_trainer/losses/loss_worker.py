"""`python -m fovea_trainer.losses.loss_worker`: evaluates a rank's traced losses within limits (custom.py).

This process loads torch once and runs no graph. It forks a worker that runs graphs, and a new one after that worker has
ended. Each process ends with its parent, holds no file except its sockets, and has an environment without secrets.
The worker evaluates a graph datum by datum. A client's text serves only as a key to the functions that it may call.
"""

import math
import mmap
import operator
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from types import EllipsisType
from typing import Any, NoReturn

from fovea.runtime.processes import die_with_parent, importing

with importing():
    import numpy as np
    import torch
    from torch import Tensor

    from fovea.api.v1 import trainer_pb2
    from fovea.wire import custom_loss
    from fovea.wire.custom_loss import Argument, Constant, Graph, Node, Ref
    from fovea.wire.errors import InvalidInput
    from fovea_trainer.losses import costs
    from fovea_trainer.losses.costs import Meter, RefusedError, Resolved
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
                found = evaluate(graph, list(tensors), request.backward, at_node, self._memory_mib)
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
def _graph(message: bytes) -> Graph:
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
        function: Callable[..., object] = FUNCTIONS[target]
        call(function, target, args, {}, Meter())


_MAX_INTEGER = 2**63 - 1
_ROOTS: dict[str, Any] = {"torch": torch, "operator": operator, "math": math}
_CONSTANTS: dict[tuple[str, str], Any] = {
    (kind, text): torch.device(text) if kind == "device" else getattr(torch, text)
    for kind, texts in custom_loss.CONSTANTS.items()
    for text in texts
}


def _getattr(owner: Resolved, attribute: str) -> Resolved:
    if isinstance(owner, Tensor) and attribute in ("values", "indices"):
        raise RefusedError(f"a tensor has no {attribute} here")
    return getattr(owner, attribute)


def _named(target: str) -> Callable[..., Resolved]:
    root, *path = target.split(".")
    found: Callable[..., Resolved] = reduce(getattr, path, _ROOTS[root])
    return found


# The callables for the names in client/fovea/wire/custom_loss.py, built once.
FUNCTIONS: dict[str, Callable[..., Resolved]] = {
    **{target: _named(target) for target in custom_loss.FUNCTIONS - {custom_loss.GETATTR}},
    custom_loss.GETATTR: _getattr,
}
METHODS: dict[str, Callable[..., Resolved]] = {name: getattr(Tensor, name) for name in custom_loss.METHODS}


@dataclass(frozen=True)
class Evaluated:
    """The result of one datum.

    Args:
        loss: Finite floating-point scalar.
        metrics: float64 scalars, in the graph's order.
        gradient: Gradient of the loss with respect to the log-probabilities, in their shape and finite; None if not
            requested.
    """

    loss: Tensor
    metrics: list[Tensor]
    gradient: Tensor | None


def evaluate(
    graph: Graph, tensors: list[Tensor], backward: bool, at_node: Callable[[int], None], memory_mib: int
) -> Evaluated:
    """Evaluates a graph.

    Args:
        graph: The graph.
        tensors: The graph's inputs in order: float32 log-probabilities first, on the CPU.
        backward: True to compute the gradient.
        at_node: Called with the index of each node before it runs, and with the number of nodes before the gradient.
        memory_mib: The memory limit of this process, for error messages.

    Raises:
        InvalidInput: A node, the loss, a metric or the gradient failed. The error says which.
    """
    leaf = tensors[0].detach().requires_grad_(backward)
    names = [given.name for given in graph.inputs]
    run = _Run(graph, dict(zip(names, [leaf, *tensors[1:]], strict=True)), at_node, memory_mib)
    loss = run.loss()
    metrics = [run.metric(key) for key in graph.metrics]
    at_node(len(graph.nodes))
    return Evaluated(loss.detach(), metrics, run.gradient(loss, leaf) if backward else None)


class _Run:
    """One evaluation. Every failure becomes an InvalidInput that names the node."""

    def __init__(
        self, graph: Graph, inputs: Mapping[str, Tensor], at_node: Callable[[int], None], memory_mib: int
    ) -> None:
        self._graph = graph
        self._memory_mib = memory_mib
        self._values: dict[str, Any] = {}
        self._nodes = {node.name: node for node in graph.nodes}
        self._meter = Meter()
        for index, node in enumerate(graph.nodes):
            at_node(index)
            self._values[node.name] = inputs[node.target] if node.op == "placeholder" else self._execute(node)

    def loss(self) -> Tensor:
        """Returns the loss: a finite scalar with a floating dtype."""
        node = self._nodes[self._graph.loss.node]
        value = self._values[node.name]
        if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
            what = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            self._refuse(f"{node} is returned as the loss and is {what}; it must be a floating scalar tensor")
        if not torch.isfinite(value):
            self._refuse(f"the loss is {value.item()}; {self._first_not_finite()} is the first that is not finite")
        return value

    def metric(self, key: str) -> Tensor:
        """Returns a metric as a float64 scalar."""
        node = self._nodes[self._graph.metrics[key].node]
        value = self._values[node.name]
        if isinstance(value, bool | int | float):
            return torch.tensor(float(value), dtype=torch.float64)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
            self._refuse(f"{node} is returned as metric {key} and is {what}; it must be a scalar tensor")
        return value.detach().reshape(()).double()

    def gradient(self, loss: Tensor, leaf: Tensor) -> Tensor:
        """Returns the gradient of the loss with respect to the log-probabilities. It is finite."""
        if not loss.requires_grad:
            self._refuse("the loss does not depend on logprobs, so it has no gradient; detach() cuts it off too")
        try:
            (found,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        except (RuntimeError, MemoryError) as error:
            self._refuse(f"its gradient cannot be computed: {self._first_line(error)}")
        if found is None:
            self._refuse("the loss does not depend on logprobs, so it has no gradient; detach() cuts it off too")
        if not torch.isfinite(found).all():
            position = torch.nonzero(~torch.isfinite(found))[0].tolist()
            self._refuse(
                f"its gradient at logprobs{position} is {found[tuple(position)].item()}; the loss is {loss.item()}"
            )
        return found

    def _execute(self, node: Node) -> Any:
        args = tuple(self._resolve(argument) for argument in node.args)
        kwargs = {key: self._resolve(argument) for key, argument in node.kwargs.items()}
        try:
            if node.op == "call_function":
                return call(FUNCTIONS[node.target], node.target, args, kwargs, self._meter)
            if not args or not isinstance(args[0], Tensor):
                raise RefusedError("must be called on a tensor")
            return call(METHODS[node.target], node.target, args, kwargs, self._meter)
        except Exception as error:  # any exception of a client's function is reported to that client
            self._refuse(f"{node} failed: {self._first_line(error)}")

    def _resolve(self, argument: Argument) -> Any:
        match argument:
            case Ref(name):
                return self._values[name]
            case Constant(kind, text):
                return _CONSTANTS[kind, text]
            case list():
                return [self._resolve(item) for item in argument]
            case tuple():
                return tuple(self._resolve(item) for item in argument)
            case dict():
                return {key: self._resolve(item) for key, item in argument.items()}
            case slice():
                return slice(*(self._resolve(item) for item in (argument.start, argument.stop, argument.step)))
        return argument

    def _first_not_finite(self) -> str:
        for node in self._graph.nodes:
            value = self._values[node.name]
            if isinstance(value, Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
                return str(node)
        return "its sum"

    def _refuse(self, problem: str) -> NoReturn:
        raise InvalidInput(custom_loss.described(self._graph, problem))

    def _first_line(self, error: Exception) -> str:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return f"it takes more than {self._memory_mib} MiB, which is the limit for a loss on this server"
        return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def call(
    function: Callable[..., Resolved], target: str, args: tuple[Any, ...], kwargs: dict[str, Any], meter: Meter
) -> Resolved:
    """Calls a function if arguments, work and result are within the limits.

    Raises:
        RefusedError: A limit is exceeded. Exceptions of the callable are passed on.
    """
    if target.startswith("math.") and any(isinstance(leaf, Tensor) for leaf in costs.leaves(args)):
        raise RefusedError(f"accepts numbers, not tensors: use torch.{target.removeprefix('math.')}")
    if target.startswith("operator.") and target != "operator.getitem":
        _check_operands(target, args)
    again = costs.spend_before(meter, function, target.rpartition(".")[2], args, kwargs)
    result = function(*args, **kwargs)
    _check_kinds(result)
    costs.spend_after(meter, result, again)
    return result


def _check_operands(target: str, args: tuple[Any, ...]) -> None:
    """Restricts Python's own arithmetic: without limits, it multiplies lists, and its integers grow."""
    for leaf in args:
        if not isinstance(leaf, Tensor | bool | int | float | torch.dtype | torch.device):
            raise RefusedError(f"accepts tensors and numbers, not {type(leaf).__name__}")
    if target == "operator.pow" and all(isinstance(leaf, int) for leaf in args):
        base, exponent = args
        if base.bit_length() * abs(exponent) > 63:
            raise RefusedError(f"returns an integer of more than 64 bits: {base} ** {exponent}")


def _check_kinds(value: Resolved) -> None:
    """Checks the type of each value of a result. Nested lists are refused: they could double in size at each step."""
    for leaf in value if isinstance(value, list | tuple) else (value,):
        match leaf:
            case Tensor() | bool() | float() | None | str() | EllipsisType():
                pass
            case int() if abs(leaf) <= _MAX_INTEGER:
                pass
            case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
                pass
            case _:
                raise RefusedError(f"returns a value of type {type(leaf).__name__}, which is not allowed")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
