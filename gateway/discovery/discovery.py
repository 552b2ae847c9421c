"""The interface of discovery: where the replicas of one service are, now and from now on."""

from collections.abc import AsyncGenerator
from typing import Protocol

Addresses = frozenset[str]
"""host:port of each replica that takes requests; [host]:port for IPv6."""


class Discovery(Protocol):
    """Finds the replicas of one service."""

    def watch(self) -> AsyncGenerator[Addresses, None]:
        """Yields all addresses as soon as they are known, then again whenever they change.

        A source that fails is asked again, with growing pauses; meanwhile what was last yielded holds. It ends only if
        nothing can change any more. An address that is missing from a later set leaves: it ends what it has begun and
        is sent nothing new.
        """
        ...
