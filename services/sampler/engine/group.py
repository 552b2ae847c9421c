"""One transfer group as the engine's worker sees it: torch's process group, made privately, never the default one."""

import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from fovea.api.v1 import sampler_pb2

# Its stubs leave out half of what it exports.
dist: Any = torch.distributed


class TransferGroup:
    """A standing group in which rank 0, the trainer, broadcasts bytes.

    Args:
        request: Which group, where it meets, and how long to wait for the others.
        worker_rank: This worker's among those of its engine.
        device: Where this worker's model lives; decides between gloo and NCCL.

    Blocks until all members have met. Raises RuntimeError or DistStoreError if they do not in time.
    """

    def __init__(self, request: sampler_pb2.JoinTransferGroupRequest, worker_rank: int, device: torch.device) -> None:
        self._device = device
        timeout = timedelta(seconds=request.timeout_s)
        self._store = dist.TCPStore(
            request.master_address, request.master_port, request.world_size, False, timeout, wait_for_workers=False
        )
        prefixed = dist.PrefixStore(request.group_id, self._store)
        host = _own_address(request)
        self._group = _open(prefixed, request.rank_offset + worker_rank, request.world_size, timeout, device, host)

    def receive(self, size_bytes: int, deadline: float) -> torch.Tensor:
        """The next broadcast, uint8 [size_bytes] on the group's device. `deadline` is of `time.monotonic`.

        Raises RuntimeError if the sender is gone or the deadline passes; the group is of no use afterwards.
        """
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise RuntimeError("the transfer's time was up before all tensors had come")
        buffer = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=remaining_s)
        work = self._group.broadcast([buffer], options)
        work.wait(timedelta(seconds=remaining_s))
        return buffer

    def close(self) -> None:
        """Gives up whatever is under way and leaves."""
        self._group.abort()


def _own_address(request: sampler_pb2.JoinTransferGroupRequest) -> str:
    """Of this machine's addresses the one that reaches the sender."""
    with socket.create_connection((request.master_address, request.master_port), request.timeout_s) as connection:
        return str(connection.getsockname()[0])


def _open(store: Any, rank: int, world_size: int, timeout: timedelta, device: torch.device, host: str) -> Any:
    if device.type == "cpu":
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # which listens on that one alone
        return dist.ProcessGroupGloo(store, rank, world_size, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # NCCL members meet at the first broadcast, not here.
    return dist.ProcessGroupNCCL(store, rank, world_size, options)
