"""What all tests may ask for, and what holds for all of them."""

import logging

from tests.postgresql import database_url, postgresql

__all__ = ["database_url", "postgresql"]


def _is_no_missed_heartbeat(record: logging.LogRecord) -> bool:
    """Clients outlive the Fovea of their test: each beat that then fails is logged and buries a failure's own words."""
    return "Session heartbeat failed" not in record.getMessage()


logging.getLogger("tinker.lib.internal_client_holder").addFilter(_is_no_missed_heartbeat)
