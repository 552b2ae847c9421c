"""A cheap version of pytest's log capture, which cost more than most unit tests.

Six times per test, pytest looks at all loggers for those that do not propagate, and attaches a handler to each. With
vLLM imported there are thousands of loggers, and 80 of torch's artifact loggers do not propagate: 9 ms per test.
"""

import logging
from typing import Any

import _pytest.logging

_ARTIFACTS = "torch."
"""Torch's artifact loggers are off unless TORCH_LOGS names them, and then have a handler of their own."""
_original: Any = _pytest.logging.catching_logs
_apart: tuple[int, list[logging.Logger]] = (0, [])
"""The number of loggers at the last search, and those found that do not propagate."""


def _loggers_apart() -> list[logging.Logger]:
    """Returns the loggers that do not propagate to the root, searching again only if there are new loggers."""
    global _apart
    loggers = logging.getLogger().manager.loggerDict
    if _apart[0] != len(loggers):
        found = [one for one in loggers.values() if isinstance(one, logging.Logger) and not one.propagate]
        _apart = len(loggers), [one for one in found if not one.name.startswith(_ARTIFACTS)]
    return _apart[1]


class CatchingLogs(_original):  # type: ignore[misc] # pytest's class is private
    """Attaches a handler to the root logger and to those that do not propagate to it."""

    __slots__ = ()

    def __enter__(self) -> Any:
        self.attached_loggers = [logging.getLogger(), *_loggers_apart()]
        for logger in self.attached_loggers:
            logger.addHandler(self.handler)
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = self.attached_loggers[0].level
            self.attached_loggers[0].setLevel(min(self.orig_level, self.level))
        return self.handler


def install() -> None:
    """Replaces pytest's class."""
    _pytest.logging.catching_logs = CatchingLogs  # type: ignore[misc]
