"""Starts the ranks with torchrun, and ends with them."""

import os
import sys

from services.trainer.settings import TrainerSettings


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(settings: TrainerSettings) -> int:
    """Runs this command line again as `settings.ranks` ranks on this machine; returns the exit status.

    SIGTERM and SIGINT go to the ranks: rank 0 ends what runs, then all leave. If a rank dies the others are stopped
    and the status is 1: whoever supervises starts the trainer anew.
    """
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    # Micro-batches differ in size: without it, blocks of other sizes lie around unused, 4 GiB of them at the limit.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = [
        "--standalone",
        f"--nproc-per-node={settings.ranks}",
        "--max-restarts=0",
        "--module",
        "services.trainer",
        *sys.argv[1:],
    ]
    try:
        run.main(arguments)
    except SignalException:
        return 0
    except ChildFailedError as error:
        print(f"trainer: a rank ended: {error.get_first_failure()[1].message}", file=sys.stderr)
        return 1
    return 0
