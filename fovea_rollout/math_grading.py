"""Whether two answers are the same as mathematics: fractions, roots, degrees, units and LaTeX spelling do not matter.

math-verify decides (https://github.com/huggingface/Math-Verify), in a process of its own: what a model writes can keep
a computer algebra system busy without end, and neither a thread nor a signal stops it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from fractions import Fraction
from functools import lru_cache

from fovea.wire.errors import FailedPrecondition

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Seconds of processor time that one comparison may take: on a busy machine a right answer stays right."""
LONGEST = 1000
"""Characters of an answer: a longer one is wrong."""
_MEMORY_BYTES = 2 << 30
_KEPT = ("PATH", "PYTHON", "LANG", "LC_", "LD_LIBRARY_PATH", "TMPDIR")
"""Beginnings of the environment's variables that the process is given."""

_SPELLINGS = (
    (re.compile(r"√\s*\(?([\w.]+)\)?"), r"\\sqrt{\1}"),
    (re.compile(r"π"), r"\\pi "),
    (re.compile(r"°|\^\s*\{?\s*\\circ\s*\}?|\\degree"), ""),
    (re.compile(r"\$|\\[,;!]|\\ "), " "),
    (
        # A unit behind a number, a bracket or a blank, and its power.
        re.compile(
            r"(?<=[\d)}\s])\s*(?:\\(?:text|mathrm)\s*\{[^{}]*\}|(?:square |sq\.? ?|cubic )?"
            r"(?:mm|cm|km|m|in|inch(?:es)?|ft|feet|yd|yards?|mi|miles?|met(?:er|re)s?|units?|deg(?:rees?)?))\.?"
            r"\s*(?:\^\s*\{?\s*[23]\s*\}?|[²³])?\s*\.?\s*$"
        ),
        "",
    ),
)


def is_same_answer(truth: str, answer: str) -> bool:
    """Whether an answer is right.

    Args:
        truth: The right one, as a dataset has it: `3 \\sqrt { 2 }`.
        answer: As a model wrote it: an expression, or a line of text that ends with one.

    Raises:
        FailedPrecondition: math-verify is not installed.
    """
    if len(answer) > LONGEST:
        return False
    right, said = _spelt(truth), _spelt(answer)
    if right == said:
        return bool(said)
    try:
        return Fraction(right) == Fraction(said)
    except (ValueError, ZeroDivisionError):
        return bool(said) and _GRADER.compare(right, said)


def _spelt(text: str) -> str:
    for pattern, written in _SPELLINGS:
        text = pattern.sub(written, text)
    return " ".join(text.split())


class _Grader:
    """The process, started when it is first needed and anew after one that hung."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def compare(self, truth: str, answer: str) -> bool:
        """See `is_same_answer`; one that takes too long is wrong."""
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    # What a model writes is evaluated there: no API key may be within its reach.
                    env={name: value for name, value in os.environ.items() if name.startswith(_KEPT)},
                )
            reply = _asked(self._process, json.dumps([truth, answer, TIMEOUT_S]))
            if reply is None:
                logger.info("%r could not be compared with %r in %g s of processor time", answer, truth, TIMEOUT_S)
                self.stop()
                return False
        said = json.loads(reply)
        if isinstance(said, str):
            raise FailedPrecondition(said)
        return bool(said)

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            with self._process:
                self._process.kill()
            self._process = None


def _asked(process: subprocess.Popen[str], question: str) -> str | None:
    """A line for a line; None if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(question + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    return process.stdout.readline() or None


_GRADER = _Grader()
atexit.register(_GRADER.stop)


def _serve() -> None:
    """Answers lines until there are none: true, false, or a text that says why it cannot."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        from math_verify import parse, verify
    except ImportError:
        for _ in sys.stdin:
            print(json.dumps("answers are graded by math-verify: install it"), flush=True)
        return
    logging.disable()  # it warns that without its own timeout nothing ends it

    @lru_cache(maxsize=4096)
    def compare(truth: str, answer: str) -> bool:
        gold = parse(f"${truth}$", parsing_timeout=None)
        # As one expression; if it is none, the last one of the text.
        return any(
            verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None) for text in (f"${answer}$", answer)
        )

    for line in sys.stdin:
        truth, answer, timeout_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, timeout_s)  # whose signal ends the process, whatever it is in
        is_same = compare(truth, answer)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(is_same), flush=True)


if __name__ == "__main__":
    _serve()
