"""Readable logs: one line per event, time, service, level, logger, message; within a trace its id too."""

import logging
import os
import sys
from typing import Any

from fovea.runtime import tracing

# Control characters of terminals, what readers of lines end them at, what turns text around, and halves of pairs.
_UNPRINTABLE = (*range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {code: repr(chr(code))[1:-1] for code in (*_UNPRINTABLE, *range(0xD800, 0xE000))}


def configure(service: str, level: str = "INFO") -> None:
    """Sends all logging of this process to standard error, each line marked with the service's name."""
    handler = logging.StreamHandler(sys.stderr)
    # `fovea up` puts the name before every line itself.
    name = "" if os.environ.get("FOVEA_SUPERVISED") else f"{service:<8} "
    handler.setFormatter(
        _OneLine(f"%(asctime)s.%(msecs)03d {name}%(levelname)-7s %(name)s:%(trace)s %(message)s", "%H:%M:%S")
    )
    handler.addFilter(_note_trace)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for chatty in ("httpx", "urllib3", "asyncio", "alembic", "uvicorn.error"):
        logging.getLogger(chatty).setLevel("WARNING")


class _OneLine(logging.Formatter):
    """A message is one line whatever clients put into it, and no line of a traceback looks like a message."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging names it
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {line.translate(_ESCAPES)}" for line in lines)


def _note_trace(record: logging.LogRecord) -> bool:
    """Gives a record the field `trace`; lets it through."""
    trace_id = tracing.trace_id()
    record.trace = f" trace={trace_id}" if trace_id else ""
    return True
