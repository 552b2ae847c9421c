"""The choice between device and host for snapshots. tests/gpu tests pinned memory."""

import logging

import pytest
import torch

from fovea_sampler.engine.engine_arguments import room_for_pushes
from fovea_sampler.engine.snapshot_receiver import SnapshotOffload


def test_on_cpu_everything_stays_where_it_arrived() -> None:
    assert SnapshotOffload(torch.device("cpu")).fits(1 << 60)


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
def test_memory_that_cannot_be_pinned_costs_a_warning_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    offload = SnapshotOffload(torch.device("cuda"))
    buffer = torch.arange(100, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(offload.to_host(buffer), buffer)
        assert torch.equal(offload.to_host(buffer), buffer)
    (record,) = caplog.records
    assert "cannot be pinned" in record.message
    assert "--full-push-room" in record.message


GIB = 2**30


def _shapes(weights_gib: float) -> dict[str, tuple[int, ...]]:
    """Returns shapes of 57 equal layers of two tensors each, for elements of two bytes."""
    size = int(weights_gib * GIB / 57 / 4)
    return {f"model.layers.{layer}.{name}": (size, 1) for layer in range(57) for name in ("up", "down")}


@pytest.mark.parametrize(
    ("weights_gib", "engine_gib", "tensor_parallel", "room_gib"),
    [
        (8.3, 126, 1, 10.3),  # 4B on an H200, at the default share
        (15.3, 71, 1, 17.3),  # 8B on an H100
        (57, 126, 1, 0),  # 30B: far less is left
        (57, 126, 2, 31.5),  # each GPU receives its half, and loads a layer in full shape
        (57, 100, 2, 0),
    ],
)
def test_the_cache_leaves_room_where_that_is_a_small_part(
    weights_gib: float, engine_gib: float, tensor_parallel: int, room_gib: float
) -> None:
    sizes = (_shapes(weights_gib), 2, int(engine_gib * GIB), tensor_parallel)
    assert room_for_pushes("auto", *sizes) == pytest.approx(room_gib * GIB)
    assert room_for_pushes("never", *sizes) == 0


def test_room_may_be_asked_for_up_to_the_whole_cache() -> None:
    assert room_for_pushes("always", _shapes(57), 2, 126 * GIB, 1) == 59 * GIB
    with pytest.raises(
        ValueError, match=r"--full-push-room always needs 59.0 GiB of each GPU, .* has 15.0 GiB: use auto"
    ):
        room_for_pushes("always", _shapes(57), 2, 72 * GIB, 1)
