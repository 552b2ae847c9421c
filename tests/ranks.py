"""Ranks of a test: forks of a process that has imported the trainer, which meet on the loopback."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from torch import multiprocessing as processes

from fovea.runtime.hosts import interface_of

PRELOADED = ["pytest", "tests.rank_imports"]
"""The module that ranks have imported at their start."""


def run_ranks(rank: Callable[..., None], count: int, *arguments: Any) -> None:
    """Calls `rank(number, *arguments)` in `count` processes. Raises an error with the traceback of the first failure.

    Forks save six seconds of importing torch and transformers in each process.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    processes.start_processes(_begin, (rank, arguments), count, start_method="forkserver")  # type: ignore[no-untyped-call]


def _begin(number: int, rank: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of("127.0.0.1") or "lo"
    rank(number, *arguments)
