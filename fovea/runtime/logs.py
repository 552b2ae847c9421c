"""Readable logs: one line an event, time, service, level, logger, message; within a trace its id too."""

import logging
import os
import sys

from fovea.runtime import tracing


def configure(service: str, level: str = "INFO") -> None:
    """Sends all logging of this process to standard error, each line marked with the service's name."""
    handler = logging.StreamHandler(sys.stderr)
    # `fovea up` puts the name before every line itself.
    name = "" if os.environ.get("FOVEA_SUPERVISED") else f"{service:<8} "
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d {name}%(levelname)-7s %(name)s:%(trace)s %(message)s", "%H:%M:%S")
    )
    handler.addFilter(_note_trace)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for chatty in ("httpx", "urllib3", "asyncio", "aiosqlite"):
        logging.getLogger(chatty).setLevel("WARNING")


def _note_trace(record: logging.LogRecord) -> bool:
    """Gives a record the field `trace`; lets it through."""
    trace_id = tracing.trace_id()
    record.trace = f" trace={trace_id}" if trace_id else ""
    return True
