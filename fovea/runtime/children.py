"""How processes begin and end: quickly, and with their parent."""

import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NoReturn, cast

from fovea.runtime import tracing

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


@contextmanager
def importing(*without: str) -> Iterator[None]:
    """Imports torch, vLLM and their like in three quarters of the time: what they make stays, and is not looked at.

    By default the collector goes through hundreds of thousands of objects, again and again, and finds nothing to free;
    neither do later collections look at them.

    Args:
        without: Packages that count as not installed meanwhile: those which are imported where they are found, take
            long, and serve nothing here.
    """
    hidden = [name for name in without if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = cast(ModuleType, None)  # as Python's own documentation has it
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
        for name in hidden:
            del sys.modules[name]


_HARMLESS = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ", "HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME")


def bare_environment(*prefixes: str, **more: str) -> dict[str, str]:
    """Returns an environment without secrets, for a process that handles what tenants send.

    Args:
        prefixes: Beginnings of further variables to keep.
        more: Variables to add, or to set otherwise.
    """
    kept = {name: value for name, value in os.environ.items() if name in _HARMLESS or name.startswith(prefixes)}
    return kept | more


def die_with_parent(parent_pid: int | None = None) -> None:
    """Asks the kernel to kill this process once the thread that started it ends. Linux only; elsewhere no effect.

    SIGKILL, since a process that drains may wait forever for somebody who reads its pipe.

    Args:
        parent_pid: Process id of the parent. It may have died before this call, and then no signal comes: this process
            ends here if its parent is another one by now. None leaves that out.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def leave(status: int) -> NoReturn:
    """Ends this process as soon as its last log lines and spans are out.

    Waits for no thread, one of which may be stuck in a collective with a rank that is gone, and does not tear down the
    interpreter: with torch and vLLM in it that alone takes three seconds.
    """
    tracing.shutdown()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
