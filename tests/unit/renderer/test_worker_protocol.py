"""Tensors cross between two processes unchanged."""

import os

import numpy as np
import pytest

from fovea_renderer.worker_protocol import SharedMemory, TensorPosition


def put(memory: SharedMemory, tensors: dict[str, np.ndarray]) -> list[TensorPosition]:
    memory.clear()
    for name, array in tensors.items():
        memory.allocate(name, array.shape, array.dtype)[:] = array
    return list(memory.positions)


def tensors(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    grid = np.array([[1, rows, 2]], np.int64)
    return {"pixel_values": rng.integers(0, 255, (rows, 7), dtype=np.uint8), "image_grid_thw": grid}


def test_tensors_cross_shared_memory_unchanged() -> None:
    ours = SharedMemory.create()
    theirs = SharedMemory(os.dup(ours.descriptor))
    kept = [(rows, ours.copy(put(theirs, tensors(rows)))) for rows in (3, 100_000, 1, 0)]
    for rows, found in kept:  # A later image does not reach the copies of an earlier one.
        assert list(found) == ["pixel_values", "image_grid_thw"]
        for name, array in tensors(rows).items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert np.array_equal(found[name], array)
    theirs.close()
    ours.close()


def test_a_worker_cannot_take_memory_from_under_the_service() -> None:
    memory = SharedMemory.create()
    put(memory, tensors(1000))
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 10)
    memory.close()
