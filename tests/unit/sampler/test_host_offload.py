"""Where snapshots wait. Pinned memory is tried in tests/gpu."""

import logging

import pytest
import torch

from services.sampler.engine.host_offload import SnapshotOffload


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
    assert "--gpu-memory-fraction" in record.message
