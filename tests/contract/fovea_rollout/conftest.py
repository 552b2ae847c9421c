"""What the gateway's own contract tests have: a bare client with a session, whose kind reads one certificate."""

from tests.contract.gateway.conftest import certificates, rest

__all__ = ["certificates", "rest"]
