"""Disturbs a Fovea of its own and checks what clients see: `python -m chaos [--seed 7] [--replay LOG]`."""

import argparse
import asyncio
import tempfile
from collections import Counter
from pathlib import Path

import fovea_tinyvlm
from chaos import checker, disk
from chaos.faults import deck, plan, read_log
from chaos.inventory import left_after_stop
from chaos.run import client_names, recoveries, run
from chaos.stack import running
from tests.postgresql import running_postgresql


def main() -> int:
    """Runs the command. Returns exit code 0 if no promise was broken, else 1."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="Seed that determines all faults.")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--gap-s", type=float, default=16.0, help="Mean seconds between faults.")
    parser.add_argument("--replay", type=Path, help="Repeat the faults of this faults.jsonl and ignore --seed.")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument(
        "--disk-mib", type=int, help="Size of the disk for saves in MiB. Default: 512, plus 10 per fault."
    )
    parser.add_argument(
        "--pause-s", type=float, default=1.0, help="Seconds between a client's rounds in the disturbed run."
    )
    parser.add_argument(
        "--shards", action="store_true", help="Run two gateways with a shard each, a router and a PostgreSQL."
    )
    parser.add_argument("--without", action="append", default=[], help="Leave out faults of this kind or target.")
    parser.add_argument("--folder", type=Path, help="Folder for histories and logs. Default: a new temporary folder.")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="fovea-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    every = deck(disk=disk.is_possible(), machine=True, shards=given.shards)
    cards = [card for card in every if not set(card) & set(given.without)]
    faults = read_log(given.replay) if given.replay else plan(given.seed, given.faults, cards, given.gap_s)
    for line in disk.limits():
        print(line)
    print(f"seed {given.seed}, {len(faults)} faults, {given.clients} clients; logs in {folder}", flush=True)

    async def whole(database_url: str) -> int:
        disk_mib = given.disk_mib or disk.LEAST_MIB + 10 * len(faults)
        model = fovea_tinyvlm.ensure()
        async with running(folder, model, disk_mib=disk_mib, database_url=database_url) as stack:
            clients = client_names(given.seed, given.clients)
            result = await run(stack, folder, clients, faults, given.pause_s)
            await stack.stop()
            left = left_after_stop(stack)
        print(result.summary())
        print(f"seconds until all serve again: {recoveries(result.happened)}")
        violations = [*result.violations, *checker.nothing_left(Counter(), Counter(), left)]
        print(checker.summary(violations), flush=True)
        return 1 if violations else 0

    if not given.shards:
        return asyncio.run(whole(""))
    with running_postgresql() as server:
        return asyncio.run(whole(server.new_url()))


if __name__ == "__main__":
    raise SystemExit(main())
