"""Readable logs: one line an event, time, service, level, logger, message."""

import logging
import os
import sys


def configure(service: str, level: str = "INFO") -> None:
    """Sends all logging of this process to standard error, each line marked with the service's name."""
    handler = logging.StreamHandler(sys.stderr)
    # `fovea up` puts the name before every line itself.
    name = "" if os.environ.get("FOVEA_SUPERVISED") else f"{service:<8} "
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d {name}%(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for chatty in ("httpx", "urllib3", "asyncio", "aiosqlite"):
        logging.getLogger(chatty).setLevel("WARNING")
