"""Logs of resources of the whole session, such as a cluster, which the report of every failure includes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

OTHER_LOGS = pytest.StashKey[dict[str, Callable[[], str]]]()


@contextmanager
def logs_with_failures(session: pytest.Session, name: str, read: Callable[[], str]) -> Iterator[None]:
    """Adds `read()` to the report of tests that fail in this context."""
    logs = session.stash.setdefault(OTHER_LOGS, {})
    logs[name] = read
    try:
        yield
    finally:
        del logs[name]
