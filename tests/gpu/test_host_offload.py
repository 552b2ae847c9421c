"""Snapshots that do not fit on the GPU wait in pinned memory."""

import pytest
import torch

from fovea_sampler.engine.snapshot_receiver import SnapshotOffload


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_without_room_on_the_gpu_snapshots_wait_in_pinned_memory() -> None:
    device = torch.device("cuda", 0)
    assert SnapshotOffload(device).fits(1 << 20)
    offload = SnapshotOffload(device, working_bytes=1 << 60)
    assert not offload.fits(1)
    buffer = torch.arange(1 << 20, dtype=torch.int32, device=device).view(torch.uint8)
    host = offload.to_host(buffer)
    torch.cuda.synchronize(device)
    assert host.is_pinned()
    assert torch.equal(host, buffer.cpu())
