"""The run of one seed: services start, clients work, faults happen, and every promise is checked."""

import asyncio
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from chaos import checker
from chaos.checker import Violation
from chaos.inventory import Inventory
from chaos.simulation import surroundings
from chaos.simulation.database_files import DatabaseFiles
from chaos.simulation.database_files import make_template as make_single_template
from chaos.simulation.event_loop import Stuck
from chaos.simulation.faults import Nemesis
from chaos.simulation.postgresql import SharedDatabase, make_shared_template
from chaos.simulation.world import World, scratch_folder

_GIVE_UP_S = 1800.0
_LEAVES_WITHIN_S = 240.0
_LOOK_S = 2.0


@dataclass
class Outcome:
    """Result of one seed.

    Attributes:
        trace: Events, for readers and for the comparison of two runs.
    """

    seed: int
    commands: int = 0
    faults: int = 0
    virtual_s: float = 0.0
    steps: int = 0
    violations: list[Violation] = field(default_factory=list)
    trace: str = ""


class _Alarms(logging.Handler):
    """Collects the gateway's error logs: it must tolerate all faults of a simulation without an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        self.told.append(text)


_EXPECTED = ("the disk of ", "another gateway has taken over the state")
"""Errors that a fault causes on purpose."""


def make_template(folder: Path, shard_count: int = 1) -> Path:
    """Creates the tables of a database, which all seeds copy."""
    if shard_count > 1:
        return make_shared_template(folder / "shards", shard_count)
    return make_single_template(folder / "template.db")


def run_seed(seed: int, template: Path, trainer_count: int = 1, shard_count: int = 1) -> Outcome:
    """Runs one seed."""
    with scratch_folder() as folder, _quiet():
        files = (SharedDatabase if shard_count > 1 else DatabaseFiles)(folder, template)
        return _run(World(seed, files, trainer_count, shard_count))


def _run(world: World) -> Outcome:
    alarms, outcome = _Alarms(), Outcome(world.seed)
    logging.getLogger().addHandler(alarms)
    try:
        with surroundings.inside(world):
            world.loop.run(_live(world, outcome))
    except Stuck as error:
        outcome.violations.append(Violation("in time", str(error)))
    finally:
        logging.getLogger().removeHandler(alarms)
    told = [text for text in alarms.told if not text.startswith(_EXPECTED)]
    outcome.violations += [Violation("no alarm", text) for text in [*told, *world.loop.complaints]]
    outcome.commands, outcome.virtual_s = len(world.history.commands), world.now()
    outcome.steps = world.loop.steps
    outcome.trace = repr((world.history, world.now(), world.loop.steps))
    return outcome


async def _live(world: World, outcome: Outcome) -> None:
    await world.start_all()
    nemesis = Nemesis(world)
    clients = [asyncio.create_task(client.run(), name=client.name) for client in world.clients]
    disturbing = asyncio.create_task(nemesis.run())
    _, unfinished = await asyncio.wait([*clients, disturbing], timeout=_GIVE_UP_S)
    outcome.faults = nemesis.count
    for task in unfinished:
        outcome.violations.append(Violation("in time", f"{task.get_name()} has not ended after {_GIVE_UP_S:.0f} s"))
        task.cancel()
    if disturbing.done():
        disturbing.result()
    for client, task in zip(world.clients, clients, strict=True):
        if task.done() and not task.cancelled() and (error := task.exception()):
            outcome.violations.append(Violation("answered once", f"{client.name} gave up: {error!r}"))
    await _settle(world, outcome)
    running = [address for address in world.gateway_addresses if address in world.processes]
    left = [name for address in running for name in await world.stop_gateway(address)]
    outcome.violations += [Violation("nothing left", f"task {name} goes on after the stop") for name in left]
    outcome.violations += _check(world, nemesis.last_s)


async def _settle(world: World, outcome: Outcome) -> None:
    """Waits until everything that belonged to ended sessions is gone."""
    deadline = world.now() + _LEAVES_WITHIN_S
    while True:
        await asyncio.sleep(_LOOK_S)
        differing = checker.nothing_left(_found(world), _should(world))
        if not differing or world.now() > deadline:
            break
    outcome.violations += differing


def _found(world: World) -> Inventory:
    found = Inventory({name: count for name, count in world.files.rows().items() if name in _ROWS})
    found["models in the trainer"] = sum(len(trainer.models) for trainer in world.trainers.values())
    found["durable points"] = len(world.trainer_disk.points)
    found["snapshots kept for recovery"] = len(world.trainer_disk.snapshots)
    # Named snapshots may be sampled again, and are evicted only when a sampler is full.
    named = {snapshot_id for (snapshot_id,) in world.files.read("SELECT snapshot_id FROM snapshots WHERE uri <> ''")}
    found["adapters in samplers"] = sum(len(sampler.adapters.keys() - named) for sampler in world.samplers.values())
    found["pending futures"] = sum(one.components.futures.pending_count for one in world.gateways.values())
    return +found


_ROWS = ("rows of journal", "rows of journal_requests", "rows of sessions", "rows of models")


def _should(world: World) -> Inventory:
    """Returns what clients that ended their sessions leave: results and names, which they may still request."""
    clients = len(world.clients)
    return Inventory({"rows of sessions": clients, "rows of models": clients})


def _check(world: World, last_fault_s: float) -> list[Violation]:
    disk = world.trainer_disk
    saved: dict[str, dict[str, str]] = {}
    should: dict[str, dict[str, str]] = {}
    for client in world.clients:
        kept = {**client.saved, **client.saved_for_samplers}
        should |= {path: {"weights": weights} for path, weights in kept.items()}
    for path, uri in world.files.read("SELECT path, uri FROM checkpoints"):
        if uri in disk.saved:
            saved[path] = {"weights": disk.saved[uri].weights}
    history, undisturbed = world.history, world.undisturbed
    last = {client.model_id: client.last_seq_id for client in world.clients}
    ledger = [finish for finish in world.files.ledger(last) if finish.seq_id <= last[finish.scope]]
    return [
        *checker.answered_once(history),
        *checker.in_order(history, ledger),
        *checker.same_results(history, undisturbed),
        *checker.same_weights(saved, should),
        *checker.named_snapshot(history, undisturbed),
        *checker.in_time(history, 1000.0 + last_fault_s),
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Disables garbage collection while a seed runs, so that its timing is reproducible.

    Also silences warnings about objects collected later: tasks of killed processes never ended.
    """
    hook = sys.unraisablehook
    gc.freeze()  # objects from imports are not scanned again
    gc.disable()
    try:
        yield
    finally:
        sys.unraisablehook = lambda _: None
        logging.disable()
        with warnings.catch_warnings(action="ignore"):
            gc.collect()
        logging.disable(logging.NOTSET)
        sys.unraisablehook = hook
        gc.enable()
