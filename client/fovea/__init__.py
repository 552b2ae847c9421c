"""Fovea: self-hosted post-training for vision-language models.

This package contains what every process shares. It depends on numpy and gRPC, never on torch.
"""

import os

__version__ = "0.1.0"

_LOOPBACK = ("localhost", "127.0.0.1", "127.0.0.0/8", "::1")


def bypass_proxies() -> None:
    """Exempts loopback addresses from the proxies that the environment configures, for gRPC and HTTP alike.

    Importing `fovea` calls this function. gRPC, httpx, urllib and requests read these variables when they connect, and
    child processes inherit them. Without a proxy in the environment, nothing changes.
    """
    if not any(value and name.lower().endswith("_proxy") for name, value in os.environ.items()):
        return
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    of_grpc = os.environ.get("no_grpc_proxy") or given  # noqa: SIM112 - gRPC reads only this spelling
    if given.strip() != "*":  # a lone * already exempts all hosts, except in gRPC, which ignores it
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = _with_loopback(given)
    os.environ["no_grpc_proxy"] = _with_loopback(of_grpc)  # noqa: SIM112


def _with_loopback(hosts: str) -> str:
    named = [host.strip() for host in hosts.split(",") if host.strip()]
    return ",".join(dict.fromkeys((*named, *_LOOPBACK)))


bypass_proxies()
# Otherwise gRPC's core prints the end of each connection to a stopping service. Child processes inherit the variable.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
