"""The replaced log capture of pytest catches what the original does."""

import logging

import _pytest.logging
import pytest

from tests import log_capture


@pytest.fixture
def apart() -> logging.Logger:
    logger = logging.getLogger("fovea_test_of_a_logger_that_does_not_propagate")
    logger.propagate = False
    return logger


def test_records_of_loggers_that_do_not_propagate_are_caught(apart: logging.Logger) -> None:
    caught: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = caught.append  # type: ignore[method-assign]
    assert _pytest.logging.catching_logs is log_capture.CatchingLogs
    with log_capture.CatchingLogs(handler, level=logging.INFO):
        apart.warning("apart")
        logging.getLogger("fovea_test_of_a_logger").info("ordinary")
    apart.warning("later")
    assert [record.getMessage() for record in caught] == ["apart", "ordinary"]


def test_the_level_of_the_root_logger_is_restored() -> None:
    before = logging.getLogger().level
    with log_capture.CatchingLogs(logging.NullHandler(), level=logging.DEBUG):
        assert logging.getLogger().level == logging.DEBUG
    assert logging.getLogger().level == before


def test_a_test_sees_its_records(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("fovea_test_of_a_logger").warning("seen")
    assert caplog.messages == ["seen"]
