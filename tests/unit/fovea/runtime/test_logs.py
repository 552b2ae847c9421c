"""Client input cannot forge log lines."""

import logging
import sys

import pytest

from fovea.runtime.processes import configure_logging


@pytest.fixture
def root() -> object:
    """The root logger, restored afterwards."""
    logger = logging.getLogger()
    before, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:], logger.level = before, level


def test_a_message_is_one_line_and_holds_no_control_character(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("test")
    forged = "\r\n12:00:00.000 test     INFO    root: forged\x1b[2J\x9b\u2028\u202e\ud800\0"
    try:
        raise ValueError(forged)
    except ValueError:
        root.handlers[0].stream = sys.stderr  # type: ignore[attr-defined]
        root.exception("no such name: %s", forged)
    lines = capsys.readouterr().err.splitlines()
    assert r"\r\n12:00:00.000 test     INFO    root: forged\x1b[2J\x9b\u2028\u202e\ud800\x00" in lines[0]
    assert all(line.startswith("  ") for line in lines[1:])
    assert len(lines) > 3, "the traceback must be readable"
