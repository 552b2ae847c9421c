"""Measures two trainers against one: `python -m benchmarks.two_trainers --up STATE_DIR/up.json --tenants 8`.

The Fovea must run with `fovea up --trainers 2`. In turns, the second trainer is drained, or both are used. Each round
opens new tenants: sessions with a LoRA model that take the same steps, each in its own thread. The figures are the
datums/s of both trainers against those of one, the seconds of a step, and the cores that each process kept busy, which
shows what limits.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.figure import emit
from benchmarks.running import Running, busy
from benchmarks.tenants import Rounds, Tenant, add_options, measure

_APPLIED_S = 3.0
"""Seconds after which a running gateway has certainly read that a trainer is drained or in use again."""


def drain(state_dir: Path, address: str, *, undo: bool) -> None:
    """Drains a trainer, or uses it again."""
    command = [sys.executable, "-m", "fovea.cli.main", "drain", address, "--state-dir", str(state_dir)]
    subprocess.run([*command, *(["--undo"] if undo else [])], check=True, stdout=subprocess.DEVNULL)
    time.sleep(_APPLIED_S)


def take_round(running: Running, options: argparse.Namespace, rounds: Rounds) -> None:
    """Opens the tenants, lets each take its steps, and closes them."""
    tenants = [Tenant.open(running.base_url, options, number) for number in range(options.tenants)]
    measure(tenants, 2)  # warms up
    with running.cores() as cores:
        times = measure(tenants, options.steps)
    rounds.add(times, options.datums, 0.0, cores)
    for tenant in tenants:
        tenant.bench.service.close("success")


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=8)
    add_options(parser, "fovea up --trainers 2")
    options = parser.parse_args()
    running = Running.read(options.up)
    found = {1: Rounds(), 2: Rounds()}
    for _ in range(options.repeats):
        for count, rounds in found.items():
            drain(options.up.parent, running.addresses["trainer2"], undo=count == 2)
            take_round(running, options, rounds)
    sizes = {"tenants": options.tenants, "datums": options.datums, "length": options.length, "steps": options.steps}
    for count, rounds in found.items():
        one = found[1] if count == 2 else None
        sizes |= {"trainers": count, "model": Path(running.model).name}
        used = busy(rounds.cores)
        emit(
            "trainers.datums", rounds.datum_rates, "datum/s", one.datum_rates if one else None, **sizes, busy_cores=used
        )
        emit("trainers.step", rounds.steps, "s", one.steps if one else None, **sizes)


if __name__ == "__main__":
    main()
