"""Measures a bare NCCL broadcast from one GPU to another, the upper bound for the speed of weight pushes."""

import time
from datetime import timedelta

from fovea.runtime.hosts import free_ports

_WARM_UPS = 3


def broadcast_seconds(gpus: list[int], size_bytes: int, repeats: int) -> list[float]:
    """Returns the seconds of each of `repeats` broadcasts of one tensor, measured by the receiver."""
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    answers = context.Queue()
    (port,) = free_ports(1)
    arguments = [(rank, gpu, port, size_bytes, repeats, answers) for rank, gpu in enumerate(gpus)]
    members = [context.Process(target=_member, args=each) for each in arguments]
    for member in members:
        member.start()
    found: list[float] = answers.get(timeout=120)
    for member in members:
        member.join()
    return found


def _member(rank: int, gpu: int, port: int, size_bytes: int, repeats: int, answers) -> None:  # type: ignore[no-untyped-def]
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(gpu)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", address, timedelta(seconds=100), 2, rank)
    data = torch.full((size_bytes,), rank, dtype=torch.uint8, device="cuda")
    found = []
    for _ in range(_WARM_UPS + repeats):
        dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        dist.broadcast(data, 0)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    if rank == 1:
        assert not data.any(), "nothing arrived"
        answers.put(found[_WARM_UPS:])
    dist.destroy_process_group()
