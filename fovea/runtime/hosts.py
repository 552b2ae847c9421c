"""Hosts that servers are told to listen on."""

import ipaddress

WILDCARDS = ("0.0.0.0", "::")
"""Those that stand for all addresses of a machine: nothing can be reached under them."""


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
