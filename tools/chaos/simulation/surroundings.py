"""Replaces the functions of the operating system and network. Must be installed before the gateway is imported.

Modules keep references to what they import, such as `field(default_factory=time.time)`. Therefore the functions are
replaced once, and delegate to the current world. Outside a world they call the originals.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import grpc
import sqlalchemy as sa

from chaos.simulation.threads import Event

EPOCH_S = 1_800_000_000.0
"""Start time of each world."""
_TIMES: dict[str, Callable[[float], float]] = {
    "time": lambda now: EPOCH_S + now,
    "time_ns": lambda now: int((EPOCH_S + now) * 1e9),
    "monotonic": lambda now: 1000.0 + now,
    "perf_counter": lambda now: now,
}


class Surroundings(Protocol):
    """A world as its processes see it."""

    def now(self) -> float:
        """Returns seconds since its start."""
        ...

    def entropy(self, count: int) -> bytes:
        """Returns bytes drawn from its seed."""
        ...

    def open_channel(self, address: str) -> Any:
        """Returns a channel in place of gRPC's."""
        ...

    def free_bytes(self) -> int:
        """Returns the free bytes of its disk."""
        ...

    def limit(self, connection: sa.Connection) -> None:
        """Limits the database to the free space, before each transaction."""
        ...

    def connect_database(self) -> Any:
        """Returns a connection to its PostgreSQL, in place of psycopg's."""
        ...


_current: list[Surroundings] = []


@contextmanager
def inside(world: Surroundings) -> Iterator[None]:
    """Makes a world the current one."""
    _current.append(world)
    random.seed(world.entropy(16))  # for modules that use the global generator
    try:
        yield
    finally:
        _current.pop()


def install() -> None:
    """Installs the functions for the rest of this process."""
    for name, told in _TIMES.items():
        setattr(time, name, _timed(getattr(time, name), told))
    real_clock, real_entropy = time.clock_gettime, os.urandom
    real_channel, real_disk, real_allocate = grpc.aio.insecure_channel, os.statvfs, os.posix_fallocate

    def clock(number: int) -> float:
        return _current[-1].now() if _current else real_clock(number)

    def entropy(count: int) -> bytes:
        return _current[-1].entropy(count) if _current else real_entropy(count)

    def open_channel(address: str, *rest: Any, **options: Any) -> Any:
        return _current[-1].open_channel(address) if _current else real_channel(address, *rest, **options)

    def disk(path: Any) -> Any:
        return _Disk(_current[-1].free_bytes()) if _current else real_disk(path)

    def allocate(descriptor: int, offset: int, length: int) -> None:
        if not _current:
            real_allocate(descriptor, offset, length)

    for module, name, made_up in (
        (time, "clock_gettime", clock),
        (os, "urandom", entropy),
        (random, "_urandom", entropy),  # used by SystemRandom and by `secrets`
        (grpc.aio, "insecure_channel", open_channel),
        (os, "statvfs", disk),
        (os, "posix_fallocate", allocate),
        (threading, "Event", Event),
    ):
        setattr(module, name, made_up)
    sa.dialects.registry.register("postgresql.psycopg", "chaos.simulation.postgresql", "Dialect")

    @sa.event.listens_for(sa.Engine, "begin")
    def begin(connection: sa.Connection) -> None:
        if _current:
            _current[-1].limit(connection)


def connect_database() -> Any:
    """Returns a connection to the PostgreSQL of the current world."""
    return _current[-1].connect_database()


class _Disk:
    """The result of `os.statvfs`."""

    f_frsize = 1

    def __init__(self, free_bytes: int) -> None:
        self.f_bavail = self.f_bfree = free_bytes
        self.f_blocks = 2**40


def _timed(real: Callable[[], float], told: Callable[[float], float]) -> Callable[[], float]:
    return lambda: told(_current[-1].now()) if _current else real()
