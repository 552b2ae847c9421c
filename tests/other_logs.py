"""Logs of what serves a whole session, such as a cluster: the report of every failure then ends with them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

OTHER_LOGS = pytest.StashKey[dict[str, Callable[[], str]]]()


@contextmanager
def logs_with_failures(session: pytest.Session, name: str, read: Callable[[], str]) -> Iterator[None]:
    """While it lasts, `read()` is part of what is printed of tests that fail."""
    logs = session.stash.setdefault(OTHER_LOGS, {})
    logs[name] = read
    try:
        yield
    finally:
        del logs[name]
