"""Runs images on a pool of worker processes. A worker has one job at a time and may crash or hang at any time."""

import asyncio
import logging
import queue
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from fovea.runtime import tracing
from fovea.runtime.processes import bare_environment
from fovea.wire.errors import DeadlineExceeded, FoveaError, Internal, ResourceExhausted, Unavailable
from fovea.wire.tensors import FeatureTensors
from fovea_renderer import renderer_metrics
from fovea_renderer.image_header import ImageHeader, InvalidChunk
from fovea_renderer.worker_protocol import Done, Failed, Invalid, Job, Ready, SharedMemory, send

logger = logging.getLogger(__name__)


class WorkerDied(Exception):
    """The error for a worker process that ended during a job."""


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of all workers.

    Attributes:
        model_directory: The directory of the model.
        memory_bytes: The memory limit of one worker; 0 is no limit.
        job_timeout_s: Seconds that one job may take.
        start_timeout_s: Seconds that a worker may take to start.
        module: The module that a worker runs. It uses `worker_protocol` over the descriptors that it inherits.
    """

    model_directory: Path
    memory_bytes: int
    job_timeout_s: float
    start_timeout_s: float
    module: str = "fovea_renderer.image_worker"


@dataclass(frozen=True)
class ProcessedImage:
    """The tensors of one image, their SHA-256, and the seconds that a worker spent on them."""

    tensors: FeatureTensors
    tensors_sha256: str
    seconds: float


class WorkerProcess:
    """One worker process. Only one thread at a time may use it."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._memory: SharedMemory | None = None

    def start(self) -> Ready:
        """Starts the process and waits until it has processed a warm-up image.

        Raises Unavailable if it ends before that or takes too long; the reason is in its standard error.
        """
        ours, theirs = socket.socketpair()
        self._memory = memory = SharedMemory.create()
        with theirs:
            command = [sys.executable, "-m", self._settings.module, "--connection", str(theirs.fileno())]
            command += ["--tensors", str(memory.descriptor), "--model", str(self._settings.model_directory)]
            command += ["--memory-bytes", str(self._settings.memory_bytes)]
            environment = bare_environment("OMP_", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno(), memory.descriptor],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        try:
            if not self._connection.poll(self._settings.start_timeout_s):
                raise Unavailable(f"an image worker was not ready within {self._settings.start_timeout_s:.0f} s")
            ready: Ready = self._connection.recv()
        except (EOFError, ConnectionError):
            raise Unavailable(f"an image worker did not start: exit code {self.stop()}") from None
        except Unavailable:
            self.stop()
            raise
        logger.info("image worker %d is ready", self._process.pid)
        return ready

    def process(self, job: Job) -> ProcessedImage:
        """Processes one image, after starting the process if it is not running.

        Raises:
            InvalidChunk: The image cannot be rendered.
            WorkerDied: The process ended during the job; the next call starts another.
            DeadlineExceeded: The job took too long; the process was killed.
            ResourceExhausted: The image needs more memory than a worker has.
            Internal: The processor failed; the reason is in the log.
            Unavailable: The process could not be started.
        """
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self.start()
        assert self._connection is not None
        assert self._memory is not None
        try:
            return self._exchange(self._connection, self._memory, job)
        except (EOFError, ConnectionError):
            exit_code = self.stop()
            logger.error("an image worker ended with exit code %s during a job", exit_code)
            raise WorkerDied(f"exit code {exit_code}") from None

    def stop(self) -> int | None:
        """Ends the process, by force if it is busy; returns its exit code."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._process is None:
            return None
        process, self._process = self._process, None
        if process.poll() is None:
            try:
                process.wait(0.5)  # an idle worker ends when the socket closes; a dying one needs a moment
            except subprocess.TimeoutExpired:
                process.kill()
        return process.wait()

    def _exchange(self, connection: Connection, memory: SharedMemory, job: Job) -> ProcessedImage:
        send(connection, job)
        if not connection.poll(self._settings.job_timeout_s):
            self.stop()
            raise DeadlineExceeded(f"processing the image took more than {self._settings.job_timeout_s:.0f} s")
        answer = connection.recv()
        if isinstance(answer, Done):
            return ProcessedImage(memory.copy(answer.positions), answer.tensors_sha256, answer.seconds)
        if isinstance(answer, Invalid):
            raise InvalidChunk(answer.cause, answer.message)
        assert isinstance(answer, Failed)
        raise self._failure(answer, job.header)

    def _failure(self, answer: Failed, header: ImageHeader) -> FoveaError:
        logger.error(
            "an image worker failed on a %s of %dx%d: %s", header.format, header.width, header.height, answer.error
        )
        if answer.out_of_memory:
            return ResourceExhausted(
                f"an image of {header.width}x{header.height} needs more memory than an image worker has"
                f" ({self._settings.memory_bytes} bytes, setting worker_memory_bytes)"
            )
        return Internal(f"the image processor failed on a {header.format} of {header.width}x{header.height}")


ATTEMPTS = 2


class WorkerPool:
    """Processes images on `worker_count` processes.

    The service has one thread per process. The thread waits for the process's socket and takes the next job without the
    event loop. If a process dies during a job, the pool tries the job once more on a new process, because the image may
    not be the cause: the kernel may have killed the process. An image that kills two processes is refused.

    Args:
        settings: The settings of the workers.
        worker_count: The number of processes.
        max_pending: The most images that wait or are being processed; further images are refused.
    """

    def __init__(self, settings: WorkerSettings, worker_count: int, max_pending: int) -> None:
        self.workers = [WorkerProcess(settings) for _ in range(worker_count)]
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(worker_count, thread_name_prefix="image-worker")
        self._max_pending = max_pending
        self._pending = 0

    async def start(self) -> Ready:
        """Starts all workers; returns once each has processed a warm-up image. Raises Unavailable if one fails."""
        loop = asyncio.get_running_loop()
        starts = [loop.run_in_executor(self._threads, worker.start) for worker in self.workers]
        greetings = await asyncio.gather(*starts, return_exceptions=True)
        for greeting in greetings:
            if isinstance(greeting, BaseException):
                await self.close()
                raise greeting
        for worker in self.workers:
            self._idle.put(worker)
        ready = greetings[0]
        assert isinstance(ready, Ready)
        return ready

    async def process(self, header: ImageHeader, data: bytes, max_side: int = 0) -> ProcessedImage:
        """Processes one image on the next idle worker.

        An image with a side of more than `max_side` pixels is shrunk first; 0 keeps the size. Cancelling drops a job
        that still waits. A running job continues, because the worker must finish it before it can take another.

        Raises the errors of `WorkerProcess.process`, with Internal instead of WorkerDied. Raises ResourceExhausted if
        `max_pending` images already wait.
        """
        if self._pending >= self._max_pending:
            raise ResourceExhausted(f"{self._pending} images already wait for the renderer's workers; try again later")
        self._pending += 1
        try:
            with renderer_metrics.IMAGES_PENDING.track_inprogress(), tracing.span("image", format=header.format):
                return await asyncio.wrap_future(self._threads.submit(self._run, Job(header, data, max_side)))
        finally:
            self._pending -= 1

    async def close(self) -> None:
        """Waits for running jobs, then ends all workers."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in self.workers))

    def _run(self, job: Job) -> ProcessedImage:
        header, worker = job.header, self._idle.get_nowait()  # never empty: there are as many workers as threads
        try:
            for _ in range(ATTEMPTS):
                try:
                    return worker.process(job)
                except WorkerDied as death:
                    last = death
            raise Internal(
                f"an image worker died {ATTEMPTS} times on a {header.format} of {header.width}x{header.height} ({last})"
            )
        finally:
            self._idle.put(worker)
