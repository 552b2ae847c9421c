"""Compares two answers as mathematics: the form of fractions, roots, degrees, units and LaTeX does not matter.

math-verify decides (https://github.com/huggingface/Math-Verify), in a process of its own. A model's answer can keep a
computer algebra system busy forever, and neither a thread nor a signal handler can stop it.
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
"""Limit of one comparison in seconds of processor time, so that a right answer stays right on a busy machine."""
LONGEST = 1000
"""The most characters of an answer. A longer answer is wrong."""
_MEMORY_BYTES = 2 << 30
_KEPT = ("PATH", "PYTHON", "LANG", "LC_", "LD_LIBRARY_PATH", "TMPDIR")
"""Prefixes of the environment variables that the process receives."""

_SPELLINGS = (
    (re.compile(r"√\s*\(?([\w.]+)\)?"), r"\\sqrt{\1}"),
    (re.compile(r"π"), r"\\pi "),
    (re.compile(r"°|\^\s*\{?\s*\\circ\s*\}?|\\degree"), ""),
    (re.compile(r"\$|\\[,;!]|\\ "), " "),
    (
        # A unit after a number, a bracket or a blank, with its power.
        re.compile(
            r"(?<=[\d)}\s])\s*(?:\\(?:text|mathrm)\s*\{[^{}]*\}|(?:square |sq\.? ?|cubic )?"
            r"(?:mm|cm|km|m|in|inch(?:es)?|ft|feet|yd|yards?|mi|miles?|met(?:er|re)s?|units?|deg(?:rees?)?))\.?"
            r"\s*(?:\^\s*\{?\s*[23]\s*\}?|[²³])?\s*\.?\s*$"
        ),
        "",
    ),
)


_PLAIN = re.compile(r"[-+]?\d*(\.\d*|/\d+)?([eE][-+]?\d{1,3})?")


def is_same_answer(truth: str, answer: str) -> bool:
    """Returns whether an answer is right.

    Args:
        truth: The right answer in the form of a dataset: `3 \\sqrt { 2 }`.
        answer: The model's answer: an expression, or a line of text that ends with one.

    Raises:
        FailedPrecondition: math-verify is not installed.
    """
    if len(answer) > LONGEST:
        return False
    right, said = _spelt(truth), _spelt(answer)
    if right == said:
        return bool(said)
    numbers = _number(right), _number(said)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return bool(said) and _GRADER.compare(right, said)


def _number(text: str) -> Fraction | None:
    """Returns a plain number. None for any other text, also for an exponent that would take hours to write out."""
    try:
        return Fraction(text) if _PLAIN.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):
        return None


def _spelt(text: str) -> str:
    for pattern, written in _SPELLINGS:
        text = pattern.sub(written, text)
    return " ".join(text.split())


class _Grader:
    """The process that compares answers. It starts at the first comparison, and again after one that hung."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def compare(self, truth: str, answer: str) -> bool:
        """See `is_same_answer`. An answer that takes too long to compare is wrong."""
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    # The process evaluates text of a model, so it must not see API keys.
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
        """Kills the process, if there is one."""
        if self._process is not None:
            with self._process:
                self._process.kill()
            self._process = None


def _asked(process: subprocess.Popen[str], question: str) -> str | None:
    """Sends a line and returns the reply, one line; None if the process has ended."""
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
    """Replies to each line with true, false, or a text that says why answers cannot be compared."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        from math_verify import parse, verify
    except ImportError:
        for _ in sys.stdin:
            print(json.dumps("math-verify is not installed: install it to grade answers"), flush=True)
        return
    logging.disable()  # math-verify warns that its own time limit is off

    @lru_cache(maxsize=4096)
    def compare(truth: str, answer: str) -> bool:
        gold = parse(f"${truth}$", parsing_timeout=None)
        # As one expression, or else the last expression in the text.
        return any(
            verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None) for text in (f"${answer}$", answer)
        )

    for line in sys.stdin:
        truth, answer, timeout_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, timeout_s)  # its signal ends the process, even inside C code
        is_same = compare(truth, answer)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(is_same), flush=True)


if __name__ == "__main__":
    _serve()
