"""Fixtures of the gateway's contract tests: a bare client with a session, which parses a single certificate."""

from tests.contract.gateway.conftest import certificates, rest

__all__ = ["certificates", "rest"]
