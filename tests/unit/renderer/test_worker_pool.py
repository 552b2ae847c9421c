"""Workers that die, hang or fail only lose their own job."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fovea.wire.errors import DeadlineExceeded, Internal, ResourceExhausted, Unavailable
from fovea_renderer.image_header import ImageHeader, InvalidChunk
from fovea_renderer.worker_pool import WorkerPool, WorkerSettings
from tests.unit.renderer import odd_worker


def header(behaviour: int) -> ImageHeader:
    return ImageHeader("PNG", behaviour, 1)


def settings(directory: Path, module: str = "tests.unit.renderer.odd_worker") -> WorkerSettings:
    return WorkerSettings(directory, memory_bytes=0, job_timeout_s=1.0, start_timeout_s=60, module=module)


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(settings(tmp_path), worker_count=1, max_pending=3)
    await pool.start()
    yield pool
    await pool.close()


@pytest.mark.parametrize(
    ("behaviour", "error", "message"),
    [
        (odd_worker.DIES, Internal, "died 2 times on a PNG of 2x1 .exit code 7"),
        (odd_worker.HANGS, DeadlineExceeded, "more than 1 s"),
        (odd_worker.REFUSES, InvalidChunk, "no picture"),
        (odd_worker.FAILS, Internal, "image processor failed"),
        (odd_worker.RUNS_OUT_OF_MEMORY, ResourceExhausted, "worker_memory_bytes"),
    ],
)
async def test_a_failing_job_is_answered_and_the_next_one_works(
    pool: WorkerPool, behaviour: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await pool.process(header(behaviour), b"poison")
    processed = await pool.process(header(odd_worker.GOOD), b"good")
    assert processed.tensors["pixel_values"].tobytes() == b"good"


async def test_a_job_moves_to_another_worker_if_its_own_dies(pool: WorkerPool) -> None:
    processed = await pool.process(header(odd_worker.DIES_ONCE), b"unlucky")
    assert processed.tensors["pixel_values"].tobytes() == b"unlucky"


async def test_a_worker_has_no_secret_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decodes files of tenants, and a fault in a decoder must not reveal the services' secret."""
    for name in ("FOVEA_SERVICE_SECRET", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a secret of this machine")
    pool = WorkerPool(settings(tmp_path), worker_count=1, max_pending=3)
    await pool.start()
    processed = await pool.process(header(odd_worker.TELLS), b"")
    await pool.close()
    names = processed.tensors["pixel_values"].tobytes().decode().split()
    assert "PATH" in names
    assert not {"FOVEA_SERVICE_SECRET", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} & set(names)


async def test_large_tensors_cross(pool: WorkerPool) -> None:
    data = bytes(range(256)) * (20 * 4096)
    processed = await pool.process(header(odd_worker.GOOD), data)
    assert processed.tensors["pixel_values"].tobytes() == data


async def test_more_images_than_may_wait_are_refused(pool: WorkerPool) -> None:
    jobs = [asyncio.create_task(pool.process(header(odd_worker.GOOD), bytes([index]))) for index in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="3 images already wait"):
        await pool.process(header(odd_worker.GOOD), b"one too many")
    assert [job.tensors["pixel_values"].tobytes() for job in await asyncio.gather(*jobs)] == [b"\0", b"\1", b"\2"]


async def test_a_cancelled_job_leaves_the_worker_whole(pool: WorkerPool) -> None:
    running = asyncio.create_task(pool.process(header(odd_worker.GOOD), b"a" * 10_000_000))
    waiting = asyncio.create_task(pool.process(header(odd_worker.HANGS), b"never starts"))
    await asyncio.sleep(0.001)
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    assert running.cancelled()
    assert waiting.cancelled()
    processed = await pool.process(header(odd_worker.GOOD), b"next")
    assert processed.tensors["pixel_values"].tobytes() == b"next"


async def test_a_worker_that_cannot_start_says_so(tmp_path: Path) -> None:
    pool = WorkerPool(settings(tmp_path, module="tests.unit.renderer.no_such_worker"), worker_count=2, max_pending=1)
    with pytest.raises(Unavailable, match="did not start: exit code 1"):
        await pool.start()
