"""Where traced losses run: a process of this rank that may take so much memory and time, and is killed beyond."""

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
from dataclasses import dataclass

from fovea.runtime.children import bare_environment
from fovea.wire.errors import Internal
from fovea_services.trainer.losses.frames import (
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

logger = logging.getLogger(__name__)

START_S = 60.0
"""How long torch may take to load."""

_PREFIXES = ("ATEN_", "DNNL_", "MKL_", "ONEDNN_")
"""What says how torch computes: it must be the same there as here."""


@dataclass(frozen=True)
class Stopped:
    """Why a worker gave no answer, and where it was: datum `place`, node `node`. What it says may not be so."""

    place: int
    node: int
    reason: str


class Sandbox:
    """The process that evaluates traced losses for this rank: started when first used, new after every failure.

    It ends with the thread that started it.

    Args:
        timeout_s: What the losses of one command may take in all.
        memory_mib: What a worker may take beyond what it starts with.
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
        self._worker_fd: int | None = None  # with a link; None until the worker has told its pid

    def prepare(self, seconds: float = 0.0) -> bool:
        """Whether a worker is ready. Starts one unless it runs, and waits for it so many seconds at most.

        Raises Internal if it did not start; the next call tries again.
        """
        if self._worker_fd is not None and (not self._runs() or select.select([self._worker_fd], [], [], 0)[0]):
            logger.warning("the process that evaluates custom losses was ended by somebody else")
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
        """What comes of a request within so many seconds, and how many it took.

        Raises what `prepare` raises; waiting for it is not counted.
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
        except TimeoutError:  # before OSError, of which it is one
            reason = f"was stopped: the losses of a call may take {self.timeout_s:g} s in all on this server"
        except (OSError, EOFError) as error:
            logger.debug("the link to the worker: %r", error)
            reason = f"ended its process: a loss may take {self.memory_mib} MiB of memory on this server"
        except FrameError as error:
            logger.error("the worker of traced losses answered with %s", error)
            reason = "gave no answer"
        else:
            if isinstance(answer, Failure):
                self._end_worker()
            return answer, time.monotonic() - started
        self._end_worker()
        place, node = PROGRESS.unpack_from(self._progress)
        return Stopped(place, node, reason), time.monotonic() - started

    def close(self) -> None:
        """Ends the worker and the process that forks it; the next `prepare` starts new ones."""
        self._end_worker()
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _begin_worker(self) -> socket.socket:
        """Asks for a worker; returns the link to it, over which it tells its pid when it is ready."""
        if not self._runs():
            self._start()
        self._link, theirs = socket.socketpair()
        self._deadline = time.monotonic() + START_S
        with theirs:
            socket.send_fds(self._control, [b"w"], [theirs.fileno(), self._progress_fd])
        return self._link

    def _runs(self) -> bool:
        """Whether there is a process that forks workers; they end with it, if not at once."""
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        """Starts the process that loads torch and forks workers; does not wait for it."""
        if self._process is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid()), str(self.memory_mib), str(self.timeout_s)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fovea_services.trainer.losses.loss_worker", *arguments],
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
    """What a worker says first: few bytes, which come at once. Raises EOFError if there is none."""
    if not (hello := link.recv(HELLO.size)):
        raise EOFError("it ended, the trainer's log says why")
    return int(HELLO.unpack(hello)[0])


def _environment() -> dict[str, str]:
    """Neither GPUs nor secrets; one thread."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    path = os.pathsep.join(place for place in sys.path if place)
    return bare_environment(*_PREFIXES, **threads, PYTHONPATH=path, CUDA_VISIBLE_DEVICES="")
