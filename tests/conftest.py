"""What all tests may ask for, which of them run on both databases (those of what the gateway keeps), and their logs."""

import asyncio
import gc
import io
import logging
import os
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from types import ModuleType
from typing import Any, cast

import pytest

from tests.object_storage import new_bucket
from tests.other_logs import OTHER_LOGS
from tests.postgresql import database_url, postgresql
from tests.small_disk import small_disk

__all__ = ["database_url", "new_bucket", "postgresql", "small_disk"]

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


gc.disable()  # a third of the collection of tests went into collections of garbage, of which it makes none
if "sklearn" not in sys.modules:
    # Transformers imports it, for a second, where it finds it. Tests that need it import it when they run.
    sys.modules["sklearn"] = cast(ModuleType, None)


def pytest_collection_finish() -> None:
    """From here on garbage is collected, of what tests make alone, and scikit-learn is there."""
    gc.freeze()
    gc.enable()
    if sys.modules["sklearn"] is None:
        del sys.modules["sklearn"]


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """What a test draws is the same in every run, whichever tests run before it."""
    _seed(request.node.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Generator[None]:
    """What a fixture draws that several tests share does not depend on which of them comes first either."""
    if fixturedef.scope != "function":
        _seed(f"{request.node.nodeid} {fixturedef.argname}")
    return (yield)


def _seed(name: str) -> None:
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):  # most tests have neither numpy nor torch
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        # `torch.manual_seed` writes its caller's stack down for each kind of device that is not there: a millisecond.
        (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(seed)


MUST_RUN = "FOVEA_MUST_RUN"
"""Words, split by commas: a test skipped for a reason with one of them fails the run. CI names what it installed."""


def _skipped(reporter: pytest.TerminalReporter) -> Counter[tuple[str, str]]:
    """Counts the skipped tests by file and reason."""
    return Counter(
        (report.nodeid.partition("::")[0], report.longrepr[2].removeprefix("Skipped: "))
        for report in reporter.stats.get("skipped", [])
    )


def _must_have_run(reason: str) -> bool:
    return any(word in reason for word in os.environ.get(MUST_RUN, "").split(",") if word)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """The last lines name what was skipped, and why."""
    yield
    for (file, reason), count in sorted(_skipped(terminalreporter).items()):
        failed = _must_have_run(reason)
        words = f"skipped: {count} of {file}: {reason}" + (f" (not allowed by {MUST_RUN})" if failed else "")
        terminalreporter.write_line(words, red=failed, yellow=not failed)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run that skipped what must run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(reporter, pytest.TerminalReporter) and any(_must_have_run(why) for _, why in _skipped(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`make test` has two processes. (xdist 3.8 has marks for that, which do nothing under pytest 9.2.)"""
    from tests.lanes import Lanes

    return Lanes(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds what others printed to what is printed of a failure, and to a timeout what the event loop waits for."""
    report = yield
    if report.failed:
        report.sections += [(name, _text(read)) for name, read in item.session.stash.get(OTHER_LOGS, {}).items()]
        if "Timeout" in report.longreprtext:
            report.sections.append(("tasks that have not ended", _pending_tasks()))
    return report


def _pending_tasks() -> str:
    """Where each stands: the stacks of threads, which pytest-timeout prints, show the loop's select alone."""
    text = io.StringIO()
    for found in gc.get_objects():
        if issubclass(type(found), asyncio.Task) and not found.done():  # isinstance asks some objects what warns
            with suppress(TypeError):  # of a frame of compiled code, which has no line
                found.print_stack(file=text)
    return text.getvalue()


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
