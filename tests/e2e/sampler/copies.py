"""Samplers forked from a process that has imported vLLM, which takes ten seconds of processor time.

Use them in tests of a sampler's results. Other folders start samplers with `fovea up`, without a fork. `python -m
tests.e2e.sampler.copies FD OPTIONS` forks a sampler for each request on the socket FD and reports when it ends. It has
no threads, because vLLM forks its engine from the sampler.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
_MOST_BYTES = 2**20
_LOOK_S = 0.05


@dataclass
class Copy:
    """One sampler, with the methods of `subprocess.Popen` that tests use."""

    pid: int
    returncode: int | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def end(self, status: int) -> None:
        """Records the exit status."""
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()

    def poll(self) -> int | None:
        """Returns the exit status, or None while the sampler runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; returns the exit status."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"sampler {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the sampler has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL, unless the sampler has ended."""
        self.send_signal(signal.SIGKILL)


class Copies:
    """The process that forks samplers. It imports vLLM with the settings of the first sampler."""

    def __init__(self, options: list[str], environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.e2e.sampler.copies", str(theirs.fileno()), *options]
        path = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            command, env=environment | {"PYTHONPATH": path}, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._copies: dict[int, Copy] = {}
        self._started: list[Copy] = []
        self._is_over = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="samplers", daemon=True)
        self._reader.start()

    def start(self, options: list[str], environment: dict[str, str], errors: int) -> Copy:
        """Forks a sampler.

        Args:
            errors: The file descriptor for its standard error.
        """
        request = json.dumps([options, environment]).encode()
        assert len(request) < _MOST_BYTES
        with self._changed:
            socket.send_fds(self._socket, [request], [errors])
            assert self._changed.wait_for(lambda: self._started or self._is_over, 300)
            assert self._started, "the process that forks samplers has ended"
            return self._started.pop()

    def close(self) -> None:
        """Ends the process; its samplers end with it."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait(60)
        self._reader.join(60)
        self._socket.close()

    def _read(self) -> None:
        with suppress(ConnectionResetError):
            while message := self._socket.recv(_MOST_BYTES):
                pid, status = json.loads(message)
                with self._changed:
                    if status is None:
                        self._copies[pid] = Copy(pid)
                        self._started.append(self._copies[pid])
                    else:
                        self._copies.pop(pid).end(status)
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            for copy in self._copies.values():  # the kernel has killed them with their parent
                copy.end(signal.SIGKILL)
            self._changed.notify_all()


def _serve(own: socket.socket) -> None:
    """Forks samplers until the other end of the socket is closed."""
    while True:
        if select.select([own], [], [], _LOOK_S)[0]:
            request, fds, _, _ = socket.recv_fds(own, _MOST_BYTES, 1)
            if not request:
                return
            options, environment = json.loads(request)
            pid = os.fork()
            if pid == 0:
                own.close()
                _be_sampler(options, environment, fds[0])
            os.close(fds[0])
            own.send(json.dumps([pid, None]).encode())
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            continue
        if pid:
            own.send(json.dumps([pid, status]).encode())


def _be_sampler(options: list[str], environment: dict[str, str], errors: int) -> None:
    """Runs `python -m fovea_sampler` in a forked process."""
    status = 1
    try:
        from fovea.runtime.processes import die_with_parent
        from fovea_sampler.__main__ import main

        die_with_parent()
        os.dup2(errors, 2)
        os.close(errors)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["fovea_sampler", *options]
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _import(options: list[str]) -> None:
    """Imports what a sampler imports, in the same environment and order."""
    from fovea.runtime.processes import UNUSED, importing
    from fovea_sampler.engine import vllm_launch
    from fovea_sampler.settings import SamplerSettings

    sys.argv = ["fovea_sampler", *options]
    vllm_launch.prepare_environment(SamplerSettings.from_command_line("fovea_sampler"))
    with importing(*UNUSED):
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: F401

        from fovea_sampler import vllm_patches

        vllm_patches.before_model()
        import fovea_sampler.engine.vllm_engine
        import fovea_sampler.sampler_app  # noqa: F401


_running: list[Copies] = []


def copied(options: list[str], environment: dict[str, str], errors: int) -> Copy:
    """Starts a sampler as a copy; see `Copies.start`."""
    if not _running:
        _running.append(Copies(options, environment))
    return _running[0].start(options, environment, errors)


def close_copies() -> None:
    """Ends the process that forks samplers, if there is one."""
    while _running:
        _running.pop().close()


if __name__ == "__main__":
    ours = socket.socket(fileno=int(sys.argv[1]))
    _import(sys.argv[2:])
    _serve(ours)
