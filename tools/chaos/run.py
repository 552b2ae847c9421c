"""One run: clients with faults, the same clients without faults, and a check of every promise."""

import asyncio
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos import checker
from chaos.checker import Violation
from chaos.faults import Fault, Happened, write_log
from chaos.history import History
from chaos.inventory import UNNAMED, Finish, Inventory, growth, ledger, saved_tensors, snapshots, take
from chaos.nemesis import Nemesis, until
from chaos.stack import MODEL_NAME, READY_S, Stack

_LEAVES_WITHIN_S = 60.0
"""Seconds after which sessions ended by their clients, and everything that belongs to them, must be gone."""
_MODEL = re.compile(r"sess-[0-9a-f]{16}(-[0-9]+)?:train:")
"""The id of a model; the group is its shard, None for the first one."""


@dataclass(frozen=True)
class Seen:
    """Observations of a run of all clients.

    Attributes:
        saved: Digests of tensors, keyed by client and saved state; for a snapshot, one digest of all its weights.
        grown: Inventory of what it left behind.
        exits: Exit code of each client.
    """

    history: History
    ledger: list[Finish]
    saved: dict[str, dict[str, str]]
    grown: Inventory
    exits: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Result:
    """Result of a complete run."""

    happened: list[Happened]
    disturbed: Seen
    undisturbed: Seen
    violations: list[Violation]

    def summary(self) -> str:
        """Returns a summary of a few lines for a terminal."""
        commands = self.disturbed.history.commands.values()
        counts = {kind: sum(one.fault.kind == kind for one in self.happened) for kind in _kinds(self.happened)}
        back = [one.back_s - one.healed_s for one in self.happened if one.back_s is not None]
        lines = [
            f"{len(self.happened)} faults in {self.disturbed.seconds:.0f} s: "
            + ", ".join(f"{count} {kind}" for kind, count in counts.items()),
            f"{len(commands)} commands of {len(self.disturbed.history.clients)} clients; undisturbed they take "
            f"{self.undisturbed.seconds:.0f} s",
            f"all services serve again after a fault: median {statistics.median(back):.1f} s, at most {max(back):.1f} s"
            if back
            else "no fault",
        ]
        return "\n".join([*lines, *(f"not made: {one.fault} ({one.note})" for one in self.happened if one.note)])


async def run(
    stack: Stack, folder: Path, clients: Sequence[str], plan: Sequence[Fault], pause_s: float = 0.0
) -> Result:
    """Runs the clients twice and checks the promises. Histories, faults and violations are written to `folder`.

    Args:
        stack: The Fovea under test.
        folder: Folder for the results.
        clients: Names of clients; each name determines all that its client does.
        plan: The faults.
        pause_s: Seconds between a client's rounds in the disturbed run.
    """
    stop = _folder(folder) / "stop"
    # Resources that stay open after the first command, such as the transfer group for weights, are not leftovers. The
    # router gives each shard one of two clients.
    before = [f"samples-before{number}" for number in range(2 if stack.database_url else 1)]
    await run_clients(stack, folder / "before", before, stop, rounds=dict.fromkeys(before, 2))
    at_first = await _settled(stack, Counter())
    disturbed = asyncio.create_task(run_clients(stack, folder / "disturbed", clients, stop, pause_s=pause_s))
    await _begun(folder / "disturbed", clients, disturbed, shards=len(before))
    start = time.monotonic()
    happened = await Nemesis(stack, lambda fault: print(fault, flush=True)).run(plan)
    write_log(folder / "faults.jsonl", happened, start)
    stop.touch()
    exits = await disturbed
    seconds = time.monotonic() - start
    history = _history(folder / "disturbed")
    rounds = {client: history.rounds(client) for client in clients}
    # Take the inventory when the run has left as little as the undisturbed one, or after the same time.
    seen_first = await _settled(stack, at_first)
    first = _seen(stack, history, seen_first, at_first, exits, seconds)
    begun = time.monotonic()
    exits = await run_clients(stack, folder / "undisturbed", clients, stop, rounds=rounds)
    seconds = time.monotonic() - begun
    seen_second = await _settled(stack, seen_first)
    second = _seen(stack, _history(folder / "undisturbed"), seen_second, seen_first, exits, seconds)
    violations = _check(happened, first, second) + checker.no_alarm(stack.log.read_text(errors="replace"))
    (folder / "violations.txt").write_text("".join(f"{one}\n" for one in violations))
    return Result(happened, first, second, violations)


def _check(happened: Sequence[Happened], disturbed: Seen, undisturbed: Seen) -> list[Violation]:
    last_fault_s = max((one.back_s or one.healed_s for one in happened), default=0.0)
    failed = [f"client {name} ended with code {code}" for name, code in disturbed.exits.items() if code]
    failed += [f"undisturbed client {name} ended with code {code}" for name, code in undisturbed.exits.items() if code]
    return [
        *(Violation("answered once", what) for what in failed),
        *checker.answered_once(disturbed.history),
        *checker.in_order(disturbed.history, disturbed.ledger),
        *checker.same_results(disturbed.history, undisturbed.history),
        *checker.same_weights(disturbed.saved, undisturbed.saved),
        *checker.named_snapshot(disturbed.history, undisturbed.history),
        *checker.in_time(disturbed.history, last_fault_s),
        *checker.nothing_left(_collected(disturbed.grown, happened), undisturbed.grown),
    ]


def _collected(grown: Inventory, happened: Sequence[Happened]) -> Inventory:
    """Returns an inventory without the folders that killed gateways left for the collector: at most one for each."""
    kills = sum(one.fault.kind == "kill" and one.fault.target in ("gateway", "gateway2") for one in happened)
    return Counter({name: count for name, count in grown.items() if name != UNNAMED or count > kills})


async def run_clients(
    stack: Stack, folder: Path, names: Sequence[str], stop: Path, *, rounds: dict[str, int] | None = None,
    pause_s: float = 0.0,
) -> dict[str, int]:  # fmt: skip
    """Runs all clients to their end, each in its own process. Returns their exit codes."""
    processes = {}
    _folder(folder)
    for name in names:
        command = [
            *(
                sys.executable,
                "-m",
                "chaos.client",
                "--base-url",
                stack.base_url,
                "--model",
                MODEL_NAME,
                "--name",
                name,
            ),
            *("--history", str(folder / f"{name}.jsonl"), "--stop", str(stop), "--pause-s", str(pause_s)),
            *(("--rounds", str(rounds[name])) if rounds else ()),
        ]
        with (folder / f"{name}.log").open("w") as log:
            environment = os.environ | {"TINKER_TELEMETRY": "0"}
            processes[name] = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=environment)
    return {name: await process.wait() for name, process in processes.items()}


async def _begun(folder: Path, names: Sequence[str], clients: asyncio.Task[dict[str, int]], shards: int) -> None:
    """Waits until each client has sent a command and each shard has a model.

    Faults before that would affect no client, and a gateway that dies before the SDK has opened the sessions gets none.
    """
    files = [folder / f"{name}.jsonl" for name in names]

    def has_begun() -> bool:
        histories = [file.read_text() for file in files if file.exists()]
        found = {match[1] for history in histories if (match := _MODEL.search(history))}
        return len(histories) == len(files) and all(histories) and len(found) == shards

    await until(lambda: clients.done() or has_begun(), READY_S)


async def _settled(stack: Stack, before: Inventory) -> Inventory:
    """Returns the inventory once it has not changed for some seconds, or after the timeout."""
    deadline, found, same = time.monotonic() + _LEAVES_WITHIN_S, before, 0
    while same < 3 and time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        now = take(stack)
        same = same + 1 if now == found else 0
        found = now
    return found


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _history(folder: Path) -> History:
    return History.read(sorted(folder.glob("*.jsonl")))


def _seen(
    stack: Stack, history: History, now: Inventory, before: Inventory, exits: dict[str, int], seconds: float
) -> Seen:
    made = [one for one in history.commands.values() if one.operation == "create_model" and one.answers]
    saved = {}
    for one in history.commands.values():
        if one.operation == "save_state" and one.answers and not one.answers[0].error:
            name = f"{one.client} {one.arguments['name']}"
            saved[name] = saved_tensors(stack, one.answers[0].value["path"])
    for one in made:
        if not one.answers[0].error:
            digests = snapshots(stack, one.answers[0].value["model_id"])
            saved |= {f"{one.client} snapshot {number}": {"weights": each} for number, each in enumerate(digests)}
    scopes = [one.answers[0].value["model_id"] for one in made if not one.answers[0].error]
    return Seen(history, ledger(stack, scopes), saved, growth(before, now), exits, seconds)


def _kinds(happened: Sequence[Happened]) -> list[str]:
    return sorted({one.fault.kind for one in happened})


def recoveries(happened: Sequence[Happened]) -> str:
    """Returns, as JSON for the record, the seconds until all services served again, by killed target."""
    by_target: dict[str, list[float]] = {}
    for one in happened:
        if one.fault.kind in ("kill", "terminate") and one.back_s is not None:
            by_target.setdefault(f"{one.fault.kind} {one.fault.target}", []).append(round(one.back_s - one.healed_s, 1))
    return json.dumps({name: sorted(values) for name, values in sorted(by_target.items())})


def client_names(seed: int, count: int) -> list[str]:
    """Returns the names of clients. Every second client also samples."""
    return [f"{('samples', 'trains')[number % 2]}-{seed}-{number}" for number in range(count)]
