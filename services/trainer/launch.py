"""Starts the ranks of this node with torchrun, and ends with them."""

import math
import os
import signal
import sys
from typing import Any, NoReturn

from services.trainer.settings import TrainerSettings

LEAVE_S = 8.0
"""How long the ranks get to leave together after the last call has ended."""

MARGIN_S = 5.0
"""What a node that was told to stop waits longer than rank 0, which may be on another one."""


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(settings: TrainerSettings) -> int:
    """Runs this command line again as `settings.ranks` ranks on this node; returns the exit status.

    SIGTERM and SIGINT go to the ranks: rank 0, on whatever node, ends what runs, then all leave. The status is 0 on
    nodes that had the signal, and 1 if the ranks ended without one or did not meet: whoever supervises starts the
    trainer anew.
    """
    # Until torchrun takes over. Without a handler, the first process of a container is deaf.
    signal.signal(signal.SIGTERM, _leave)
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    # Micro-batches differ in size: without it, blocks of other sizes lie around unused, 4 GiB of them at the limit.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(settings.drain_s + LEAVE_S + MARGIN_S))
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from services.trainer.rendezvous import NodesMissing, meet

    name = f"trainer: node {settings.node_rank}"
    try:
        if settings.nodes > 1:
            print(f"{name}: meets {settings.nodes - 1} more at {settings.master_addr}", file=sys.stderr, flush=True)
            _store = meet(settings)  # which ends when nobody holds it
        run.main([*_place(settings), *_ranks(settings)])
    except SignalException:
        return 0
    except NodesMissing as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"with status {failure.exitcode}" if failure.exitcode >= 0 else f"by {failure.signal_name()}"
        print(f"{name}: rank {rank} ended {how}; what it logged says why", file=sys.stderr)
        return 1
    return 0


def _place(settings: TrainerSettings) -> list[str]:
    if settings.nodes == 1:
        return ["--standalone"]
    return [
        f"--nnodes={settings.nodes}",
        f"--node-rank={settings.node_rank}",
        f"--master-addr={settings.master_addr}",
        f"--master-port={settings.master_port}",
        "--rdzv-conf=timeout=60",  # all nodes have just met
    ]


def _ranks(settings: TrainerSettings) -> list[str]:
    arguments = [f"--nproc-per-node={settings.ranks}", "--max-restarts=0"]
    return [*arguments, "--module", "services.trainer", *sys.argv[1:]]


def _leave(*_: Any) -> NoReturn:
    sys.exit(0)
