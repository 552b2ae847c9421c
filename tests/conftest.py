"""What all tests may ask for, which of them run on both databases (those of what the gateway keeps), and their logs."""

import logging
import sys
from collections.abc import Callable, Generator
from typing import Any

import pytest

from tests.object_storage import new_bucket
from tests.other_logs import OTHER_LOGS
from tests.postgresql import database_url, postgresql

__all__ = ["database_url", "new_bucket", "postgresql"]

_CONTRACTS = (
    "checkpoints",
    "custom_losses",
    "futures",
    "keys",
    "large_results",
    "listings",
    "main_path",
    "nasty_messages",
    "order",
    "session_futures",
    "tenants",
)
_ON_BOTH = ("tests.unit.gateway.", *(f"tests.contract.gateway.test_{name}" for name in _CONTRACTS))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test twice if it is one of those and has a database."""
    if "database_url" in metafunc.fixturenames and metafunc.module.__name__.startswith(_ON_BOTH):
        metafunc.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture(autouse=True)
def _seeded_torch() -> None:
    """What a test draws from torch is the same in every run, whichever tests run before. Most tests have no torch."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`make test` has two processes. (xdist 3.8 has marks for that, which do nothing under pytest 9.2.)"""
    from tests.lanes import Lanes

    return Lanes(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds what others printed to what is printed of a failure."""
    report = yield
    if report.failed:
        report.sections += [(name, _text(read)) for name, read in item.session.stash.get(OTHER_LOGS, {}).items()]
    return report


def _text(read: Callable[[], str]) -> str:
    """What others printed; logs that cannot be read must not end the run, and with it the report of every test."""
    try:
        return read()
    except Exception as error:
        return f"cannot be read: {error!r}\n{getattr(error, 'stderr', None) or ''}"


def _is_no_missed_heartbeat(record: logging.LogRecord) -> bool:
    """Clients outlive the Fovea of their test: each beat that then fails is logged and buries a failure's own words."""
    return "Session heartbeat failed" not in record.getMessage()


logging.getLogger("tinker.lib.internal_client_holder").addFilter(_is_no_missed_heartbeat)
