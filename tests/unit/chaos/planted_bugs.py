"""Planted bugs: `python -m tests.unit.chaos.planted_bugs NAME...` plants each bug in its own gateway and runs seeds
until one breaks a promise; prints the seed.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_SEEDS = 200
FIRST = {
    "replay_skips_a_command": 81,
    "commands_without_numbers": 1,
    "newest_snapshot_sampled": 7,
    "ownership_not_checked": 24,
    "keys_of_one_shard": 4,
}
"""The seed that revealed each bug last; the search begins there and then tries all others."""


def answer_not_kept() -> None:
    """Other changes of a command are not written together with its answer."""
    from fovea_gateway.sessions.futures import Futures

    keep = Futures.finish
    _put(Futures, "finish", lambda self, pending, outcome, also=(): keep(self, pending, outcome))


def journal_row_dropped() -> None:
    """Steps leave no row in the journal."""
    from fovea_gateway.sessions.future import Kind
    from fovea_gateway.training.journal import Journal

    record = Journal.record

    def leave_out(self: Journal, model: Any, submission: Any, *rest: Any) -> Any:
        return [] if submission.kind is Kind.OPTIM_STEP else record(self, model, submission, *rest)

    _put(Journal, "record", leave_out)


def replay_skips_a_command() -> None:
    """The replay skips the first command after a durable point."""
    from fovea_gateway.training.trainer_queue import Replay

    remaining = Replay._remaining

    async def skip(self: Replay, model: Any, restored: int | None, problem: str) -> Any:
        return (await remaining(self, model, restored, problem))[bool(restored) :]

    _put(Replay, "_remaining", skip)


def commands_without_numbers() -> None:
    """The trainer does not get the number of a step, so a repeated request runs twice."""
    from fovea.client import TrainerClient

    step = TrainerClient.optim_step
    _put(TrainerClient, "optim_step", lambda self, model_id, adam, timeout_s=None, seq_id=0: step(self, model_id, adam))


def submission_not_kept() -> None:
    """A submission is accepted and not stored."""
    from fovea_gateway.sessions import futures

    _put(futures.rows, "insert", lambda connection, accepted: [True for _ in accepted])


def newest_snapshot_sampled() -> None:
    """Sampling sessions follow their model, although clients asked for one snapshot."""
    from fovea_gateway.sampling.sampling_sessions import Sampling

    begin = Sampling.open_on_snapshot
    _put(Sampling, "open_on_snapshot", lambda self, session_id, base_model, model_id, snapshot_id, inflight: begin(
        self, session_id, base_model, model_id, snapshot_id, True
    ))  # fmt: skip


def ownership_not_checked() -> None:
    """A gateway that has lost its session of the database writes on another one, while its shard has a new owner."""
    from fovea_gateway.database.ownership import SessionOwnership, Shards

    claim = Shards.claim

    def take(self: Shards, connection: Any, may_change: bool) -> bool:
        return claim(self, connection, may_change) or not may_change

    _put(Shards, "claim", take)
    _put(SessionOwnership, "mark", lambda self, connection, number: None)
    _put(SessionOwnership, "last_mark", lambda self, connection: 0)


def keys_of_one_shard() -> None:
    """The key of a creation is looked for in one shard only."""
    from fovea_gateway.database.database import Database
    from fovea_gateway.database.ownership import Shards

    _put(Shards, "is_elsewhere", lambda self, connection, table, values: False)
    _put(Database, "read_whole", Database.read)


BUGS: list[Callable[[], None]] = [
    answer_not_kept, journal_row_dropped, replay_skips_a_command, commands_without_numbers, submission_not_kept,
    newest_snapshot_sampled,
]  # fmt: skip
BUGS_OF_SHARDS: list[Callable[[], None]] = [ownership_not_checked, keys_of_one_shard]
"""Those that show with two gateways."""


def _put(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def is_found(name: str, folder: Path) -> bool:
    """Plants a bug for the rest of this process, and prints the seed that breaks a promise."""
    from chaos.simulation.seed_run import make_template, run_seed

    bug = next(bug for bug in (*BUGS, *BUGS_OF_SHARDS) if bug.__name__ == name)
    shard_count = 2 if bug in BUGS_OF_SHARDS else 1
    template = make_template(folder, shard_count)
    bug()
    first = FIRST.get(name, 0)
    for seed in (*range(first, MOST_SEEDS), *range(first)):
        if violations := run_seed(seed, template, shard_count=shard_count).violations:
            print(f"{name}: seed {seed}: {violations[0]}", flush=True)
            return True
    print(f"{name}: no seed breaks a promise", flush=True)
    return False


def main(names: list[str]) -> int:
    """Returns 0 if all bugs were found. Each is searched in a fork of this process, which has imported the gateway."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "tests.unit.chaos.planted_bugs", *names]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})
    from chaos.simulation import surroundings

    surroundings.install()
    from chaos.simulation.world import scratch_folder

    logging.getLogger().addHandler(logging.NullHandler())
    failed = 0
    for name in names:
        with scratch_folder() as folder:
            if not (child := os.fork()):
                status = 2  # for an exception; its traceback is printed
                try:
                    status = 0 if is_found(name, folder) else 1
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            failed |= os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
