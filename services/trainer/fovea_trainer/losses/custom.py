"""Traced losses: functions that a client wrote and traced, evaluated in a sandbox.

A traced loss is evaluated on the CPU in a separate process with limits on time and memory, so a failure affects only
its call. The process returns the gradient of the loss with respect to the log-probabilities, from which the rank
continues the backward pass through the model.
"""

import contextlib
import logging
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.api.v1 import trainer_pb2
from fovea.runtime.processes import bare_environment
from fovea.wire import custom_loss
from fovea.wire.errors import Internal, InvalidInput
from fovea_trainer.losses.frames import (
    HELLO,
    PROGRESS,
    Answer,
    Failure,
    FrameError,
    Request,
    read_answer,
    reader,
    time_left,
    write_request,
)
from fovea_trainer.losses.loss_functions import Loss, LossInput, LossValue, of_datum

logger = logging.getLogger(__name__)

START_S = 60.0
"""Time limit for starting a worker, in seconds. Torch must load first."""

_PREFIXES = ("ATEN_", "DNNL_", "MKL_", "ONEDNN_")
"""Prefixes of environment variables that affect torch's numerics. They must be the same in worker and rank."""


@dataclass(frozen=True)
class Stopped:
    """A worker that gave no answer.

    Position and node come from memory that the worker can write, so they cannot be trusted.

    Args:
        position: Index of the datum in the request.
        node: Index of the node.
        reason: The reason, for the client.
    """

    position: int
    node: int
    reason: str


class Sandbox:
    """The process that evaluates this rank's traced losses. It starts on first use and is replaced after a failure.

    It ends when the thread that started it ends.

    Args:
        timeout_s: Time limit for all losses of one command, in seconds.
        memory_mib: Memory limit of a worker beyond its memory at start, in MiB.
    """

    def __init__(self, timeout_s: float, memory_mib: int) -> None:
        self.timeout_s, self.memory_mib = timeout_s, memory_mib
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket
        self._progress_fd = os.memfd_create("progress", os.MFD_CLOEXEC)
        os.ftruncate(self._progress_fd, PROGRESS.size)
        self._progress = mmap.mmap(self._progress_fd, PROGRESS.size)
        self._link: socket.socket | None = None
        self._deadline = 0.0
        self._worker_fd: int | None = None  # pidfd of the worker; None until it has sent its process id

    def prepare(self, seconds: float = 0.0) -> bool:
        """Starts a worker if none runs, and waits up to `seconds` for it. Returns True if a worker is ready.

        Raises:
            Internal: The worker did not start. The next call tries again.
        """
        if self._worker_fd is not None and (not self._runs() or select.select([self._worker_fd], [], [], 0)[0]):
            logger.warning("the process that evaluates custom losses was ended by another process")
            self._end_worker()
        if self._worker_fd is None:
            try:
                link = self._link or self._begin_worker()
                if select.select([link], [], [], seconds)[0]:
                    self._worker_fd = os.pidfd_open(_pid_of(link))
                elif time.monotonic() >= self._deadline:
                    raise TimeoutError(f"not within {START_S:g} s")
            except (OSError, EOFError) as error:
                self.close()
                raise Internal(f"the process that evaluates custom losses did not start: {error}") from error
        return self._worker_fd is not None

    def evaluate(self, request: Request, seconds: float) -> tuple[Answer | Failure | Stopped, float]:
        """Evaluates a request within a time limit.

        Args:
            request: The request.
            seconds: Time limit in seconds. Waiting for the worker to start does not count.

        Returns:
            The outcome, and the seconds that it took.

        Raises:
            Internal: The worker did not start.
        """
        while not self.prepare(START_S):
            pass
        assert self._link is not None
        link = self._link
        PROGRESS.pack_into(self._progress, 0, 0, 0)
        started = time.monotonic()
        deadline = started + seconds
        try:
            for part in write_request(request):
                link.settimeout(time_left(deadline))
                link.sendall(part)
            answer = read_answer(reader(link, deadline), request)
        except TimeoutError:  # caught before OSError, its base class
            reason = f"was stopped: the losses of a call may take {self.timeout_s:g} s in total on this server"
        except (OSError, EOFError) as error:
            logger.debug("the connection to the worker failed: %r", error)
            reason = f"ended its process: a loss may use {self.memory_mib} MiB of memory on this server"
        except FrameError as error:
            logger.error("the worker for traced losses sent an invalid answer: %s", error)
            reason = "gave no answer"
        else:
            if isinstance(answer, Failure):
                self._end_worker()
            return answer, time.monotonic() - started
        self._end_worker()
        position, node = PROGRESS.unpack_from(self._progress)
        return Stopped(position, node, reason), time.monotonic() - started

    def close(self) -> None:
        """Ends the worker and the process that forks workers. The next `prepare` starts new ones."""
        self._end_worker()
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _begin_worker(self) -> socket.socket:
        """Requests a new worker. Returns the connection over which it sends its process id when it is ready."""
        if not self._runs():
            self._start()
        self._link, theirs = socket.socketpair()
        self._deadline = time.monotonic() + START_S
        with theirs:
            socket.send_fds(self._control, [b"w"], [theirs.fileno(), self._progress_fd])
        return self._link

    def _runs(self) -> bool:
        """Returns True if the process that forks workers is running."""
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        """Starts the process that loads torch and forks workers, without waiting for it."""
        if self._process is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid()), str(self.memory_mib), str(self.timeout_s)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fovea_trainer.losses.loss_worker", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
            )

    def _end_worker(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._worker_fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._worker_fd, signal.SIGKILL)
            os.close(self._worker_fd)
            self._worker_fd = None


def _pid_of(link: socket.socket) -> int:
    """Reads a worker's first message, which is small enough to arrive at once.

    Raises:
        EOFError: The worker has ended.
    """
    if not (hello := link.recv(HELLO.size)):
        raise EOFError("it ended; see the trainer's log for the reason")
    return int(HELLO.unpack(hello)[0])


def _environment() -> dict[str, str]:
    """Returns an environment without GPUs and secrets, with one thread."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return bare_environment(*_PREFIXES, **threads, CUDA_VISIBLE_DEVICES="")


class Custom(Loss):
    """A traced loss: the function's scalar for each datum.

    A datum may have inputs that the graph does not read, because the SDK sends data to a traced loss unchanged.

    Args:
        given: Settings.
        message: The traced loss.
        sandbox: Evaluates the loss; required for computing.
    """

    name = "custom"
    accepts_extra_inputs = True

    def __init__(self, given: Mapping[str, float], message: trainer_pb2.CustomLoss, sandbox: Sandbox | None) -> None:
        super().__init__(given)
        self._message = message
        self._graph = custom_loss.parse(message)
        self._sandbox = sandbox
        self.limit_time(sandbox.timeout_s if sandbox else None)
        first, *others = self._graph.inputs
        self.target_ranks = (first.rank,)
        self.inputs = tuple(LossInput(given.name, rank=given.rank) for given in others)

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        (value,) = self.compute_each([0], [logprobs], [inputs])
        return value

    def compute_each(
        self, indices: Sequence[int], logprobs: Sequence[Tensor], inputs: Sequence[Mapping[str, Tensor]]
    ) -> list[LossValue]:
        backward = logprobs[0].requires_grad
        datums = [[row, *(given[one.name] for one in self.inputs)] for row, given in zip(logprobs, inputs, strict=True)]
        request = Request(self._message.SerializeToString(), datums, len(self._graph.metrics), backward)
        answer = self._evaluate(request, indices)
        device = logprobs[0].device
        losses, metrics, gradients = (
            torch.from_numpy(found).to(device) for found in (answer.losses, answer.metrics, answer.gradients)
        )
        if backward:
            own = torch.split(gradients, [row.numel() for row in logprobs])
            # This term is zero, but its gradient is the one that the worker computed.
            flows = [(one.view(row.shape) * (row - row.detach())).sum() for one, row in zip(own, logprobs, strict=True)]
            losses = losses + torch.stack(flows)
        return [
            LossValue(loss, dict(zip(self._graph.metrics, found, strict=True)))
            for loss, found in zip(losses, metrics, strict=True)
        ]

    def _evaluate(self, request: Request, indices: Sequence[int]) -> Answer:
        assert self._sandbox is not None, "only ranks compute losses"
        assert self.seconds_left is not None
        answer, seconds = self._sandbox.evaluate(request, self.seconds_left)
        self.limit_time(max(self.seconds_left - seconds, 0.0))
        match answer:
            case Failure(position, message):
                raise of_datum(indices[position], InvalidInput(message))
            case Stopped(position, node, reason):
                nodes = self._graph.nodes
                where = f"{nodes[node]}" if 0 <= node < len(nodes) else "its gradient"
                index = indices[position] if 0 <= position < len(indices) else indices[0]
                raise of_datum(index, InvalidInput(custom_loss.described(self._graph, f"{where} {reason}")))
        return answer
