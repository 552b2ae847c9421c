"""What the gateway's own contract tests have: a bare client with a session."""

from tests.contract.gateway.conftest import rest

__all__ = ["rest"]
