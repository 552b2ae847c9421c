"""The image workers: as many processes as the setting says, each with one job at a time, none of them trusted."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from fovea.wire.errors import Internal, ResourceExhausted
from services.renderer.image_header import ImageHeader
from services.renderer.worker_process import ProcessedImage, WorkerDied, WorkerProcess, WorkerSettings
from services.renderer.worker_protocol import Ready

ATTEMPTS = 2


class WorkerPool:
    """Processes images on `worker_count` processes.

    Each worker has a thread here that only waits for its socket. A job whose worker dies is tried once more on a fresh
    one: the death may be another's doing (the kernel's, for one), and an image that kills twice is not tried again.

    Args:
        settings: How a worker runs.
        worker_count: The number of processes.
        max_pending: The most images that may wait or run; more are refused.
    """

    def __init__(self, settings: WorkerSettings, worker_count: int, max_pending: int) -> None:
        self.workers = [WorkerProcess(settings) for _ in range(worker_count)]
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self._threads = ThreadPoolExecutor(worker_count, thread_name_prefix="image-worker")
        self._max_pending = max_pending
        self._pending = 0
        self._running: set[asyncio.Task[ProcessedImage]] = set()

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
            self._idle.put_nowait(worker)
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
            worker = await self._idle.get()
            job = asyncio.create_task(self._run(worker, header, data))
            self._running.add(job)
            job.add_done_callback(self._forget)
            return await asyncio.shield(job)
        finally:
            self._pending -= 1

    async def close(self) -> None:
        """Waits for the jobs that run, then ends all workers."""
        if self._running:
            await asyncio.wait(self._running)
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, worker.stop) for worker in self.workers))
        self._threads.shutdown()

    def _forget(self, job: asyncio.Task[ProcessedImage]) -> None:
        self._running.discard(job)
        if not job.cancelled():
            job.exception()  # Whoever waited has it; if all have gone, asyncio need not complain that nobody looked.

    async def _run(self, worker: WorkerProcess, header: ImageHeader, data: bytes) -> ProcessedImage:
        loop = asyncio.get_running_loop()
        try:
            for _ in range(ATTEMPTS):
                try:
                    return await loop.run_in_executor(self._threads, worker.process, header, data)
                except WorkerDied as death:
                    last = death
            raise Internal(
                f"an image worker died {ATTEMPTS} times on a {header.format} of {header.width}x{header.height} ({last})"
            )
        finally:
            self._idle.put_nowait(worker)
