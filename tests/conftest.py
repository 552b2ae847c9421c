"""Fixtures and hooks of all tests: database parametrisation, seeds, skip reports and logs of child processes."""

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

import fovea.cli  # noqa: F401 - before gRPC, as in `fovea up`: tests start services
from tests import log_capture
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
    """Parametrises each test that stores gateway state with both databases."""
    if "database_url" in metafunc.fixturenames and metafunc.module.__name__.startswith(_ON_BOTH):
        metafunc.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)


log_capture.install()
gc.disable()  # garbage collections took a third of the collection time and freed nothing
_HIDDEN = [name for name in ("scipy", "sklearn") if name not in sys.modules]
"""Packages that transformers imports if they are installed: 2.5 s. Tests that need one import it at run time."""
for _name in _HIDDEN:
    sys.modules[_name] = cast(ModuleType, None)


def pytest_collection_finish() -> None:
    """Restores garbage collection, limited to objects that tests create, and makes hidden packages importable again."""
    gc.freeze()
    gc.enable()
    for name in _HIDDEN:
        if sys.modules[name] is None:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Seeds the random generators per test, so that results do not depend on which tests ran before."""
    _seed(request.node.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Generator[None]:
    """Seeds the random generators per shared fixture: its values must not depend on the test that uses it first."""
    if fixturedef.scope != "function":
        _seed(f"{request.node.nodeid} {fixturedef.argname}")
    return (yield)


def _seed(name: str) -> None:
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):  # most tests import neither numpy nor torch
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        # `torch.manual_seed` formats its caller's stack for each missing device type, which takes a millisecond.
        (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(seed)


MUST_RUN = "FOVEA_MUST_RUN"
"""Comma-separated words. A test skipped for a reason that contains one of them fails the run. CI lists the tools that
it installed.
"""


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
    """Prints the skipped tests with their reasons at the end of the run."""
    yield
    for (file, reason), count in sorted(_skipped(terminalreporter).items()):
        failed = _must_have_run(reason)
        words = f"skipped: {count} of {file}: {reason}" + (f" (not allowed by {MUST_RUN})" if failed else "")
        terminalreporter.write_line(words, red=failed, yellow=not failed)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run if a test was skipped that must run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(reporter, pytest.TerminalReporter) and any(_must_have_run(why) for _, why in _skipped(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Chooses the scheduler for the two processes of `make test`. xdist 3.8 has marks for this, which have no effect
    under pytest 9.2.
    """
    from tests.lanes import Lanes

    return Lanes(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the output of child processes to the report of a failure, and the pending tasks of the event loop to a
    timeout.
    """
    report = yield
    if report.failed:
        report.sections += [(name, _text(read)) for name, read in item.session.stash.get(OTHER_LOGS, {}).items()]
        if "Timeout" in report.longreprtext:
            report.sections.append(("tasks that have not ended", _pending_tasks()))
    return report


def _pending_tasks() -> str:
    """Returns the stack of each pending task. The thread stacks of pytest-timeout only show the loop's select."""
    text = io.StringIO()
    for found in gc.get_objects():
        if issubclass(type(found), asyncio.Task) and not found.done():  # isinstance triggers warnings on some objects
            with suppress(TypeError):  # a frame of compiled code has no line
                found.print_stack(file=text)
    return text.getvalue()


def _text(read: Callable[[], str]) -> str:
    """Returns the output of a child process, or the error if its log cannot be read: an exception here would end the
    run without any report.
    """
    try:
        return read()
    except Exception as error:
        return f"cannot be read: {error!r}\n{getattr(error, 'stderr', None) or ''}"


def _is_no_missed_heartbeat(record: logging.LogRecord) -> bool:
    """Drops log records of missed heartbeats. Clients outlive the Fovea of their test, and these records would bury the
    failure message.
    """
    return "Session heartbeat failed" not in record.getMessage()


logging.getLogger("tinker.lib.internal_client_holder").addFilter(_is_no_missed_heartbeat)
