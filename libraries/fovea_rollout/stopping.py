"""Ends of a program in one line instead of a traceback: after Ctrl-C, and at an error of a command."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fovea.wire.errors import FoveaError


class Stopped(KeyboardInterrupt, SystemExit):
    """The exception after Ctrl-C, with a line that names the step from which the run will resume.

    A program that does not catch it prints the line and exits, as with `sys.exit(line)`.
    """

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.code = line


def run(program: Coroutine[Any, Any, object]) -> None:
    """Runs a program as `asyncio.run` does. Ctrl-C ends it in one line, also outside `train` and `warm_up`.

    Raises:
        Stopped: The user pressed Ctrl-C. It ends a program with its line.
    """
    try:
        asyncio.run(program)
    except Stopped:
        raise
    except KeyboardInterrupt:
        raise Stopped("stopped by Ctrl-C") from None


@contextmanager
def ending_with_a_line(line: Callable[[], str]) -> Iterator[None]:
    """Converts Ctrl-C to Stopped, for code in a task of asyncio too.

    Args:
        line: Returns the line of Stopped.
    """
    pressed = threading.Event()
    try:
        with _noting_ctrl_c(pressed):
            yield
    except KeyboardInterrupt:
        raise Stopped(line()) from None
    except asyncio.CancelledError:
        if not pressed.is_set():  # the program cancelled the task itself
            raise
        raise Stopped(line()) from None


@contextmanager
def exiting_with_a_line() -> Iterator[None]:
    """Ends a command with one line and status 2 at an error of Fovea or of the SDK."""
    try:
        yield
    except FoveaError as error:
        problem: Exception = error
    except Exception as error:
        import tinker  # late, because it takes seconds

        if not isinstance(error, tinker.TinkerError):
            raise
        problem = error
    else:
        return
    print(f"error: {error_words(problem)}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def _noting_ctrl_c(pressed: threading.Event) -> Iterator[None]:
    """Sets `pressed` at Ctrl-C, then does what the program does at Ctrl-C: `asyncio.run` cancels its task."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        pressed.set()
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, before)


def error_words(error: Exception) -> str:
    """Returns an error in one sentence: of a refused request, the server's `detail` without the rest of the answer."""
    body = getattr(error, "body", None)
    detail = body.get("detail") if isinstance(body, dict) else None
    return detail if isinstance(detail, str) else str(error)
