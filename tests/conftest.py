"""What all tests may ask for."""

from tests.postgresql import database_url, postgresql

__all__ = ["database_url", "postgresql"]
