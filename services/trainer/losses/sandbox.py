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

from fovea.wire.errors import Internal
from services.trainer.losses.frames import (
    HELLO,
    PROGRESS,
    Answer,
    Failure,
    FrameError,
    Read,
    Request,
    read_answer,
    write_request,
)

logger = logging.getLogger(__name__)

START_S = 60.0
"""How long torch may take to load. Nobody's graph runs meanwhile."""

_VARIABLES = ("PATH", "LANG", "LD_LIBRARY_PATH", "TZ")
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
        self._worker_fd = -1

    def start(self) -> None:
        """Starts the process unless it runs; does not wait until it is ready."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end_worker()
        if self._process is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid()), str(self.memory_mib), str(self.timeout_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.trainer.losses.worker", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=_environment(),
        )
        theirs.close()

    def evaluate(self, request: Request, seconds: float) -> tuple[Answer | Failure | Stopped, float]:
        """What comes of a request within so many seconds, and how many it took.

        Raises Internal if there is no process to do it; waiting for that one to start is not counted.
        """
        link = self._ready()
        PROGRESS.pack_into(self._progress, 0, 0, 0)
        started = time.monotonic()
        deadline = started + seconds
        try:
            for part in write_request(request):
                link.settimeout(_left(deadline))
                link.sendall(part)
            answer = read_answer(_reader(link, deadline), request)
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
        """Ends the process."""
        self._end_worker()
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ready(self) -> socket.socket:
        """A link to a living worker."""
        if self._link is not None and select.select([self._worker_fd], [], [], 0)[0]:
            logger.warning("the process that evaluates custom losses was ended by somebody else")
            self._end_worker()
        if self._link is None:
            try:
                self._link = self._new_worker()
            except (OSError, EOFError) as error:
                self.close()
                raise Internal(f"the process that evaluates custom losses did not start: {error!r}") from error
        return self._link

    def _new_worker(self) -> socket.socket:
        self.start()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"w"], [theirs.fileno(), self._progress_fd])
        deadline = time.monotonic() + START_S
        (pid,) = HELLO.unpack(_reader(ours, deadline)(HELLO.size))
        self._worker_fd = os.pidfd_open(pid)
        return ours

    def _end_worker(self) -> None:
        if self._link is not None:
            self._link.close()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._worker_fd, signal.SIGKILL)
            os.close(self._worker_fd)
            self._link = None


def _reader(link: socket.socket, deadline: float) -> Read:
    """Reads exactly so many bytes. Raises TimeoutError after the deadline, EOFError if the other side is gone."""

    def read(size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            link.settimeout(_left(deadline))
            if not (count := link.recv_into(view)):
                raise EOFError
            view = view[count:]
        return data

    return read


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _environment() -> dict[str, str]:
    """Neither GPUs nor secrets; one thread."""
    kept = {name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith(_PREFIXES)}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    path = os.pathsep.join(place for place in sys.path if place)
    return {**kept, **threads, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
