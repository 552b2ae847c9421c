"""Hosts that servers are told to listen on."""

WILDCARDS = ("0.0.0.0", "::")
"""Those that stand for all addresses of a machine: nothing can be reached under them."""
