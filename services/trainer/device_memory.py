"""How much memory a device has left."""

import torch


def free_bytes(device: torch.device) -> int:
    """Of a GPU: what nobody has taken, and what torch has taken here but does not use. Of a CPU nothing is known."""
    if device.type == "cpu":
        raise ValueError("only GPUs have a fixed amount of memory to themselves")
    unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + unused_bytes)
