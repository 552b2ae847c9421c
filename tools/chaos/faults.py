"""Plans of faults, drawn from a seed, and logs of the faults that were made. A log can be replayed as a plan."""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos.links import Trouble
from chaos.stack import GATEWAYS, LINKS


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at_s: Seconds since the start of the run.
        kind: kill, terminate, stop, full-disk, or a Trouble of links.
        target: An entry of TARGETS or LINKS, or the disk.
        for_s: Duration in seconds; 0 for a process that ends.
        delay_s: Delay of each chunk on a slow link, in seconds.
    """

    at_s: float
    kind: str
    target: str
    for_s: float = 0.0
    delay_s: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.for_s:.1f} s" if self.for_s else ""
        return f"{self.at_s:7.1f} s  {self.kind} {self.target}{lasting}"


@dataclass(frozen=True)
class Happened:
    """A fault that was made. Times are from `time.monotonic`.

    Attributes:
        fault: The planned fault.
        begun_s, healed_s: When it started, and when it was fully undone.
        back_s: When all services served again; None if that was not awaited.
        note: What could not be done.
    """

    fault: Fault
    begun_s: float
    healed_s: float
    back_s: float | None = None
    note: str = ""


KILLED_OFTEN = ("gateway", "renderer", "renderer.worker")
KILLED = ("sampler", "sampler.engine", "trainer", "trainer.rank0", "trainer.rank1")
STOPPED = ("gateway", "renderer", "renderer.worker", "sampler", "sampler.engine", "trainer", "trainer.rank0",
           "trainer.rank1")  # fmt: skip
PAIRS = 0.25
"""Fraction of faults that the next one joins immediately."""


def deck(*, disk: bool, machine: bool, shards: bool = False) -> list[tuple[str, str]]:
    """Returns (kind, target) of the faults that are made before any is repeated. Faults with fast recovery occur more
    often.

    Args:
        disk: Whether the disk can be filled.
        machine: Whether all processes may be killed at once.
        shards: Whether there are two gateways and a router.
    """
    cards = [("kill", target) for target in (*KILLED, *KILLED_OFTEN, *KILLED_OFTEN)]
    cards += [("terminate", target) for target in ("gateway", "renderer", "sampler", "trainer")]
    cards += [("stop", target) for target in STOPPED]
    cards += [(trouble, link) for trouble in (Trouble.CUT, Trouble.HANG, Trouble.SLOW) for link in LINKS]
    cards += [(kind, target) for kind in ("kill", "terminate", "stop") for target in GATEWAYS[1:] if shards]
    cards += [("full-disk", "disk")] * (2 if disk else 0)
    cards += [("kill", "everything")] * (1 if machine else 0)
    return cards


def brief_deck(*, disk: bool) -> list[tuple[str, str]]:
    """Returns twenty faults for a run of a minute: each kind, service and link at least once, few of them slow to
    recover.
    """
    return [
        *(("kill", target) for target in ("trainer", "gateway", "renderer", "sampler.engine", "trainer.rank1")),
        *(("terminate", target) for target in ("gateway", "renderer.worker")),
        *(("stop", target) for target in ("gateway", "sampler", "trainer.rank0", "renderer")),
        *((Trouble.CUT, link) for link in ("client-gateway", "gateway-trainer", "sampler-renderer")),
        *((Trouble.HANG, link) for link in ("gateway-sampler", "gateway-renderer")),
        *((Trouble.SLOW, link) for link in ("client-gateway", "trainer-renderer", "gateway-trainer")),
        *([("full-disk", "disk")] if disk else [("stop", "trainer")]),
    ]


def shards_deck() -> list[tuple[str, str]]:
    """Returns twelve faults for a run of a minute with two gateways: each is killed, stopped and terminated, as is
    their router, and loses its links.
    """
    return [
        *((kind, target) for kind in ("kill", "terminate", "stop") for target in GATEWAYS),
        (Trouble.CUT, "gateway-trainer"),
        (Trouble.HANG, "gateway-sampler"),
        (Trouble.CUT, "client-gateway"),
    ]


def plan(seed: int, count: int, cards: list[tuple[str, str]], mean_gap_s: float) -> list[Fault]:
    """Returns `count` faults from a deck that is shuffled repeatedly. Some come in pairs, the others at random
    intervals.
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    at_s = 0.0
    waiting: list[tuple[str, str]] = []
    while len(faults) < count:
        waiting = waiting or chance.sample(cards, len(cards))
        kind, target = waiting.pop()
        is_second = bool(faults) and chance.random() < PAIRS
        at_s += chance.uniform(0.0, 0.3) if is_second else chance.expovariate(1 / mean_gap_s)
        lasting = {"kill": 0.0, "terminate": 0.0}.get(kind, chance.uniform(0.5, 4.0))
        delay_s = chance.uniform(0.01, 0.15) if kind == Trouble.SLOW else 0.0
        faults.append(Fault(round(at_s, 2), kind, target, round(lasting, 2), round(delay_s, 3)))
    return faults


def write_log(path: Path, happened: Iterable[Happened], start_s: float) -> None:
    """Writes one line per fault, with the actual times."""
    with path.open("w") as file:
        for one in happened:
            fault = asdict(one.fault) | {"at_s": round(one.begun_s - start_s, 2)}
            times = {"healed_s": one.healed_s, "back_s": one.back_s, "note": one.note}
            file.write(json.dumps({"fault": fault, **times}) + "\n")


def read_log(path: Path) -> list[Fault]:
    """Reads a log as a plan that repeats its faults."""
    return list(_faults(path.read_text().splitlines()))


def _faults(lines: Iterable[str]) -> Iterator[Fault]:
    for line in lines:
        yield Fault(**json.loads(line)["fault"])
