"""Log format: one line per event with time, service, level, logger and message, and the trace id if there is one."""

import logging
import os
import sys
from typing import Any

from fovea.runtime import tracing

# Terminal control characters, line separators, characters that reverse text, and lone surrogates.
_UNPRINTABLE = (*range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {code: repr(chr(code))[1:-1] for code in (*_UNPRINTABLE, *range(0xD800, 0xE000))}


def configure(service: str, level: str = "INFO") -> None:
    """Sends all logs of this process to standard error. Each line contains the name of the service."""
    handler = logging.StreamHandler(sys.stderr)
    # `fovea up` adds the name to every line itself.
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
    """Formats each message as one line, whatever it contains, and indents tracebacks so they cannot fake messages."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in `logging`
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {line.translate(_ESCAPES)}" for line in lines)


def _note_trace(record: logging.LogRecord) -> bool:
    """Adds the field `trace` to a record. Returns true, so the record is logged."""
    trace_id = tracing.trace_id()
    record.trace = f" trace={trace_id}" if trace_id else ""
    return True
