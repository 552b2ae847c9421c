"""The image workers: as many processes as the setting says, each with one job at a time, none of them trusted."""

import asyncio
import queue
from concurrent.futures import ThreadPoolExecutor

from fovea.runtime import tracing
from fovea.wire.errors import Internal, ResourceExhausted
from services.renderer import metrics
from services.renderer.image_header import ImageHeader
from services.renderer.worker_process import ProcessedImage, WorkerDied, WorkerProcess, WorkerSettings
from services.renderer.worker_protocol import Ready

ATTEMPTS = 2


class WorkerPool:
    """Processes images on `worker_count` processes.

    Each worker has a thread here, which waits for its socket and takes the next job without asking the event loop. A
    job whose worker dies is tried once more on a fresh one: the death may be another's doing (the kernel's, for one),
    and an image that kills twice is not tried again.

    Args:
        settings: How a worker runs.
        worker_count: The number of processes.
        max_pending: The most images that may wait or run; more are refused.
    """

    def __init__(self, settings: WorkerSettings, worker_count: int, max_pending: int) -> None:
        self.workers = [WorkerProcess(settings) for _ in range(worker_count)]
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(worker_count, thread_name_prefix="image-worker")
        self._max_pending = max_pending
        self._pending = 0

    async def start(self) -> Ready:
        """Starts all workers; returns when each processed a warm-up image. Raises Unavailable if one does not."""
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

    async def process(self, header: ImageHeader, data: bytes) -> ProcessedImage:
        """Processes one image on the next worker that is free. Errors as in `WorkerProcess.process`.

        Cancelling drops the job if it still waits; one that runs ends by itself, since its worker must be whole again.
        """
        if self._pending >= self._max_pending:
            raise ResourceExhausted(f"{self._pending} images wait for the renderer's workers; try again later")
        self._pending += 1
        try:
            with metrics.IMAGES_PENDING.track_inprogress(), tracing.span("image", format=header.format):
                return await asyncio.wrap_future(self._threads.submit(self._run, header, data))
        finally:
            self._pending -= 1

    async def close(self) -> None:
        """Waits for the jobs that run, then ends all workers."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in self.workers))

    def _run(self, header: ImageHeader, data: bytes) -> ProcessedImage:
        worker = self._idle.get_nowait()  # There are as many as threads.
        try:
            for _ in range(ATTEMPTS):
                try:
                    return worker.process(header, data)
                except WorkerDied as death:
                    last = death
            raise Internal(
                f"an image worker died {ATTEMPTS} times on a {header.format} of {header.width}x{header.height} ({last})"
            )
        finally:
            self._idle.put(worker)
