"""Inspects processes from outside."""

import time
from collections.abc import Iterable

import psutil


def is_gone(process: psutil.Process) -> bool:
    """Returns whether a process has ended, including zombies."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def survivors(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Returns the processes that have not ended after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    alive = list(processes)
    while (alive := [process for process in alive if not is_gone(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive
