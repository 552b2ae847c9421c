"""The engine never outlives the service: its processes die with their parent, whatever kills it."""

import ctypes
import os
import signal

PARENT_VARIABLE = "FOVEA_SAMPLER_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends. Linux only; elsewhere no effect.

    A terminal's Ctrl-C reaches the whole process group: it is left to the service, which lets requests in flight end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        return
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.get(PARENT_VARIABLE)
    # The service may have died before prctl took effect; then nobody will send the signal.
    if expected and os.getppid() == 1 and int(expected) != 1:
        os._exit(1)
