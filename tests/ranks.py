"""Ranks of a test: processes that begin as copies of one which has imported the trainer, and meet on the loopback."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from torch import multiprocessing as processes

from fovea.runtime.hosts import interface_of

PRELOADED = ["pytest", "tests.rank_imports"]
"""What they have imported when they begin."""


def run_ranks(rank: Callable[..., None], count: int, *arguments: Any) -> None:
    """Calls `rank(number, *arguments)` in `count` processes. Raises with the trace of the first that failed.

    Each would import torch and transformers for six seconds.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    processes.start_processes(_begin, (rank, arguments), count, start_method="forkserver")  # type: ignore[no-untyped-call]


def _begin(number: int, rank: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of("127.0.0.1") or "lo"
    rank(number, *arguments)
